"""The target without an engine: the checkpoint as it is, and the arguments of LLM()."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.config.deployment import EngineConfig
from pipeline.core.artifacts import QuantizedCheckpoint
from pipeline.core.progress import Silent
from pipeline.errors import IntegrityError
from pipeline.targets.tensorrt_llm import llmapi
from tests.support.trtllm_building import Source

pytestmark = pytest.mark.fast


def artifact(tmp_path: Path, quantization: dict[str, object] | None = None) -> QuantizedCheckpoint:
    """A quantized artifact with hf/."""
    directory = tmp_path / "q/hf"
    directory.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_text("{}")
    (directory / "model.safetensors").write_bytes(b"weights")
    if quantization is not None:
        (directory / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    return QuantizedCheckpoint(path=tmp_path / "q", digest="sha256:0")


def compiled(tmp_path: Path, quantized: QuantizedCheckpoint, **values: object) -> dict[str, object]:
    """engine.json of an engine section."""
    section = {"target": "tensorrt_llm_llmapi", "gpu": "H100", **values}
    config = EngineConfig.model_validate(section)
    llmapi.compile_engine(quantized, config, architecture=Source(), out=tmp_path / "out", progress=Silent())
    document: dict[str, object] = json.loads((tmp_path / "out/engine.json").read_text())
    return document


def test_the_arguments_have_the_names_of_the_llm_api(tmp_path: Path) -> None:
    """peers.md 3.2 and trtllm.md 7.9: names of LLM() and KvCacheConfig; what is empty is left out."""
    kv_cache = {"free_gpu_memory_fraction": 0.8, "host_memory_bytes": 1024, "size_gib": 2, "enable_block_reuse": False}
    quantized = artifact(tmp_path, {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"})
    facts = compiled(tmp_path, quantized, tensor_parallel_size=2, max_seq_len=1024, kv_cache=kv_cache)
    assert facts["llm_args"] == {
        "model": "model",
        "backend": "pytorch",
        "dtype": "bfloat16",
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 1,
        "max_batch_size": 64,
        "max_num_tokens": 2048,
        "max_seq_len": 1024,
        "max_beam_width": 1,
        "enable_chunked_prefill": True,
        "kv_cache_config": {
            "enable_block_reuse": False,
            "tokens_per_block": 32,
            "dtype": "fp8",
            "free_gpu_memory_fraction": 0.8,
            "host_cache_size": 1024,
            "max_gpu_total_bytes": 2 * 2**30,
        },
    }
    assert facts["world_size"] == 2


def test_a_16_bit_checkpoint_leaves_the_kv_type_to_the_runtime(tmp_path: Path) -> None:
    """Nothing is written for what the config leaves empty."""
    facts = compiled(tmp_path, artifact(tmp_path))
    arguments = facts["llm_args"]
    assert isinstance(arguments, dict)
    assert arguments["kv_cache_config"] == {"enable_block_reuse": True, "tokens_per_block": 32, "dtype": "auto"}
    assert arguments["max_seq_len"] == 2048


def test_model_and_tokenizer_are_in_the_engine(tmp_path: Path) -> None:
    """The whole checkpoint, and the tokenizer where every engine has it."""
    compiled(tmp_path, artifact(tmp_path))
    assert (tmp_path / "out/model/model.safetensors").read_bytes() == b"weights"
    assert (tmp_path / "out/tokenizer/tokenizer.json").is_file()


def test_an_artifact_for_the_engine_path_is_refused(tmp_path: Path) -> None:
    """The LLM API reads no trtllm/."""
    (tmp_path / "q/trtllm").mkdir(parents=True)
    with pytest.raises(IntegrityError, match="holds no hf/"):
        compiled(tmp_path, QuantizedCheckpoint(path=tmp_path / "q", digest="sha256:0"))
