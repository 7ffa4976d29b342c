"""Plans: what would run, and why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.core.artifacts import Artifact
from pipeline.core.plan import PlannedStep, differences, plan
from pipeline.core.progress import Silent
from pipeline.core.runner import run
from pipeline.core.stage import Action, Step, StepContext
from pipeline.core.store import Store
from pipeline.errors import VerificationError
from tests.support.faults import small_build

pytestmark = pytest.mark.fast

FORMAT = {"format": "fp8", "layers": {"exclude": ["lm_head"]}}


def two_steps(params: dict[str, object], tool: str = "1.0", version: int = 1) -> tuple[Step, ...]:
    """Return quantize → compile; the parameters decide quantize's bytes."""

    def quantize(ctx: StepContext) -> None:
        (ctx.out / "file").write_text(repr(sorted(params.items())))

    def compile_(ctx: StepContext) -> None:
        (ctx.out / "file").write_text(ctx.inputs["quantized"].digest)

    return (
        Step("quantize", version, Artifact, params, {}, {"torch": tool}, quantize),  # type: ignore[arg-type]
        Step("compile", 1, Artifact, {}, {"quantized": "quantize"}, {}, compile_),
    )


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store that holds the FORMAT build."""
    store = Store(tmp_path / "store")
    run(two_steps(dict(FORMAT)), store, Silent())
    return store


def told(planned: tuple[PlannedStep, ...]) -> list[tuple[str, str]]:
    """Return status and reason of each step, without the date."""
    return [
        (step.status, step.reason.partition(": ")[2] if "since" in step.reason else step.reason) for step in planned
    ]


def test_an_empty_store_plans_a_miss_and_what_waits_for_it(tmp_path: Path) -> None:
    """Only the first key is known; nothing is written."""
    planned = plan(two_steps(dict(FORMAT)), Store(tmp_path / "new"))
    assert told(planned) == [("miss", "not built before in this store"), ("unknown", "waits for quantize")]
    assert planned[0].key is not None
    assert planned[1].key is None
    assert not (tmp_path / "new").exists()


def test_what_was_built_is_a_hit(store: Store) -> None:
    """Every step is in the store, under the digest that the run gave."""
    planned = plan(two_steps(dict(FORMAT)), store)
    results = run(two_steps(dict(FORMAT)), store, Silent())
    assert [step.status for step in planned] == ["hit", "hit"]
    assert [step.digest for step in planned] == [result.artifact.digest for result in results.values()]


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        (two_steps({**FORMAT, "format": "int4_awq"}), "params.format 'fp8' → 'int4_awq'"),
        (two_steps({**FORMAT, "layers": {"exclude": []}}), "params.layers.exclude ['lm_head'] → []"),
        (two_steps({**FORMAT, "seed": 1}), "params.seed (absent) → 1"),
        (two_steps({"format": "fp8"}), "params.layers.exclude ['lm_head'] → (absent)"),
        (two_steps(dict(FORMAT), tool="1.1"), "toolchain.torch '1.0' → '1.1'"),
        (two_steps(dict(FORMAT), version=2), "version 1 → 2"),
        (
            two_steps({**FORMAT, "format": "bf16"}, tool="2"),
            "params.format 'fp8' → 'bf16'; toolchain.torch '1.0' → '2'",
        ),
    ],
)
def test_a_near_miss_names_the_field_that_differs(store: Store, steps: tuple[Step, ...], reason: str) -> None:
    """Old and new value of each hashed field are told."""
    assert told(plan(steps, store)) == [("miss", reason), ("unknown", "waits for quantize")]


def test_the_nearest_record_is_compared(store: Store) -> None:
    """With several earlier runs, the one that differs least is named."""
    run(two_steps({"format": "int8_sq", "seed": 3}), store, Silent())
    assert told(plan(two_steps({"format": "int8_sq", "seed": 4}), store))[0] == ("miss", "params.seed 3 → 4")


def test_a_changed_input_is_named_by_digest(store: Store) -> None:
    """A step whose own fields are the same missed because of its input."""
    run(two_steps({"format": "bf16"}), store, Silent(), until="quantize")
    reason = plan(two_steps({"format": "bf16"}), store)[1].reason
    assert "inputs.quantized sha256:" in reason
    assert " → sha256:" in reason


def test_a_damaged_artifact_is_a_miss_and_stays_where_it_is(store: Store) -> None:
    """The plan tells the damage and changes nothing."""
    path = store.path(plan(two_steps(dict(FORMAT)), store)[0].digest or "") / "file"
    path.write_text("cut")
    planned = plan(two_steps(dict(FORMAT)), store)
    assert planned[0].status == "miss"
    assert "1 missing or of another size (file)" in planned[0].reason
    assert path.exists()


def test_long_differences_are_cut(store: Store) -> None:
    """A plan stays readable when everything differs."""
    many = {f"p{number}": "x" * 500 for number in range(10)}
    reason = plan(two_steps(many), store)[0].reason  # type: ignore[arg-type]
    assert reason.count("→") == 4
    assert "and 8 more" in reason
    assert len(reason) < 600


def test_equal_actions_do_not_differ() -> None:
    """Tuples and lists are the same JSON."""
    one, other = (Action("s", 1, {"a": value}, {}, {}) for value in ([1, 2], (1, 2)))
    assert differences(one, other) == ()


def test_a_plan_of_the_small_build_follows_the_run(tmp_path: Path) -> None:
    """After a partial run, the next step is a plain miss and the one after it unknown."""
    store = Store(tmp_path / "store")
    run(small_build(), store, Silent(), until="first")
    assert [step.status for step in plan(small_build(), store)] == ["hit", "miss", "unknown"]


def test_a_finding_that_stops_a_run_is_planned_as_a_stop(store: Store) -> None:
    """What was found is said, and that later steps are not reached."""

    def refuse(_artifact: Artifact) -> None:
        raise VerificationError("SQNR too low")

    first, second = two_steps(dict(FORMAT))
    planned = plan((replace(first, require=refuse), second), store)
    assert [step.status for step in planned] == ["stop", "unknown"]
    assert planned[0].reason.endswith(": SQNR too low")
    assert planned[1].reason == "not reached: quantize stops the run"
