"""Conformance rules on deployments with one known fault each."""

from __future__ import annotations

import threading

import pytest

from pipeline.errors import MeasurementError
from pipeline.measure.served import Answer, compare_length, conformance

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
