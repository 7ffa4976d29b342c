"""Doing a plan: take each step from the store, or build it once, whoever else is building."""

from __future__ import annotations

import difflib
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pipeline.core.artifacts import Artifact
from pipeline.core.progress import Progress
from pipeline.core.record import Execution, Parent, Record
from pipeline.core.stage import Action, Step, StepContext, check_steps
from pipeline.core.store import Store
from pipeline.errors import ConfigError, TrtpipeError
from pipeline.host.files import disk_errors, require_free_space
from pipeline.host.memory import peak_memory


@dataclass(frozen=True)
class StepResult:
    """What a step gave.

    hit: it came from the store.
    seconds: wall time of this run, waiting for another process included.
    peak_rss_bytes: the most memory seen while it ran (see peak_memory); None for a hit.
    """

    artifact: Artifact
    hit: bool
    seconds: float
    peak_rss_bytes: int | None


def run(steps: Sequence[Step], store: Store, progress: Progress, until: str | None = None) -> dict[str, StepResult]:
    """Run the steps in order, up to and including `until`, and return each one's artifact by name.

    A failing step ends the run with its own error, which names the kept logs; earlier steps stay in the
    store. An interrupt removes what was half done and passes on.

    Raises:
        ConfigError: no step is named `until`.
        StoreBusy: another process holds a step for longer than the store's lock timeout.
        DiskFull: the store's file system is full; nothing half-written remains.
        TrtpipeError: whatever a step raises.
    """
    selected = _until(tuple(steps), until)
    check_steps(selected)
    results: dict[str, StepResult] = {}
    with disk_errors(store.root), store.in_use(lambda pid: progress.note(f"waiting for process {pid}: cache gc")):
        for step in selected:
            results[step.name] = _run_step(step, results, store, progress)
    return results


def _until(steps: tuple[Step, ...], until: str | None) -> tuple[Step, ...]:
    if until is None:
        return steps
    names = [step.name for step in steps]
    if until not in names:
        near = difflib.get_close_matches(until, names, n=1)
        hint = f"Did you mean '{near[0]}'? " if near else ""
        raise ConfigError(f"there is no step '{until}'", hint=f"{hint}Steps: {', '.join(names)}.")
    return steps[: names.index(until) + 1]


def _run_step(step: Step, results: Mapping[str, StepResult], store: Store, progress: Progress) -> StepResult:
    started = time.monotonic()
    inputs = {
        role: results[source].artifact if isinstance(source, str) else source for role, source in step.inputs.items()
    }
    action = step.action({role: artifact.digest for role, artifact in inputs.items()})
    record, peak = store.find(action.key), None
    if record is None or store.damage(record.digest):
        waiting = f"{step.name}: waiting for process {{}}, which is building the same"
        with store.lock(action.key, lambda pid: progress.note(waiting.format(pid))):
            # Guard: looked up again under the lock, or two builds of one config would both do the work.
            record = _checked(step.name, action.key, store, progress)
            if record is None:
                record = _build(step, action, inputs, store, progress)
                peak = record.execution.peak_rss_bytes
    artifact = step.output(path=store.path(record.digest), digest=record.digest)
    try:
        step.require(artifact)
    except TrtpipeError as error:
        error.message = f"{step.name}: {error.message}"
        raise
    return StepResult(artifact, peak is None, time.monotonic() - started, peak)


def _checked(name: str, key: str, store: Store, progress: Progress) -> Record | None:
    """Find a record whose object is whole; a damaged object is set aside."""
    record = store.find(key)
    damage = "" if record is None else store.damage(record.digest)
    if record is not None and damage:
        progress.note(f"{name}: the stored artifact is unusable ({damage}); it is set aside and built again")
        store.quarantine(record.digest)
        return None
    return record


def _build(step: Step, action: Action, inputs: Mapping[str, Artifact], store: Store, progress: Progress) -> Record:
    require_free_space(store.root, step.disk_bytes)
    with store.unfinished(action.key) as resume, store.staging() as out:
        try:
            started_at, started = datetime.now(UTC), time.monotonic()
            with disk_errors(store.root):
                progress.note(f"{step.name}: running")
                with peak_memory() as memory:
                    step.run(StepContext(inputs, out, progress, resume))
                execution = Execution(
                    host={"node": platform.node(), "machine": platform.machine(), "python": platform.python_version()},
                    argv=tuple(sys.argv),
                    started_at=started_at.isoformat(timespec="milliseconds"),
                    finished_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
                    seconds=round(time.monotonic() - started, 3),
                    peak_rss_bytes=memory.bytes,
                )
                parents = _parents(step, inputs)
                return store.commit(out, lambda digest: Record(action, step.output.kind, digest, parents, execution))
        except Exception as error:
            kept = store.keep_failure(action.key, out, error)
            _tell(error, step.name, out, kept)
            raise


def _parents(step: Step, inputs: Mapping[str, Artifact]) -> dict[str, Parent]:
    made_by = {role: source if isinstance(source, str) else None for role, source in step.inputs.items()}
    return {
        role: Parent(artifact.digest, artifact.kind, made_by[role], str(artifact.path))
        for role, artifact in inputs.items()
    }


def _tell(error: Exception, name: str, out: Path, kept: Path) -> None:
    """Make an error name its step and the place where its logs are now."""
    if not isinstance(error, TrtpipeError):
        error.add_note(f"step '{name}' failed; its logs are in {kept}")
        return
    moved = str(out), str(kept)
    error.message = f"{name}: {error.message.replace(*moved)}"
    error.hint = error.hint.replace(*moved)
    if error.log_path is not None:
        error.log_path = Path(str(error.log_path).replace(*moved))
    else:
        logs = sorted(kept.rglob("*.log")) or sorted(kept.glob("error.txt"))
        error.log_path = logs[0] if logs else None
