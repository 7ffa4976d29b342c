"""The quality ladder: the config and its fallback steps, each built until it is proven and judged.

`choose` takes the first step that passes, as a build does; `climb` tries them all, for the table of
`trtpipe ladder`. Every step is an ordinary build, so what was built before is reused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pipeline import stages
from pipeline.config.load import LoadedConfig
from pipeline.config.schema import QualityConfig
from pipeline.core.artifacts import QuantizedCheckpoint
from pipeline.core.digest import FileHasher
from pipeline.core.plan import PlannedStep, plan
from pipeline.core.progress import Progress
from pipeline.core.runner import StepResult, run
from pipeline.core.store import Store
from pipeline.errors import ConfigError, DiskFull, HostError, MeasurementError, Problem, ToolError, VerificationError
from pipeline.examine import Build, examine
from pipeline.measure.gate import Verdict, judge, refusal
from pipeline.measure.speed import Speed, compare, fitting_loads
from pipeline.quantize.proof import read_report, require_proven

Outcome = Literal["pass", "fail", "inconclusive", "unproven", "unjudged"]
"""A verdict of the gate, or why there is none: a check of verify failed, or nothing was measured to judge by."""
_SHOWN = 5
_RECORDED = 50
FORMAT_KEYS = ("quantization.format", "quantization.overrides")


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One way to build: the config itself, or one step of its fallback laid over it.

    changes: key path -> value of what the step changes; empty for the config itself.
    """

    build: Build
    changes: Mapping[str, object]

    @property
    def label(self) -> str:
        """What a person calls it: the format, and what else the step changes."""
        others = (
            f"{path.removeprefix('quantization.')}={_text(value)}"
            for path, value in self.changes.items()
            if path not in FORMAT_KEYS
        )
        return " ".join((self.build.label, *others))

    def document(self) -> dict[str, Any]:
        """As JSON."""
        changes = {path: _text(value) for path, value in self.changes.items()}
        return {"format": self.build.label, "label": self.label, "changes": changes}


@dataclass(frozen=True, kw_only=True)
class Tried:
    """How a rung came out.

    verdict: None when there was nothing to judge; the reasons say why.
    checkpoint_bytes: size of the quantized weights on disk.
    report: report.json of its verification.
    results: of the stages that ran, by name.
    """

    rung: Rung
    outcome: Outcome
    verdict: Verdict | None = None
    reasons: tuple[str, ...]
    checkpoint_bytes: int
    report: Mapping[str, Any]
    results: Mapping[str, StepResult]

    @property
    def accepted(self) -> bool:
        """Whether a build may take it."""
        return self.verdict is not None and self.verdict.accepted

    def document(self) -> dict[str, Any]:
        """As JSON, the same in every run."""
        measured = {} if self.verdict is None else self.verdict.document()
        return {
            **self.rung.document(),
            "checkpoint_bytes": self.checkpoint_bytes,
            "accepted": self.accepted,
            "verdict": self.outcome,
            "reasons": list(self.reasons),
            "verification": self.report["summary"] | {"failed_checks": self._failed_checks()},
            **measured,
        }

    def _failed_checks(self) -> list[Mapping[str, Any]]:
        return [check for check in self.report["checks"] if not check["passed"]][:_RECORDED]


def look(loaded: LoadedConfig, hasher: FileHasher) -> tuple[Rung, ...]:
    """Examine the config and every step of its fallback, possible or not."""
    return tuple(Rung(build=examine(step, hasher), changes=loaded.changes(step)) for step in (loaded, *loaded.fallback))


def rungs(loaded: LoadedConfig, hasher: FileHasher) -> tuple[Rung, ...]:
    """Examine the config and every step of its fallback before anything runs, and refuse what cannot be built.

    Raises:
        ConfigError: one of them cannot be built, or none could be judged.
    """
    found = look(loaded, hasher)
    require_possible(found)
    if not any(rung.build.can_be_judged for rung in found):
        name, problems = loaded.config.name, found[0].build.warnings
        raise ConfigError(f"the quality gate of '{name}' has nothing to compare with", problems=problems)
    return found


