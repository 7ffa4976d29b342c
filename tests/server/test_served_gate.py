"""`trtpipe gate` against the emitted repository of a tiny engine on a real Triton server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.config.schema import ServingConfig
from pipeline.triton.repository import emit
from pipeline.triton.server import Server
from tests.support.commands import trtpipe
from tests.support.triton_repo import tiny_engine

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """GRPC address of the server."""
    directory = tmp_path_factory.mktemp("gate")
    emit(tiny_engine(directory), ServingConfig(), name="tiny", out=directory / "repository")
    with Server(directory / "repository", log_path=directory / "server.log", ready_timeout_s=120) as server:
        yield f"127.0.0.1:{server.ports.grpc}"


def test_a_healthy_deployment_passes_every_rule(url: str, tmp_path: Path) -> None:
    """Streamed, warm and batched answers are one; it is as long as itself."""
    prompts = "\n\n".join(f"Number {number}: the quick brown fox said that the capital is" for number in range(16))
    (tmp_path / "many.txt").write_text(prompts)
    arguments = (
        "--prompts",
        "many.txt",
        "--against",
        url,
        "--max-tokens",
        "12",
        "--concurrency",
        "4",
        "--min-agreement",
        "0.8",
        "--json",
    )
    document = trtpipe("gate", url, *arguments, cwd=tmp_path).document
    assert document["verdict"] == "pass"
    seen = {rule["rule"]: rule["seen"] for rule in document["rules"]}
    assert seen["streamed = unary"] == "16 of 16 equal"
    assert set(seen) == {"streamed = unary", "warm = cold", "batch 4 = batch 1", "length / baseline"}


def test_too_few_prompts_for_the_length_are_inconclusive(url: str, tmp_path: Path) -> None:
    """Exit code 9, and the rule is named."""
    (tmp_path / "prompts.txt").write_text("The capital of France is\n\nThe quick brown fox\n")
    outcome = trtpipe("gate", url, "--against", url, "--prompts", "prompts.txt", cwd=tmp_path, code=9)
    assert "length / baseline" in outcome.stderr
