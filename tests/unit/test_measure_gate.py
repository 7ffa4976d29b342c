"""The quality gate: where an interval lies against its limit decides, and what a build does with that."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pipeline.config.schema import QualityConfig
from pipeline.errors import GateFailed, MeasurementError
from pipeline.measure.gate import judge

pytestmark = pytest.mark.fast

TOKENS = 64


def report(*, kl: float = 0.05, blocks: int = 32, worse: float = 0.02, tasks: Any = ()) -> dict[str, Any]:
    """A verification report of a model with a known mean KL and mean loss in nats, 90 % agreement."""
    draw = random.Random(3)
    source = [TOKENS * draw.gauss(2.5, 0.5) for _ in range(blocks)]
    return {
        "end_to_end": {"perplexity": 12.4, "source_perplexity": 12.1},
        "not_run": ["something"],
        "blocks": {
            "tokens": [TOKENS] * blocks,
            "source_nll": source,
            "nll": [nll + TOKENS * draw.gauss(worse, 0.01) for nll in source],
            "kl": [TOKENS * draw.gauss(kl, 0.01) for _ in range(blocks)],
            "agreed": [round(0.9 * TOKENS) + draw.choice((-1, 0, 1)) for _ in range(blocks)],
        },
        "tasks": tasks,
    }


@pytest.mark.parametrize(
    ("limits", "outcome"),
    [
        ({"max_kl": 0.06}, "pass"),
        ({"max_kl": 0.04}, "fail"),
        ({"max_kl": 0.05}, "inconclusive"),
        ({"max_perplexity_increase": 0.05}, "pass"),
        ({"max_perplexity_increase": 0.01}, "fail"),
        ({"max_perplexity_increase": 0.0202}, "inconclusive"),
        ({"min_top1_agreement": 0.8}, "pass"),
        ({"min_top1_agreement": 0.95}, "fail"),
        ({"min_top1_agreement": 0.9}, "inconclusive"),
        ({"max_kl": 0.06, "min_top1_agreement": 0.9}, "inconclusive"),
        ({"max_kl": 0.04, "min_top1_agreement": 0.9}, "fail"),
        ({}, "pass"),
    ],
)
def test_the_verdict_is_where_the_whole_interval_lies(limits: dict[str, float], outcome: str) -> None:
    """Kept, broken, or straddled; the worst limit decides."""
    assert judge(report(), QualityConfig(**limits)).outcome == outcome  # type: ignore[arg-type]


def test_a_text_that_is_too_short_is_inconclusive_however_good() -> None:
    """Four blocks pass no limit on KL."""
    assert judge(report(kl=0.001, blocks=4), QualityConfig(max_kl=1)).outcome == "inconclusive"


def test_more_confidence_makes_a_close_pass_inconclusive() -> None:
    """The interval widens with the confidence that is asked for."""
    limit = judge(report(), QualityConfig()).measure("kl_nats").high + 1e-6
    assert judge(report(), QualityConfig(max_kl=limit)).outcome == "pass"
    assert judge(report(), QualityConfig(max_kl=limit, confidence=0.999)).outcome == "inconclusive"


def test_a_broken_limit_is_a_failed_gate_with_its_numbers() -> None:
    """Exit code 10; the kept limit is not listed."""
    verdict = judge(report(), QualityConfig(max_kl=0.04, max_perplexity_increase=0.05))
    with pytest.raises(GateFailed, match=r"kl_nats 0\.0\d+ \[0\.04\d+, 0\.05\d+\], allowed at most 0\.04") as caught:
        verdict.require_accepted()
    assert len(caught.value.problems) == 1


def test_an_undecided_gate_is_an_error_of_the_measurement_unless_accepted() -> None:
    """Exit code 9, or on with the verdict written down."""
    with pytest.raises(MeasurementError, match="cannot tell"):
        judge(report(), QualityConfig(max_kl=0.05)).require_accepted()
    accepted = judge(report(), QualityConfig(max_kl=0.05, inconclusive="accept"))
    accepted.require_accepted()
    assert accepted.document()["verdict"] == "inconclusive"


def test_accepting_the_inconclusive_accepts_no_failure() -> None:
    """A broken limit stays broken."""
    assert not judge(report(), QualityConfig(max_kl=0.04, inconclusive="accept")).accepted


def test_each_task_is_judged_by_its_score_and_by_its_drop() -> None:
    """A model that lost half of its right answers."""
    tasks = [{"file": "a.jsonl", "source": [1] * 100, "quantized": [1] * 50 + [0] * 50}]
    verdict = judge(report(tasks=tasks), QualityConfig(min_task_score=0.3, max_task_drop=0.1))
    outcomes = {measure.metric: measure.outcome for measure in verdict.measures}
    assert outcomes["score of a.jsonl"] == "pass"
    assert outcomes["drop of a.jsonl"] == "fail"


def test_the_document_says_what_was_not_measured() -> None:
    """A verdict is about what was run."""
    assert judge(report(), QualityConfig()).document()["not_measured"] == ["something"]


def test_a_report_without_scores_cannot_be_judged() -> None:
    """Nothing measured is not a pass."""
    with pytest.raises(MeasurementError, match="no scores"):
        judge({"blocks": None, "end_to_end": None}, QualityConfig(max_kl=1))


def test_without_a_limit_a_report_without_scores_passes_with_nothing_measured() -> None:
    """There is nothing to break, and the document claims no figure."""
    document = judge({"blocks": None, "end_to_end": None}, QualityConfig()).document()
    assert (document["verdict"], document["measures"], document["perplexity"]) == ("pass", [], None)