def require_possible(ladder: Sequence[Rung]) -> None:
    """Refuse a ladder with a rung that cannot be built; raises ConfigError with every problem, and whose it is."""
    found: dict[Problem, str] = {}
    for rung in ladder:
        for problem in rung.build.problems:
            # What a step has in common with the config is the config's.
            found.setdefault(problem, f"step {rung.label}: " if rung.changes else "")
    errors = [
        replace(problem, where=f"{whose}{problem.where}")
        for problem, whose in found.items()
        if problem.severity == "error"
    ]
    if errors:
        name = ladder[0].build.config.name
        raise ConfigError(f"'{name}' cannot be built: {len(errors)} problem(s)", problems=errors)


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What a build would do with a rung.

    fate: taken or rejected when its verification is in the store, and those before it; unreached behind one that
        is taken; open when something has to be measured first.
    steps: what would run for it; of a rung that is not built to the end, the steps until verify.
    """

    rung: Rung
    fate: Literal["taken", "rejected", "unreached", "open"]
    steps: tuple[PlannedStep, ...]
    tried: Tried | None


def foresee(ladder: Sequence[Rung], hasher: FileHasher, store: Store) -> list[Outlook]:
    """Say how a build would go as far as the store tells; runs nothing."""
    outlooks: list[Outlook] = []
    for rung in ladder:
        rejected = [each.tried.document() for each in outlooks if each.tried is not None and each.fate == "rejected"]
        choice = rung.document() | {"rejected": rejected} if len(ladder) > 1 else None
        planned = plan(stages.steps(rung.build, hasher, store.root, choice), store)
        tried = _recall(rung, planned, store)
        fates = {each.fate for each in outlooks}
        fate: Literal["taken", "rejected", "unreached", "open"] = "open"
        if tried is not None and not tried.accepted:
            fate = "rejected"
        elif "taken" in fates:
            fate = "unreached"
        elif tried is not None and "open" not in fates:
            fate = "taken"
        if len(ladder) > 1 and fate in ("rejected", "unreached"):
            planned = planned[: [each.step.name for each in planned].index("verify") + 1]
        outlooks.append(Outlook(rung=rung, fate=fate, steps=planned, tried=tried))
    return outlooks


def _recall(rung: Rung, planned: Sequence[PlannedStep], store: Store) -> Tried | None:
    """Judge a rung by what the store has of it; None when it was not verified yet."""
    digests = {each.step.name: each.digest for each in planned}
    made, verified = digests[rung.build.maker], digests["verify"]
    if made is None or verified is None:
        return None
    checkpoint = QuantizedCheckpoint(path=store.path(made), digest=made)
    return _tried(rung, checkpoint, store.path(verified), {})


def climb(ladder: Sequence[Rung], hasher: FileHasher, store: Store, progress: Progress) -> Iterator[Tried]:
    """Build each rung until it is verified, and judge it."""
    for number, rung in enumerate(ladder, start=1):
        if len(ladder) > 1:
            progress.note(f"step {number} of {len(ladder)}: {rung.label}")
        tried = _try(rung, hasher, store, progress)
        for reason in tried.reasons:
            progress.note(f"{rung.label}: {reason}")
        yield tried


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is measured: each engine `repeats` times, with one request and with `concurrency` of them at once."""

    repeats: int
    concurrency: int
    input_tokens: int = 128
    output_tokens: int = 32


def measure_speed(
    tried: Sequence[Tried], effort: Effort, hasher: FileHasher, store: Store, progress: Progress
) -> list[Speed | str]:
    """Compile every rung that verify did not refuse, and measure them in turns; a str says why one was not measured.

    Only the CPU target runs where it is built, so nothing is said about a GPU.
    """
    compiled = [_compile(each, hasher, store, progress) for each in tried]
    engines = [each for each in compiled if isinstance(each, Path)]
    if not engines:
        return [str(each) for each in compiled]
    loads = fitting_loads(engines, (1, effort.concurrency), effort.input_tokens, effort.output_tokens)
    speeds = iter(compare(engines, loads, effort.repeats, progress))
    return [next(speeds) if isinstance(each, Path) else each for each in compiled]


