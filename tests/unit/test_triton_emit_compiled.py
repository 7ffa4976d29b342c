"""From a TensorRT-LLM checkpoint through the compile stage to a repository that `check` accepts.

trtllm-build is the tests' stand-in: it takes the documented flags and writes the documented config.json with upstream's
own resets, so what the emitter reads here has the form that a GPU node would produce.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.deployment import EngineConfig, ServingConfig
from pipeline.core.artifacts import QuantizedCheckpoint
from pipeline.core.progress import Silent
from pipeline.targets.tensorrt_llm import llmapi
from pipeline.triton.check import check
from pipeline.triton.model_config import parse
from pipeline.triton.repository import emit
from tests.support.checkpoints import tiny_tokenizer
from tests.support.trtllm_building import NO_GPU, Source, checkpoint, compile_, engine, host, standin_on_path

pytestmark = pytest.mark.fast

A100 = host("NVIDIA A100-SXM4-80GB", 80)


def parameters(repository: Path) -> dict[str, str]:
    """Parameters of the core model."""
    config = parse((repository / "tensorrt_llm" / "config.pbtxt").read_text(), "core")
    return {key: value.string_value for key, value in config.parameters.items()}


def build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algo: str | None, kv: str | None, *, gpu: str = "H100", **more: Any
) -> Path:
    """Compile with the stand-in and emit."""
    ranks = more.get("tensor_parallel_size", 1)
    quantized = checkpoint(tmp_path, algo, kv, tp=ranks)
    tiny_tokenizer(quantized.path / "trtllm")
    monkeypatch.setenv("PATH", standin_on_path(tmp_path / "bin"))
    monkeypatch.setenv("STANDIN_SM", "80" if gpu == "A100" else "90")
    config = engine(gpu=gpu, max_batch_size=8, max_num_tokens=512, max_seq_len=1024, **more)
    compiled, _ = compile_(tmp_path, quantized, config, machine=A100 if gpu == "A100" else host())
    emit(compiled, ServingConfig(warmup=True), name="x", out=tmp_path / "repository")
    return tmp_path / "repository"


def test_fp8_on_h100_serves_with_reuse_and_chunked_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8 weights and KV keep paged attention, so both are on."""
    repository = build(tmp_path, monkeypatch, "FP8", "FP8")
    assert [str(problem) for problem in check(repository)] == []
    written = parameters(repository)
    assert (written["enable_kv_cache_reuse"], written["enable_chunked_context"]) == ("true", "true")


def test_awq_with_int8_kv_on_a100_serves_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An INT8 KV cache turns paged attention off; the model would not load with either."""
    repository = build(tmp_path, monkeypatch, "W4A16_AWQ", "INT8", gpu="A100")
    assert [str(problem) for problem in check(repository)] == []
    written = parameters(repository)
    assert (written["enable_kv_cache_reuse"], written["enable_chunked_context"]) == ("false", "false")


def test_two_ranks_are_checked_and_launched_as_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank files, the mapping and the command line agree."""
    repository = build(tmp_path, monkeypatch, None, None, tensor_parallel_size=2)
    assert [str(problem) for problem in check(repository)] == []
    assert (repository / "launch.sh").read_text().count("--model-repository=/models") == 2


def test_deferred_repository_is_complete_after_its_own_build_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """build.sh inside the repository makes the engine that config.pbtxt names; before it, check says so."""
    quantized = checkpoint(tmp_path, "FP8", "FP8")
    tiny_tokenizer(quantized.path / "trtllm")
    compiled, _ = compile_(tmp_path, quantized, engine("deferred", max_batch_size=8), machine=NO_GPU)
    repository = tmp_path / "repository"
    emit(compiled, ServingConfig(), name="x", out=repository)
    (before,) = check(repository)
    assert "is not built yet" in str(before)
    monkeypatch.setenv("PATH", standin_on_path(tmp_path / "bin"))
    script = repository / "tensorrt_llm" / "1" / "build" / "build.sh"
    result = subprocess.run([str(script)], capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 0, result.stderr
    assert [str(problem) for problem in check(repository)] == []


def test_llm_api_checkpoint_becomes_a_repository(tmp_path: Path) -> None:
    """What the llmapi target writes is what the emitter reads."""
    source = tmp_path / "q" / "hf"
    tiny_tokenizer(source)
    (source / "config.json").write_text(json.dumps({"vocab_size": 512}))
    config = EngineConfig.model_validate({"target": "tensorrt_llm_llmapi", "gpu": "H100", "max_seq_len": 1024})
    quantized = QuantizedCheckpoint(path=tmp_path / "q", digest="sha256:0")
    llmapi.compile_engine(quantized, config, architecture=Source(), out=tmp_path / "engine", progress=Silent())
    emit(tmp_path / "engine", ServingConfig(), name="x", out=tmp_path / "repository")
    assert [str(problem) for problem in check(tmp_path / "repository")] == []
    assert (tmp_path / "repository" / "tensorrt_llm" / "1" / "model" / "config.json").is_file()
