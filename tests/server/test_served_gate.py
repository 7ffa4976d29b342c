"""`trtpipe gate` against the emitted repository of a tiny engine on a real Triton server."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.deployment import ServingConfig
from pipeline.triton.client import Client
from pipeline.triton.generation import GenerationRequest
from pipeline.triton.repository import emit
from pipeline.triton.server import Server
from tests.support.commands import Outcome, trtpipe
from tests.support.triton_repo import tiny_engine

pytestmark = pytest.mark.server

LENIENT = ("--max-tokens", "12", "--concurrency", "4", "--min-agreement", "0.8", "--prompts", "many.txt")
MANY = "\n\n".join(f"Number {number}: the quick brown fox said that the capital is" for number in range(16))
# Three letters a word, or a question of sixty words were too long for the tiny engine; and it knows none of them.
SHORT_WORDS = " ".join(("xqz", "vjk", "kwy", "zzv", "qjx") * 60)


@contextmanager
def _served(directory: Path, seed: int) -> Iterator[str]:
    """Serve the tiny Llama of a seed; yields the gRPC address."""
    emit(tiny_engine(directory, seed=seed), ServingConfig(), name="tiny", out=directory / "repository")
    with Server(directory / "repository", log_path=directory / "server.log", ready_timeout_s=120) as server:
        yield f"127.0.0.1:{server.ports.grpc}"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """GRPC address of the server."""
    with _served(tmp_path_factory.mktemp("gate"), seed=0) as address:
        yield address


@pytest.fixture(scope="module")
def degraded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """GRPC address of a server whose model lost everything that the other one knows."""
    with _served(tmp_path_factory.mktemp("degraded"), seed=1) as address:
        yield address


@pytest.fixture(scope="module")
def tasks(url: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 questions; right is what the healthy model answers to them."""
    file = tmp_path_factory.mktemp("tasks") / "questions.jsonl"
    rows = []
    with Client(url) as client:
        for number in range(120):
            prompt = f"Question {number}: the capital of the quick brown fox is"
            answer, _ = client.generate_text(GenerationRequest(prompt=prompt, max_tokens=8, top_k=1))
            rows.append({"prompt": prompt, "answer": answer, "match": "exact", "max_tokens": 8})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows if str(row["answer"]).strip()))
    return file


def _rules(outcome: Outcome) -> dict[str, Any]:
    return {rule["rule"]: rule for rule in outcome.document["rules"]}


def test_a_healthy_deployment_passes_every_rule(url: str, tmp_path: Path) -> None:
    """Streamed, warm and batched answers are one; it is as long as itself."""
    (tmp_path / "many.txt").write_text(MANY)
    document = trtpipe("gate", url, "--against", url, "--next-words", "0", *LENIENT, "--json", cwd=tmp_path).document
    assert document["verdict"] == "pass"
    seen = {rule["rule"]: rule["seen"] for rule in document["rules"]}
    assert seen["streamed = unary"] == "16 of 16 equal"
    assert set(seen) == {"streamed = unary", "warm = cold", "batch 4 = batch 1", "length / baseline"}


def test_too_few_prompts_for_the_length_are_inconclusive(url: str, tmp_path: Path) -> None:
    """Exit code 9, and the rule is named."""
    (tmp_path / "prompts.txt").write_text("The capital of France is\n\nThe quick brown fox\n")
    arguments = ("--against", url, "--prompts", "prompts.txt", "--next-words", "0")
    outcome = trtpipe("gate", url, *arguments, cwd=tmp_path, code=9)
    assert "length / baseline" in outcome.stderr


def test_an_equal_deployment_loses_nothing_of_the_tasks(url: str, tasks: Path, tmp_path: Path) -> None:
    """The drop against itself is 0, surely below the limit; it never knows the next word, which tells nothing."""
    (tmp_path / "many.txt").write_text(MANY)
    (tmp_path / "words.txt").write_text(SHORT_WORDS)
    arguments = ("--against", url, "--tasks", tasks, "--text", "words.txt", *LENIENT)
    outcome = trtpipe("gate", url, *arguments, "--json", cwd=tmp_path, code=9)
    rules = _rules(outcome)
    assert rules["drop of questions.jsonl"]["outcome"] == "pass"
    assert rules["drop of questions.jsonl"]["figures"]["lost"] == 0
    assert rules["score of questions.jsonl"]["figures"]["right"] >= 100
    assert rules["length / baseline"]["outcome"] == "pass"
    assert rules["drop of next words"]["figures"]["baseline_right"] == 0
    assert rules["drop of next words"]["outcome"] == "inconclusive"


def test_a_degraded_deployment_fails_by_the_questions_it_lost(
    url: str, degraded: str, tasks: Path, tmp_path: Path
) -> None:
    """Exit code 10, the whole interval above the limit; against the verification report as against the server."""
    (tmp_path / "many.txt").write_text(MANY)
    report = tmp_path / "report.json"
    right = len(tasks.read_text().splitlines())
    digest = hashlib.sha256(tasks.read_bytes()).hexdigest()
    report.write_text(json.dumps({"tasks": [{"file": tasks.name, "sha256": digest, "source": [1] * right}]}))
    for baseline in (("--against", url, "--next-words", "0"), ("--report", report)):
        outcome = trtpipe("gate", degraded, *baseline, "--tasks", tasks, *LENIENT, "--json", cwd=tmp_path, code=10)
        drop = _rules(outcome)["drop of questions.jsonl"]
        assert drop["outcome"] == "fail"
        assert drop["figures"]["low"] > 0.5
        assert "does not pass its gate" in outcome.stderr


def test_few_questions_cannot_tell_whether_any_was_lost(url: str, tasks: Path, tmp_path: Path) -> None:
    """Exit code 9: five equal answers are no proof, and the table says so."""
    (tmp_path / "many.txt").write_text(MANY)
    (tmp_path / "few.jsonl").write_text("\n".join(tasks.read_text().splitlines()[:5]))
    arguments = ("--against", url, "--tasks", "few.jsonl", "--next-words", "0", *LENIENT)
    outcome = trtpipe("gate", url, *arguments, cwd=tmp_path, code=9)
    (line,) = [line for line in outcome.stdout.splitlines() if line.startswith("drop of few.jsonl")]
    assert line.endswith("inconclusive")
    assert "Newcombe" in outcome.stdout


def test_a_report_of_other_questions_is_no_baseline(url: str, tasks: Path, tmp_path: Path) -> None:
    """Exit code 9, and the way to get one is named."""
    (tmp_path / "many.txt").write_text(MANY)
    (tmp_path / "report.json").write_text(json.dumps({"tasks": [{"file": tasks.name, "sha256": "0", "source": [1]}]}))
    outcome = trtpipe("gate", url, "--report", "report.json", "--tasks", tasks, *LENIENT, cwd=tmp_path, code=9)
    assert "holds no answers to the questions" in outcome.stderr