def _compile(tried: Tried, hasher: FileHasher, store: Store, progress: Progress) -> Path | str:
    """Return the engine of a rung, or why there is none to measure."""
    engine = tried.rung.build.config.engine
    if tried.outcome == "unproven":
        return "not run: verify refuses it"
    if engine.target != "openvino":
        return f"not run: of all targets openvino alone runs where it is built, and this is {engine.target}"
    # The gate would stop what the table is to show.
    steps = [step for step in stages.steps(tried.rung.build, hasher, store.root) if step.name != "gate"]
    try:
        return run(steps, store, progress, until="compile")["compile"].artifact.path
    except DiskFull:
        raise
    except (HostError, ToolError) as error:
        return f"not run: {error.message}"


def choose(
    ladder: Sequence[Rung], hasher: FileHasher, store: Store, progress: Progress
) -> tuple[Tried, tuple[Tried, ...]]:
    """Return the first rung that passes, and those that were rejected before it.

    Raises:
        GateFailed: none passes.
        MeasurementError: none passes, and for at least one the measurement cannot tell or there was none.
    """
    rejected: list[Tried] = []
    for tried in climb(ladder, hasher, store, progress):
        if tried.accepted:
            return tried, tuple(rejected)
        rejected.append(tried)
    problems = [Problem(where=tried.rung.label, message="; ".join(tried.reasons)) for tried in rejected]
    outcomes = {tried.outcome for tried in rejected}
    message = f"none of {len(rejected)} steps passes the quality gate"
    hint = "" if "inconclusive" in outcomes or "unjudged" not in outcomes else "Give what there is to judge by."
    raise refusal("inconclusive" if outcomes & {"inconclusive", "unjudged"} else "fail", message, problems, hint=hint)


def _try(rung: Rung, hasher: FileHasher, store: Store, progress: Progress) -> Tried:
    # What verify refuses is a finding about this rung, not the end of the ladder.
    steps = [replace(step, require=lambda _artifact: None) for step in stages.steps(rung.build, hasher, store.root)]
    results = run(steps, store, progress, until="verify")
    checkpoint, verification = results[rung.build.maker].artifact, results["verify"].artifact
    if not isinstance(checkpoint, QuantizedCheckpoint):
        raise TypeError(f"{rung.build.maker} gave {type(checkpoint).__name__}")
    return _tried(rung, checkpoint, verification.path, results)


def _tried(rung: Rung, checkpoint: QuantizedCheckpoint, verification: Path, results: Mapping[str, StepResult]) -> Tried:
    report = read_report(verification)
    outcome, verdict, reasons = _judge(verification, report, rung.build.config.quality)
    return Tried(
        rung=rung,
        outcome=outcome,
        verdict=verdict,
        reasons=reasons,
        checkpoint_bytes=checkpoint.weight_bytes,
        report=report,
        results=results,
    )


def _judge(
    verification: Path, report: Mapping[str, Any], quality: QualityConfig
) -> tuple[Outcome, Verdict | None, tuple[str, ...]]:
    """Say how a verified checkpoint comes out, and the reasons when it does not pass."""
    try:
        require_proven(verification)
        verdict = judge(report, quality)
    except VerificationError as error:
        shown = tuple(str(problem) for problem in error.problems[:_SHOWN])
        more = len(error.problems) - len(shown)
        return "unproven", None, (error.message, *shown, *([f"and {more} more layers"] if more else []))
    except MeasurementError as error:
        return "unjudged", None, (f"cannot be judged: {error.message}. {error.hint}",)
    return verdict.outcome, verdict, verdict.reasons()


def _text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
