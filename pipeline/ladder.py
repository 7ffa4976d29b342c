"""The quality ladder: the config and its fallback steps, each built until it is proven and judged.

`choose` takes the first step that passes, as a build does; `climb` tries them all, for the table of
`trtpipe ladder`. Every step is an ordinary build, so what was built before is reused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pipeline import stages
from pipeline.config.load import LoadedConfig
from pipeline.core.artifacts import VerificationReport
from pipeline.core.digest import FileHasher
from pipeline.core.progress import Progress
from pipeline.core.runner import StepResult, run
from pipeline.core.store import Store
from pipeline.errors import Problem, VerificationError
from pipeline.examine import Build, examine
from pipeline.measure.gate import Verdict, judge, refusal


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
        others = (f"{path}={_text(value)}" for path, value in self.changes.items() if path != "quantization.format")
        return " ".join((self.build.config.quantization.format, *others))


@dataclass(frozen=True, kw_only=True)
class Tried:
    """How a rung came out.

    verdict: None when verification already refused it, for the `reasons` given.
    checkpoint_bytes: size of the quantized checkpoint on disk.
    results: of the stages that ran, by name.
    """

    rung: Rung
    verdict: Verdict | None
    checkpoint_bytes: int
    reasons: tuple[str, ...] = ()
    results: Mapping[str, StepResult] = field(default_factory=dict)

    @property
    def outcome(self) -> Literal["pass", "fail", "inconclusive", "unproven"]:
        """The verdict of the gate, or unproven when verification refused the checkpoint."""
        return "unproven" if self.verdict is None else self.verdict.outcome

    @property
    def accepted(self) -> bool:
        """Whether a build may take it."""
        return self.verdict is not None and self.verdict.accepted

    def document(self) -> dict[str, Any]:
        """As JSON, the same in every run."""
        measured = {} if self.verdict is None else self.verdict.document()
        return {
            "format": self.rung.build.config.quantization.format,
            "label": self.rung.label,
            "changes": {path: _text(value) for path, value in self.rung.changes.items()},
            "checkpoint_bytes": self.checkpoint_bytes,
            "accepted": self.accepted,
            "verdict": self.outcome,
            "reasons": list(self.reasons),
            **measured,
        }


def rungs(loaded: LoadedConfig, hasher: FileHasher) -> tuple[Rung, ...]:
    """Examine the config and every step of its fallback before anything runs.

    Raises:
        ConfigError: one of them cannot be built.
    """
    found = []
    for step in (loaded, *loaded.fallback):
        build = examine(step, hasher)
        build.require_possible()
        found.append(Rung(build=build, changes=loaded.changes(step)))
    return tuple(found)


def climb(ladder: Sequence[Rung], hasher: FileHasher, store: Store, progress: Progress) -> Iterator[Tried]:
    """Build each rung until it is verified, and judge it."""
    for number, rung in enumerate(ladder, start=1):
        if len(ladder) > 1:
            progress.note(f"step {number} of {len(ladder)}: {rung.label}")
        tried = _try(rung, hasher, store, progress)
        for reason in tried.reasons:
            progress.note(f"{rung.label}: {reason}")
        yield tried


def choose(
    ladder: Sequence[Rung], hasher: FileHasher, store: Store, progress: Progress
) -> tuple[Tried, tuple[Tried, ...]]:
    """Return the first rung that passes, and those that were rejected before it.

    Raises:
        GateFailed: none passes.
        MeasurementError: none passes, and for at least one the measurement cannot tell.
    """
    rejected: list[Tried] = []
    for tried in climb(ladder, hasher, store, progress):
        if tried.accepted:
            return tried, tuple(rejected)
        rejected.append(tried)
    problems = [Problem(where=tried.rung.label, message="; ".join(tried.reasons)) for tried in rejected]
    undecided = any(tried.outcome == "inconclusive" for tried in rejected)
    message = f"none of {len(rejected)} steps passes the quality gate"
    raise refusal("inconclusive" if undecided else "fail", message, problems)


def _try(rung: Rung, hasher: FileHasher, store: Store, progress: Progress) -> Tried:
    plan = stages.steps(rung.build, hasher, store.root)
    maker = rung.build.maker
    built = run(plan, store, progress, until=maker)
    n_bytes = sum(path.stat().st_size for path in _weights(built[maker].artifact.path))
    try:
        results = run(plan, store, progress, until="verify")
    except VerificationError as error:
        reasons = (error.message, *(str(problem) for problem in error.problems))
        return Tried(rung=rung, verdict=None, checkpoint_bytes=n_bytes, reasons=reasons, results=built)
    # Reused a moment after it was built is built, to whoever reads the times.
    results |= {name: result for name, result in built.items() if not result.hit}
    verification = results["verify"].artifact
    if not isinstance(verification, VerificationReport):
        raise TypeError(f"verify gave {type(verification).__name__}")
    verdict = judge(stages.read_report(verification), rung.build.config.quality)
    return Tried(rung=rung, verdict=verdict, checkpoint_bytes=n_bytes, reasons=verdict.reasons(), results=results)


def _weights(checkpoint: Path) -> Iterator[Path]:
    """The weight files of a quantized checkpoint, not its probes and records."""
    return (path for path in checkpoint.rglob("*.safetensors") if path.parent != checkpoint)


def _text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
