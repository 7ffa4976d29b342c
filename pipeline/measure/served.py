"""Conformance of a running deployment, asked as users ask it: the same question must not depend on how it comes.

    streamed = unary   the chunks of a stream add up to the one answer
    warm = cold        a prefix that the cache knows changes nothing
    batch N = batch 1  neighbours in the batch change nothing
    length             answers are as long as the baseline's, within 10 % on both sides
    score, drop        questions with known answers: how many are right, and how many fewer than the baseline's

Greedy answers of a correct engine can still part where two tokens are nearly tied, because other shapes are
other orders of summation; so the second and third rule ask for a share of equal answers, the first for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from pipeline.errors import MeasurementError
from pipeline.measure.gate import Measure, Outcome
from pipeline.measure.quality import Interval, drop_between_items, mean_per_token, share_of_items

LENGTH_TOLERANCE = 0.1


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A whole greedy answer; tokens: None when the server does not count them."""

    text: str
    tokens: int | None


Ask = Callable[[str, bool], Answer]
"""Ask a prompt, streamed or not, greedily and to the end."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One rule: what was seen, what is asked for, and the verdict; `figures` are what was seen as numbers."""

    rule: str
    seen: str
    wanted: str
    outcome: Outcome
    example: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return dict(vars(self))


def conformance(
    ask: Ask, prompts: Sequence[str], *, concurrency: int, min_agreement: float, nonce: str
) -> tuple[tuple[Finding, ...], tuple[Answer, ...]]:
    """Ask every prompt in every way; return the findings and the unary answers, asked one at a time.

    Args:
        ask: the deployment.
        prompts: what to ask.
        concurrency: requests in flight for batch N.
        min_agreement: share of equal answers wanted of warm = cold and of batch N = batch 1.
        nonce: text that no prompt before began with, so that the first time it is asked its prefix is cold.
    """
    # Two passes: the second meets the same warm prefixes streamed that it meets unary.
    cold = [ask(f"{nonce} {prompt}", False).text for prompt in prompts]
    warm = [ask(f"{nonce} {prompt}", False).text for prompt in prompts]
    for prompt in prompts:
        ask(prompt, False)
    unary = tuple(ask(prompt, False) for prompt in prompts)
    streamed = [ask(prompt, True).text for prompt in prompts]
    with ThreadPoolExecutor(concurrency) as pool:
        together = [answer.text for answer in pool.map(lambda prompt: ask(prompt, False), prompts)]
    alone = [answer.text for answer in unary]
    findings = (
        _agreement("streamed = unary", prompts, alone, streamed, least=1.0),
        _agreement("warm = cold", prompts, cold, warm, least=min_agreement),
        _agreement(f"batch {concurrency} = batch 1", prompts, alone, together, least=min_agreement),
    )
    return findings, unary


def _agreement(
    rule: str, prompts: Sequence[str], expected: Sequence[str], found: Sequence[str], *, least: float
) -> Finding:
    parted = [row for row in zip(prompts, expected, found, strict=True) if row[1] != row[2]]
    equal = len(prompts) - len(parted)
    example = "" if not parted else "{!r}: {!r} became {!r}".format(*parted[0])
    return Finding(
        rule=rule,
        seen=f"{equal} of {len(prompts)} equal",
        wanted=f"at least {least:.0%}",
        outcome="pass" if equal >= least * len(prompts) else "fail",
        example=example,
        figures={"equal": equal, "asked": len(prompts)},
    )


def compare_length(candidate: Sequence[Answer], baseline: Sequence[Answer], confidence: float) -> Finding:
    """Judge the ratio of output tokens to the baseline's on the same prompts; too short is as wrong as too long.

    Raises:
        MeasurementError: a server does not count its output tokens.
    """
    tokens, reference = ([answer.tokens for answer in side] for side in (candidate, baseline))
    counted, counted_reference = ([each for each in side if each is not None] for side in (tokens, reference))
    if len(counted) < len(tokens) or len(counted_reference) < len(reference) or not sum(counted_reference):
        hint = "The repositories that trtpipe emits count them."
        raise MeasurementError("a server does not tell how many tokens it answered with", hint=hint)
    ratio = mean_per_token(counted, counted_reference, confidence)
    return Finding(
        rule="length / baseline",
        seen=f"{ratio.estimate:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]",
        wanted=f"{1 - LENGTH_TOLERANCE:g} to {1 + LENGTH_TOLERANCE:g}",
        outcome=_within(ratio),
        figures=_figures(ratio, confidence, "ratio of sums with Student's t", prompts=len(candidate)),
    )


def _within(ratio: Interval) -> Outcome:
    low, high = 1 - LENGTH_TOLERANCE, 1 + LENGTH_TOLERANCE
    if low <= ratio.low and ratio.high <= high:
        return "pass"
    return "fail" if ratio.high < low or ratio.low > high else "inconclusive"


def score(task: str, marks: Sequence[int], confidence: float, least: float | None) -> Finding:
    """Judge the share of right answers (1 of `marks`), with Wilson's score interval; without `least` it passes."""
    share = share_of_items(marks, confidence)
    return Finding(
        rule=f"score of {task}",
        seen=f"{_percent(share, '.1%')} of {len(marks)}",
        wanted="-" if least is None else f"at least {least:.1%}",
        outcome=Measure(metric=task, interval=share, bound="min", limit=least).outcome,
        figures=_figures(share, confidence, "Wilson's score interval", questions=len(marks), right=sum(marks)),
    )


def drop(task: str, before: Sequence[int], after: Sequence[int], confidence: float, most: float) -> Finding:
    """Judge how many fewer answers are right than the baseline's to the same questions, in the same order.

    The pairs decide: Newcombe's interval for paired proportions. A baseline that is right more seldom than the
    drop that is allowed cannot show one, so that is inconclusive, whatever the interval.
    """
    fall, possible = drop_between_items(before, after, confidence), share_of_items(before, confidence).high
    outcome = Measure(metric=task, interval=fall, limit=most).outcome
    lost = sum(was > now for was, now in zip(before, after, strict=True))
    won = sum(was < now for was, now in zip(before, after, strict=True))
    pairs = {"questions": len(before), "baseline_right": sum(before), "right": sum(after), "lost": lost, "won": won}
    return Finding(
        rule=f"drop of {task}",
        seen=f"{_percent(fall, '+.1%')}, {lost} lost and {won} won of {len(before)}",
        wanted=f"at most {most:.1%}",
        outcome="inconclusive" if outcome == "pass" and possible <= most else outcome,
        example="the baseline answers too few to show a drop" if possible <= most else "",
        figures=_figures(fall, confidence, "Newcombe 1998, method 10 (paired proportions)", **pairs),
    )


def _percent(interval: Interval, style: str) -> str:
    return f"{interval.estimate:{style}} [{interval.low:{style}}, {interval.high:{style}}]"


def _figures(interval: Interval, confidence: float, method: str, **counts: int) -> dict[str, Any]:
    return {**interval.document(), "confidence": confidence, "method": method, **counts}
