"""What a run would do, without doing it: which steps are in the store, and why the others are not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pipeline.core.digest import JSON, canonical_json
from pipeline.core.record import Record
from pipeline.core.stage import Action, Step, check_steps
from pipeline.core.store import Store
from pipeline.errors import TrtpipeError

Status = Literal["hit", "miss", "unknown", "stop"]
_SHOWN_DIFFERENCES = 4
_SHOWN_CHARACTERS = 60
_DIGEST_CHARACTERS = len("sha256:") + 12


@dataclass(frozen=True)
class PlannedStep:
    """The fate of one step.

    status: "hit" (in the store), "miss" (would run), "unknown" (an input is not built yet, so the key
        is not known; if its bytes come out as before, this may still be a hit) or "stop" (in the store, and a
        run ends with it, so that later steps are "unknown").
    key: digest of the action; None when unknown.
    digest: digest of the artifact; None unless it is in the store.
    reason: why, for a person; for a miss what differs from the nearest earlier run, old → new.
    """

    step: Step
    status: Status
    key: str | None
    digest: str | None
    reason: str


def plan(steps: Sequence[Step], store: Store) -> tuple[PlannedStep, ...]:
    """Judge every step in order. Reads the store and changes nothing."""
    steps = tuple(steps)
    check_steps(steps)
    planned: dict[str, PlannedStep] = {}
    for step in steps:
        planned[step.name] = _plan_step(step, planned, store)
    return tuple(planned.values())


def _plan_step(step: Step, planned: Mapping[str, PlannedStep], store: Store) -> PlannedStep:
    stop = next((name for name, earlier in planned.items() if earlier.status == "stop"), None)
    if stop is not None:
        return PlannedStep(step, "unknown", None, None, f"not reached: {stop} stops the run")
    inputs: dict[str, str] = {}
    for role, source in step.inputs.items():
        digest = planned[source].digest if isinstance(source, str) else source.digest
        if digest is None:
            return PlannedStep(step, "unknown", None, None, f"waits for {source}")
        inputs[role] = digest
    action = step.action(inputs)
    record = store.find(action.key)
    if record is None:
        return PlannedStep(step, "miss", action.key, None, _why_missed(action, store))
    damage = store.damage(record.digest)
    if damage:
        return PlannedStep(step, "miss", action.key, None, f"built before, but the artifact is unusable: {damage}")
    built = f"built {record.execution.finished_at}"
    try:
        step.require(step.output(path=store.path(record.digest), digest=record.digest))
    except TrtpipeError as error:
        return PlannedStep(step, "stop", action.key, record.digest, f"{built}: {error.message}")
    return PlannedStep(step, "hit", action.key, record.digest, built)


def _why_missed(action: Action, store: Store) -> str:
    earlier = [record for record in store.records() if record.action.step == action.step]
    if not earlier:
        return "not built before in this store"

    def distance(record: Record) -> int:
        return len(differences(record.action, action))

    # Newest first, so that among equally near records the latest is named.
    earlier.sort(key=lambda record: record.execution.finished_at, reverse=True)
    nearest = min(earlier, key=distance)
    found = differences(nearest.action, action)
    shown = "; ".join(found[:_SHOWN_DIFFERENCES])
    more = f"; and {len(found) - _SHOWN_DIFFERENCES} more" if len(found) > _SHOWN_DIFFERENCES else ""
    return f"since {nearest.execution.finished_at}: {shown}{more}"


def differences(old: Action, new: Action) -> tuple[str, ...]:
    """Return every hashed field that differs, as "params.format 'fp8' → 'int4_awq'", sorted by name."""
    before, after = dict(_leaves("", old.document())), dict(_leaves("", new.document()))
    return tuple(
        f"{name} {_text(before, name)} → {_text(after, name)}"
        for name in sorted(before.keys() | after.keys())
        if name not in before or name not in after or canonical_json(before[name]) != canonical_json(after[name])
    )


def _leaves(prefix: str, value: JSON) -> list[tuple[str, JSON]]:
    if isinstance(value, Mapping) and value:
        return [leaf for key, item in value.items() for leaf in _leaves(f"{prefix}.{key}" if prefix else key, item)]
    return [(prefix, value)]


def _text(leaves: Mapping[str, JSON], name: str) -> str:
    if name not in leaves:
        return "(absent)"
    value = leaves[name]
    if isinstance(value, str) and value.startswith("sha256:"):
        return value[:_DIGEST_CHARACTERS]
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
