"""The target vllm without torch: arguments, repository, legality, words, packing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.config import legality
from pipeline.config.deployment import EngineConfig, ServingConfig
from pipeline.config.load import load
from pipeline.config.schema import BuildConfig
from pipeline.core.artifacts import QuantizedCheckpoint
from pipeline.core.progress import Silent
from pipeline.errors import IntegrityError
from pipeline.quantize.foreign.packing import pack_columns, unpack_columns
from pipeline.targets.vllm.compile import IMAGE, compile_engine, deviations
from pipeline.triton.check import check
from pipeline.triton.model_config import parse
from pipeline.triton.repository import emit
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


def compiled(tmp_path: Path, quantized: QuantizedCheckpoint, **values: object) -> dict[str, Any]:
    """engine.json of an engine section."""
    config = EngineConfig.model_validate({"target": "vllm", "gpu": "H100", **values})
    compile_engine(quantized, config, architecture=Source(), out=tmp_path / "out", progress=Silent())
    document: dict[str, Any] = json.loads((tmp_path / "out/engine.json").read_text())
    return document


def test_the_arguments_have_vllms_names(tmp_path: Path) -> None:
    """AsyncEngineArgs: what the config says, the KV type that the checkpoint has scales for, nothing else."""
    quantized = artifact(tmp_path, {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"})
    kv_cache = {"size_gib": 2, "enable_block_reuse": False}
    facts = compiled(tmp_path, quantized, tensor_parallel_size=2, max_seq_len=1024, kv_cache=kv_cache)
    assert facts["engine_arguments"] == {
        "model": "model",
        "dtype": "bfloat16",
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 1,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "max_model_len": 1024,
        "enable_prefix_caching": False,
        "enable_chunked_prefill": True,
        "disable_log_stats": False,
        "quantization": "modelopt",
        "kv_cache_dtype": "fp8",
        "kv_cache_memory_bytes": 2 * 2**30,
    }
    assert facts["world_size"] == 2


def test_a_checkpoint_without_hf_is_no_checkpoint_for_vllm(tmp_path: Path) -> None:
    """A TensorRT-LLM checkpoint is refused."""
    (tmp_path / "q").mkdir()
    with pytest.raises(IntegrityError, match="which vLLM reads"):
        compiled(tmp_path, QuantizedCheckpoint(path=tmp_path / "q", digest="sha256:0"))


def test_the_repository_is_the_one_of_tritons_vllm_backend(tmp_path: Path) -> None:
    """One model of backend vllm, decoupled, KIND_MODEL, with an absolute model path; check has nothing to say."""
    compiled(tmp_path, artifact(tmp_path), tensor_parallel_size=2)
    emit(tmp_path / "out", ServingConfig(), name="x", out=tmp_path / "repo")
    assert sorted(path.name for path in (tmp_path / "repo").iterdir()) == ["README.md", "vllm_model"]
    config = parse((tmp_path / "repo" / "vllm_model" / "config.pbtxt").read_text(), "vllm_model")
    assert (config.backend, config.max_batch_size, config.model_transaction_policy.decoupled) == ("vllm", 0, True)
    assert config.instance_group[0].kind == config.instance_group[0].KIND_MODEL
    arguments = json.loads((tmp_path / "repo" / "vllm_model" / "1" / "model.json").read_text())
    assert arguments["model"] == "/models/vllm_model/1/model"
    assert check(tmp_path / "repo") == []


def test_a_user_reads_that_nothing_was_run(tmp_path: Path) -> None:
    """The README names image, driver and that vLLM was not there."""
    compiled(tmp_path, artifact(tmp_path))
    emit(tmp_path / "out", ServingConfig(), name="x", out=tmp_path / "repo")
    text = (tmp_path / "repo" / "README.md").read_text()
    assert IMAGE in text
    assert "nothing of it was run on vLLM" in text


@pytest.mark.parametrize(
    ("form", "kv_cache", "gpu", "said"),
    [
        ("bf16", "auto", "A100", ""),
        ("int8_wo", "auto", "A100", ""),
        ("fp8", "fp8", "L4", ""),
        ("fp8", "auto", "A100", "fp8 needs SM 89"),
        ("int8_sq", "auto", "H100", "no place for one"),
        ("w4a8_awq", "auto", "H100", "INT4 weights and FP8 activations"),
        ("bf16", "fp8", "H100", "FP8 checkpoints only"),
        ("fp8", "int8", "H100", "16 bit or as FP8"),
    ],
)
def test_formats_are_taken_or_refused_with_a_reason(form: str, kv_cache: str, gpu: str, said: str) -> None:
    """The legality table's rows of the target."""
    config = BuildConfig.model_validate(
        {
            "name": "a",
            "source": {"path": "."},
            "quantization": {"format": form, "kv_cache": kv_cache},
            "engine": {"target": "vllm", "gpu": gpu},
        }
    )
    errors = [str(problem) for problem in legality.check(config, None) if problem.severity == "error"]
    assert len(errors) == bool(said)
    assert not said or said in errors[0]


