"""Conformance rules on deployments with one known fault each."""

from __future__ import annotations

import threading

import pytest

from pipeline.errors import MeasurementError
from pipeline.measure.served import Answer, compare_length, conformance, drop, score

pytestmark = pytest.mark.fast

PROMPTS = [f"prompt {number}" for number in range(10)]


class Deployment:
    """Echoes; `fault` changes the answers that are streamed, warm or answered beside another."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.seen: set[str] = set()
        self.meeting = threading.Barrier(2)

    def ask(self, prompt: str, stream: bool) -> Answer:
        """Answer, wrongly where the fault says so."""
        warm = prompt in self.seen
        self.seen.add(prompt)
        beside = threading.current_thread() is not threading.main_thread()
        if beside:
            self.meeting.wait(timeout=10)
        wrong = {"streamed": stream, "warm": warm and prompt.startswith("new"), "batch": beside}.get(self.fault, False)
        return Answer(text=prompt + ("!" if wrong else ""), tokens=len(prompt))


@pytest.mark.parametrize(
    ("fault", "broken"),
    [
        ("", []),
        ("streamed", ["streamed = unary"]),
        ("warm", ["warm = cold"]),
        ("batch", ["batch 2 = batch 1"]),
    ],
)
def test_each_fault_breaks_its_own_rule(fault: str, broken: list[str]) -> None:
    """And no other."""
    deployment = Deployment(fault)
    findings, answers = conformance(deployment.ask, PROMPTS, concurrency=2, min_agreement=0.9, nonce="new")
    assert [finding.rule for finding in findings if finding.outcome == "fail"] == broken
    assert all("became" in finding.example for finding in findings if finding.outcome == "fail")
    assert [answer.text for answer in answers] == PROMPTS


def answers(*tokens: int | None) -> list[Answer]:
    """Answers of these lengths."""
    return [Answer(text="", tokens=count) for count in tokens]


@pytest.mark.parametrize(
    ("factor", "outcome"), [(1.0, "pass"), (1.05, "pass"), (0.8, "fail"), (1.3, "fail"), (1.1, "inconclusive")]
)
def test_answers_may_be_neither_longer_nor_shorter(factor: float, outcome: str) -> None:
    """10 % on both sides, with the uncertainty of forty prompts."""
    baseline = [100 + number for number in range(40)]
    candidate = [round(count * factor) + (-1) ** number for number, count in enumerate(baseline)]
    assert compare_length(answers(*candidate), answers(*baseline), 0.95).outcome == outcome


def test_few_prompts_tell_nothing_about_length() -> None:
    """Four equal lengths are no proof."""
    assert compare_length(answers(9, 9, 9, 9), answers(9, 9, 9, 9), 0.95).outcome == "inconclusive"


def test_length_needs_servers_that_count() -> None:
    """Unknown is not zero."""
    with pytest.raises(MeasurementError, match="how many tokens"):
        compare_length(answers(3, None), answers(3, 3), 0.95)


def marks(right: int, of: int) -> list[int]:
    """The first answers right, the others wrong."""
    return [1] * right + [0] * (of - right)


@pytest.mark.parametrize(
    ("before", "after", "of", "outcome"),
    [
        (80, 80, 100, "pass"),
        (80, 40, 100, "fail"),
        (80, 75, 100, "inconclusive"),
        (8, 8, 10, "inconclusive"),
        (0, 0, 1000, "inconclusive"),
        (40, 80, 100, "pass"),
    ],
)
def test_the_whole_interval_of_the_drop_decides(before: int, after: int, of: int, outcome: str) -> None:
    """Few questions, or a baseline that is never right, cannot show that nothing was lost."""
    assert drop("q", marks(before, of), marks(after, of), 0.95, 0.05).outcome == outcome


def test_a_drop_is_told_with_its_pairs_and_its_method() -> None:
    """Who lost and who won is more than the difference of two scores."""
    finding = drop("q", [1, 1, 0, 0] * 25, [1, 0, 1, 0] * 25, 0.95, 0.05)
    assert (finding.figures["lost"], finding.figures["won"], finding.figures["estimate"]) == (25, 25, 0)
    assert "Newcombe" in finding.figures["method"]
    assert finding.document()["figures"]["low"] < 0 < finding.document()["figures"]["high"]


def test_pairs_that_agree_make_the_drop_more_certain() -> None:
    """The same two scores say less when other questions are answered."""
    together = drop("q", marks(50, 100), marks(50, 100), 0.95, 0.05).figures
    apart = drop("q", marks(50, 100), marks(50, 100)[::-1], 0.95, 0.05).figures
    assert together["high"] < 0.3 * apart["high"]


def test_a_score_is_judged_only_when_one_is_asked_for() -> None:
    """Half of the answers are right."""
    assert score("q", marks(50, 100), 0.95, None).outcome == "pass"
    assert score("q", marks(50, 100), 0.95, 0.3).outcome == "pass"
    assert score("q", marks(50, 100), 0.95, 0.8).outcome == "fail"
    assert score("q", marks(50, 100), 0.95, 0.5).outcome == "inconclusive"
