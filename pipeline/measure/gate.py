"""The quality gate: what was measured against what the config allows, and how sure that is.

It reads the verification report as plain data. A limit is kept when the whole confidence interval keeps it
(pass), broken when the whole interval breaks it (fail); in between the text was too short to tell
(inconclusive), which is a verdict of its own and not a pass. Each limit is judged at the confidence asked
for by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pipeline.config.schema import QualityConfig
from pipeline.errors import GateFailed, MeasurementError, Problem, TrtpipeError
from pipeline.measure.quality import (
    Interval,
    drop_between_items,
    mean_per_token,
    share_of_items,
    share_of_tokens,
)

Outcome = Literal["pass", "fail", "inconclusive"]


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One metric: its interval, and the limit with its verdict when the config sets one."""

    metric: str
    interval: Interval
    bound: Literal["max", "min"] = "max"
    limit: float | None = None

    @property
    def outcome(self) -> Outcome:
        """Where the interval lies; a metric without a limit passes."""
        if self.limit is None:
            return "pass"
        low, high = self.interval.low, self.interval.high
        kept, broken = (high <= self.limit, low > self.limit)
        if self.bound == "min":
            kept, broken = (low >= self.limit, high < self.limit)
        return "pass" if kept else "fail" if broken else "inconclusive"

    def document(self) -> dict[str, Any]:
        """As JSON."""
        limit = {} if self.limit is None else {"limit": self.limit, "bound": self.bound, "verdict": self.outcome}
        return {"metric": self.metric, **self.interval.document(), **limit}

    def __str__(self) -> str:
        """Say the numbers: metric, estimate, interval, limit."""
        ends = (self.interval.low, self.interval.high)
        low, high = (f"{end:.4g}" if math.isfinite(end) else "?" for end in ends)
        words = {"max": "at most", "min": "at least"}[self.bound]
        limit = "" if self.limit is None else f", allowed {words} {self.limit:g}"
        return f"{self.metric} {self.interval.estimate:.4g} [{low}, {high}]{limit}"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Every measure of one checkpoint and what follows from them; without scores there is no measure."""

    perplexity: float | None
    source_perplexity: float | None
    blocks: int
    measures: tuple[Measure, ...]
    confidence: float
    accept_inconclusive: bool
    not_measured: tuple[str, ...] = ()

    @property
    def outcome(self) -> Outcome:
        """The worst of all measures: fail before inconclusive before pass."""
        outcomes = {measure.outcome for measure in self.measures}
        return "fail" if "fail" in outcomes else "inconclusive" if "inconclusive" in outcomes else "pass"

    @property
    def accepted(self) -> bool:
        """Whether the build may go on."""
        return self.outcome == "pass" or (self.outcome == "inconclusive" and self.accept_inconclusive)

    def measure(self, metric: str) -> Interval:
        """The interval of a metric by name."""
        return next(measure.interval for measure in self.measures if measure.metric == metric)

    def reasons(self) -> tuple[str, ...]:
        """One line for each limit that is not kept for certain."""
        return tuple(f"{measure.outcome}: {measure}" for measure in self.measures if measure.outcome != "pass")

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "verdict": self.outcome,
            "accepted": self.accepted,
            "confidence": self.confidence,
            "blocks": self.blocks,
            "perplexity": self.perplexity,
            "source_perplexity": self.source_perplexity,
            "not_measured": list(self.not_measured),
            "measures": [measure.document() for measure in self.measures],
        }

    def require_accepted(self) -> None:
        """Raise what a build that must not go on ends with.

        Raises:
            GateFailed: a limit is broken for certain.
            MeasurementError: the measurement cannot tell, and quality.inconclusive does not accept that.
        """
        if not self.accepted:
            problems = [Problem(message=reason) for reason in self.reasons()]
            raise refusal(self.outcome, "the checkpoint does not pass its quality gate", problems)


def refusal(outcome: Outcome, message: str, problems: list[Problem], *, hint: str = "") -> TrtpipeError:
    """Return the error of a gate that did not pass; `hint` takes the place of what helps a build."""
    if outcome == "fail":
        safer = "Take a safer format, exclude sensitive layers, or list steps to try under 'fallback'."
        return GateFailed(message, problems=problems, hint=hint or safer)
    longer = "Raise quality.num_tokens (verify.dataset holds the text), or set quality.inconclusive: accept."
    return MeasurementError(f"{message}: the measurement cannot tell", problems=problems, hint=hint or longer)


def judge(report: Mapping[str, Any], quality: QualityConfig) -> Verdict:
    """Judge a verification report (report.json) by the limits of the config.

    Raises:
        MeasurementError: there is a limit, and the report holds no scores.
    """
    if not report.get("blocks") and quality.limited:
        hint = "A source that is quantized already is scored against verify.reference: name its 16-bit checkpoint."
        raise MeasurementError("the verification report holds no scores to judge", hint=hint)
    scores, blocks = report["end_to_end"] or {}, report["blocks"] or {}
    return Verdict(
        perplexity=scores.get("perplexity"),
        source_perplexity=scores.get("source_perplexity"),
        blocks=len(blocks.get("tokens", ())),
        measures=(*_of_text(blocks, quality), *_of_tasks(report.get("tasks", ()), quality)) if blocks else (),
        confidence=quality.confidence,
        accept_inconclusive=quality.inconclusive == "accept",
        not_measured=tuple(report.get("not_run", ())),
    )


def _of_text(blocks: Mapping[str, Any], quality: QualityConfig) -> Iterator[Measure]:
    """Perplexity, KL and top-1 from sums over blocks.

    The perplexity ratio is exp of the mean difference of negative log-likelihood, a monotone function: the
    ends of its interval are those of the difference.
    """
    tokens, confidence = blocks["tokens"], quality.confidence
    extra = [nll - source for nll, source in zip(blocks["nll"], blocks["source_nll"], strict=True)]
    nll = mean_per_token(extra, tokens, confidence)
    increase = Interval(estimate=math.expm1(nll.estimate), low=_expm1(nll.low), high=_expm1(nll.high))
    yield Measure(metric="perplexity_increase", interval=increase, limit=quality.max_perplexity_increase)
    yield Measure(metric="kl_nats", interval=mean_per_token(blocks["kl"], tokens, confidence), limit=quality.max_kl)
    agreement = share_of_tokens(blocks["agreed"], tokens, confidence)
    yield Measure(metric="top1_agreement", interval=agreement, bound="min", limit=quality.min_top1_agreement)


def _expm1(value: float) -> float:
    """exp(value) - 1 without overflow."""
    return math.inf if value > math.log(1e300) else math.expm1(value)


def _of_tasks(tasks: Any, quality: QualityConfig) -> Iterator[Measure]:  # noqa: ANN401 - parsed JSON
    for task in tasks:
        before, after = task["source"], task["quantized"]
        score = share_of_items(after, quality.confidence)
        yield Measure(metric=f"score of {task['file']}", interval=score, bound="min", limit=quality.min_task_score)
        drop = drop_between_items(before, after, quality.confidence)
        yield Measure(metric=f"drop of {task['file']}", interval=drop, limit=quality.max_task_drop)