@pytest.mark.parametrize(
    ("target", "layout", "gpu", "said"),
    [
        ("vllm", "awq", "A100", ""),
        ("vllm", "gptq int4 act-order", "L4", ""),
        ("vllm", "fp8 block dynamic", "H100", ""),
        ("vllm", "fp8 block dynamic", "A100", "not read by vllm on A100"),
        ("vllm", "modelopt W4A16_AWQ", "H100", "It is read by tensorrt_llm_llmapi"),
        ("vllm", "int-quantized int8 channel 16 bit", "H100", "Name the 16-bit checkpoint"),
        ("tensorrt_llm_llmapi", "modelopt FP8", "H100", ""),
        ("tensorrt_llm_llmapi", "fp8 block dynamic", "L4", "not read by tensorrt_llm_llmapi on L4"),
        ("tensorrt_llm_llmapi", "awq", "H100", "It is read by vllm"),
        ("tensorrt_llm", "awq", "H100", "not read by tensorrt_llm on H100"),
    ],
)
def test_layouts_of_other_tools_go_to_the_runtimes_that_read_them(
    target: str, layout: str, gpu: str, said: str
) -> None:
    """Rows of [[passed_on]], by GPU; the format of the checkpoint is not judged as if it were made here."""
    config = BuildConfig.model_validate(
        {
            "name": "a",
            "source": {"path": "."},
            "quantization": {"format": "int8_sq"},
            "engine": {"target": target, "gpu": gpu},
        }
    )
    errors = [str(problem) for problem in legality.check(config, None, layout=layout) if problem.severity == "error"]
    assert len(errors) == bool(said), errors
    assert not said or said in errors[0]


def test_keys_that_vllm_does_not_read_are_named(tmp_path: Path) -> None:
    """Serving and TensorRT-LLM's keys change nothing, so writing them is answered."""
    path = tmp_path / "a.yaml"
    path.write_text(
        "name: a\nsource: {path: m}\nengine: {target: vllm, gpu: H100, preset: latency}\n"
        "serving: {default_max_tokens: 9}\n"
    )
    warnings = " ".join(str(problem) for problem in load(path).warnings)
    assert "engine.preset: has no effect with target vllm" in warnings
    assert "serving.default_max_tokens: has no effect with target vllm" in warnings


def test_a_gpu_is_needed(tmp_path: Path) -> None:
    """Which formats run depends on it."""
    path = tmp_path / "a.yaml"
    path.write_text("name: a\nsource: {path: m}\nengine: {target: vllm}\n")
    with pytest.raises(Exception, match="precision and memory depend on the GPU"):
        load(path)


def test_differences_to_what_is_proven_are_told() -> None:
    """FP8 is rounded once more where layers are fused; integer scales become 16 bit; 16-bit weights are as proven."""
    assert deviations("bf16", "bfloat16", kv_cache="auto") == []
    assert "rounds their FP8 weights once more" in deviations("fp8", "bfloat16", kv_cache="auto")[0]
    assert "0.05 %" in deviations("int4_wo", "float16", kv_cache="auto")[0]
    assert "FP8 KV cache" in deviations("fp8", "bfloat16", kv_cache="fp8")[1]


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_words_unpack_to_their_codes(bits: int) -> None:
    """Also where the last word is not full."""
    codes = np.random.default_rng(bits).integers(0, 2**bits, (5, 21), np.uint8)
    assert np.array_equal(unpack_columns(pack_columns(codes, bits), bits)[:, :21], codes)
