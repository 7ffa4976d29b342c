"""The GPU repository on a real Triton, with a recording Python model in the place of TensorRT-LLM's backend.

Shown: Triton takes the configuration as it is (tensors, reshapes, queue policy, warm-up of a decoupled model), and what
the text models send to the backend. Not shown: the backend itself, which needs a GPU.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.deployment import ServingConfig
from pipeline.triton.model_config import parse, render
from pipeline.triton.repository import emit
from pipeline.triton.server import Server
from tests.support.gpu_engine import llama_8b_fp8
from tests.support.triton_stream import ask

pytestmark = pytest.mark.server

SERVING = {
    "warmup": True,
    "max_queue_size": 32,
    "queue_policy": {
        "default_timeout_microseconds": 60_000_000,
        "allow_timeout_override": True,
        "priority_levels": 3,
        "default_priority_level": 2,
    },
    "tensorrt_llm": {"max_queue_delay_microseconds": 100},
}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A deferred repository whose core model is replaced, and nothing else of it."""
    directory = tmp_path_factory.mktemp("engine")
    out = directory / "repository"
    engine = llama_8b_fp8(directory / "engine", state="deferred")
    emit(engine, ServingConfig.model_validate(SERVING), name="x", out=out)
    path = out / "tensorrt_llm" / "config.pbtxt"
    config = parse(path.read_text(), "core")
    config.backend = "python"
    path.write_text(render(config))
    shutil.copy(Path(__file__).parents[1] / "support" / "recording_core" / "model.py", out / "tensorrt_llm" / "1")
    return out


@pytest.fixture(scope="module")
def url(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """GRPC address of the server; loading every model with `--model-control-mode=none`."""
    log = tmp_path_factory.mktemp("log") / "server.log"
    with Server(repository, log_path=log, ready_timeout_s=120) as server:
        assert {model.name for model in server.models()} == {
            "ensemble",
            "postprocessing",
            "preprocessing",
            "tensorrt_llm",
            "tensorrt_llm_bls",
        }
        yield f"127.0.0.1:{server.ports.grpc}"


def record(repository: Path) -> list[dict[str, Any]]:
    """What the core model was sent, oldest first."""
    path = repository / "tensorrt_llm" / "1" / "record.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_warm_up_request_came_before_the_server_was_ready(url: str, repository: Path) -> None:
    """Eight zeros in, four tokens wanted, lengths without a dimension of their own."""
    del url
    assert record(repository)[0] == {
        "input_ids": [[1, 8], [0] * 8],
        "input_lengths": [[1], [8]],
        "request_output_len": [[1], [4]],
    }


@pytest.mark.parametrize("entry", ["ensemble", "tensorrt_llm_bls"])
def test_text_reaches_the_backend_as_ids_and_comes_back(url: str, repository: Path, entry: str) -> None:
    """The round trip through preprocessing, the backend's tensors and detokenization."""
    reply = ask(url, entry, text_input="The capital of France", max_tokens=7)
    assert reply.error == ""
    assert reply.text == "The capital of France"
    assert record(repository)[-1]["request_output_len"] == [[1], [7]]


def test_checkpoint_and_compile_step_are_no_models(url: str, repository: Path) -> None:
    """They lie in the version directory, where Triton does not look for models (see the fixture's list)."""
    del url
    assert (repository / "tensorrt_llm" / "1" / "build" / "build.sh").is_file()
    assert (repository / "tensorrt_llm" / "1" / "checkpoint").is_dir()
