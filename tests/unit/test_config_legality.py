"""The legality table: what is refused, where, and what to do instead."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import pytest

from pipeline.config import legality
from pipeline.config.keys import KEYS
from pipeline.config.legality import check, gpus, table
from pipeline.config.load import load
from pipeline.config.schema import LayerFormat
from tests.support.architectures import LLAMA_8B, Facts
from tests.support.judging import GPU, LLMAPI, config, judge, warnings

pytestmark = pytest.mark.fast


@dataclass(frozen=True)
class Host:
    """A machine with these packages."""

    versions: Mapping[str, str]


NO_PAGING = {"enable_chunked_context": False, "max_num_tokens": 8192, "kv_cache": {"enable_block_reuse": False}}


def test_every_row_has_a_source_a_reason_and_a_key_of_the_schema() -> None:
    """The table is data that can be checked: where each fact was read, and which key it blames."""
    rows = [*table().allowed, *table().refused, *table().warning, *table().toolchain]
    assert len(rows) >= 24
    names = set(legality._facts(config(engine=GPU), "fp8", LLAMA_8B))
    for row in rows:
        assert len(row.source) > 10
        assert len(row.reason) > 10
        assert set(row.when) <= names
    for verdict in [*table().refused, *table().warning]:
        assert verdict.key in KEYS
        assert verdict.instead.endswith(".")
    assert all(parts.source for parts in [table().row_parallel, *table().fused])
    assert all(tried.source for tried in table().architectures)


def test_rows_name_only_words_of_the_schema() -> None:
    """A condition on a format, KV format or target that does not exist could never match."""
    fields = {
        "format": "quantization.format",
        "kv_cache": "quantization.kv_cache",
        "target": "engine.target",
        "dtype": "engine.dtype",
        "group_size": "quantization.group_size",
    }
    for row in [*table().allowed, *table().refused, *table().warning, *table().toolchain]:
        for name, wanted in row.when.items():
            if name in fields:
                assert isinstance(wanted, tuple)
                assert set(wanted) <= set(KEYS[fields[name]].choices), row


def test_every_gpu_of_the_schema_has_facts_with_a_source() -> None:
    """SM and memory are known for each GPU that a config can name, and for no other."""
    assert list(gpus()) == list(KEYS["engine.gpu"].choices)
    assert {name: gpu.sm for name, gpu in gpus().items()} == {"H100": 90, "H200": 90, "A100": 80, "L40S": 89, "L4": 89}
    assert all(gpu.source and gpu.memory_gb for gpu in gpus().values())


def test_the_table_decides_every_combination_of_format_kv_cache_and_gpu() -> None:
    """27 on the CPU and 135 per GPU target: each is allowed by a row, or refused by one with its own reason."""
    verdicts: dict[tuple[object, ...], bool] = {}
    formats, caches = get_args(LayerFormat), KEYS["quantization.kv_cache"].choices
    places: list[dict[str, object]] = [{"target": "openvino"}]
    targets = ("tensorrt_llm", "tensorrt_llm_llmapi", "vllm")
    places += [{"target": target, "gpu": name} for target in targets for name in gpus()]
    for form, cache, place in itertools.product(formats, caches, places):
        quantization = {"format": form, "kv_cache": cache}
        found = judge(None, quantization=quantization, engine={**place, **NO_PAGING})
        assert not any("is not known to work" in problem for problem in found), (form, cache, place)
        verdicts[form, cache, place["target"], place.get("gpu", "cpu")] = not found
    assert len(verdicts) == 432

    def legal(target: str) -> list[int]:
        return [sum(verdicts[key] for key in verdicts if key[2:] == (target, name)) for name in gpus()]

    assert sum(legal for key, legal in verdicts.items() if key[3] == "cpu") == 16  # eight formats x auto and int8
    assert list(gpus()) == ["H100", "H200", "A100", "L40S", "L4"]
    assert legal("tensorrt_llm") == [
        24,
        24,
        12,
        24,
        24,
    ]  # all but fp8_rowwise; on SM 80 six formats without FP8 x auto and int8
    assert legal("tensorrt_llm_llmapi") == [10, 10, 3, 8, 8]  # six x auto, four x fp8; no fp8_rowwise before Hopper
    assert legal("vllm") == [9, 9, 5, 9, 9]  # seven x auto, both FP8 with fp8; on SM 80 five x auto


@pytest.mark.parametrize(
    ("quantization", "engine", "expected"),
    [
        (
            {"format": "fp8"},
            {"target": "tensorrt_llm", "gpu": "A100"},
            "quantization.format: fp8 needs SM 89 or newer, and A100 is SM 80",
        ),
        (
            {"format": "int8_sq", "kv_cache": "fp8"},
            {"target": "tensorrt_llm", "gpu": "A100", **NO_PAGING},
            "quantization.kv_cache: an FP8 KV cache needs SM 89 or newer, and A100 is SM 80",
        ),
        (
            {"kv_cache": "fp8"},
            {},
            (
                "quantization.kv_cache: the OpenVINO CPU plugin keeps KV as u8, u4, u3, bf16, f16 or f32, never as "
                "FP8. Set kv_cache: int8 (same size), or auto."
            ),
        ),
        ({"format": "int4_awq", "group_size": 32}, GPU, "quantization.group_size: TensorRT-LLM has group-wise kernels"),
        (
            {"kv_cache": "int8"},
            {**GPU, "enable_chunked_context": False, "max_num_tokens": 8192},
            "engine.kv_cache.enable_block_reuse: the engine build turns paged context attention off for an INT8 KV",
        ),
        (
            {"kv_cache": "int8"},
            {**GPU, "kv_cache": {"enable_block_reuse": False}},
            "engine.enable_chunked_context: the engine build turns paged context attention off for an INT8 KV",
        ),
        (
            {"format": "int4_awq", "kv_cache": "fp8"},
            {**GPU, "enable_chunked_context": False, "max_num_tokens": 8192},
            "engine.kv_cache.enable_block_reuse: with an FP8 KV cache and int4_awq weights",
        ),
        (
            {"format": "w4a8_awq", "group_size": 64},
            GPU,
            "quantization.group_size: w4a8_awq has kernels for groups of 128 only. Set group_size: 128.",
        ),
        (
            {"format": "w4a8_awq"},
            {"target": "tensorrt_llm", "gpu": "A100"},
            "quantization.format: w4a8_awq needs SM 89 or newer, and A100 is SM 80",
        ),
        ({"format": "w4a8_awq"}, {}, "quantization.format: w4a8_awq rounds int4 weights once more to FP8"),
        ({"format": "int4_awq", "awq": "clip"}, GPU, "quantization.awq: awq clip stores no pre-quant scale"),
        ({"format": "int4_awq", "awq": "clip"}, LLMAPI, "quantization.awq: awq clip stores no pre-quant scale"),
        ({"format": "w4a8_awq", "awq": "full"}, GPU, "quantization.awq: w4a8_awq rounds to FP8 after int4"),
        ({"format": "int8_sq"}, LLMAPI, "quantization.format: INT8 SmoothQuant is a format of the engine path"),
        ({"format": "int4_wo"}, LLMAPI, "quantization.format: int4_wo has no unified HF form"),
        ({"kv_cache": "int8"}, LLMAPI, "quantization.kv_cache: the LLM API keeps keys and values at 16 bit or as FP8."),
        ({}, {"context_parallel_size": 2}, "engine.context_parallel_size: the openvino target runs one process"),
        ({}, {"tensor_parallel_size": 2}, "engine.tensor_parallel_size: the openvino target runs one process"),
        ({}, {"pipeline_parallel_size": 2}, "engine.pipeline_parallel_size: the openvino target runs one process"),
    ],
)
def test_a_combination_that_cannot_work_is_refused_at_its_key(
    quantization: dict[str, object], engine: dict[str, object], expected: str
) -> None:
    """Each refusal stands alone, names the key to blame, and needs no facts about the model."""
    (found,) = judge(None, quantization=quantization, engine=engine)
    assert found.startswith(expected)


def test_fp8_weights_with_fp8_kv_keep_block_reuse_and_chunked_context_on_hopper() -> None:
    """The combination that the engine build supports in full is not refused."""
    assert judge(LLAMA_8B, quantization={"format": "fp8", "kv_cache": "fp8"}, engine=GPU) == []


@pytest.mark.parametrize("form", ["bf16", "fp8", "int8_sq", "int4_awq"])
def test_the_demo_model_is_legal_in_every_format(form: str) -> None:
    """SmolLM2-135M with groups of 64."""
    assert check(config(quantization={"format": form, "group_size": 64}), Facts()) == []


@pytest.mark.parametrize("form", ["int8_wo", "int4_wo"])
def test_weights_that_the_engine_build_rounds_cannot_be_trained_here(form: str) -> None:
    """Its scales are its own; the CPU target takes the trained codes."""
    sections: dict[str, object] = {"quantization": {"format": form}, "finetune": {"method": "qad"}}
    (found,) = judge(None, engine=GPU, **sections)
    assert found.startswith(f"finetune.method: trtllm-build rounds the weights of {form}")
    assert judge(None, **sections) == []


@pytest.mark.parametrize(
    ("engine", "form", "expected"),
    [
        ({}, "int8_wo", "the speed is that of a dense one"),
        (LLMAPI, "fp8", "the speed is that of a dense one"),
        (GPU, "int4_awq", "the kernels of int4_awq are plugins"),
        (GPU, "fp8", "only where it measures it faster"),
    ],
)
def test_a_sparse_model_is_built_with_a_word_on_what_it_gains(
    engine: dict[str, object], form: str, expected: str
) -> None:
    """Every target computes it; none is promised to be faster."""
    sections: dict[str, object] = {
        "engine": engine,
        "quantization": {"format": form},
        "sparsity": {"method": "magnitude"},
    }
    assert judge(None, **sections) == []
    said = [problem for problem in warnings(None, **sections) if problem.where == "sparsity.method"]
    assert len(said) == 1
    assert expected in said[0].message


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("Qwen3MoeForCausalLM", "the checkpoint export does not handle the experts of Qwen3MoeForCausalLM"),
        ("Gemma2ForCausalLM", "a TensorRT-LLM checkpoint of Gemma2ForCausalLM is not built"),
        ("OPTForCausalLM", "ModelOpt exports no TensorRT-LLM checkpoint of OPTForCausalLM"),
        ("BrandNewForCausalLM", "BrandNewForCausalLM is not built for tensorrt_llm. Architectures that are: Llama"),
    ],
)
def test_an_architecture_that_the_gpu_target_cannot_take_is_refused_once(architecture: str, expected: str) -> None:
    """Each family gets its own reason, an unknown one the list of those that work."""
    (found,) = judge(Facts(architecture=architecture), engine=GPU)
    assert found.startswith(f"engine.target: {expected}")


@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "Phi3ForCausalLM"])
def test_a_family_with_16_bit_checkpoints_only_is_refused_quantized(architecture: str) -> None:
    """Its 16-bit checkpoint is made, and so is the one that trtllm-build rounds."""
    (found,) = judge(Facts(architecture=architecture), engine=GPU, quantization={"format": "fp8"})
    assert found.startswith("quantization.format: ")
    assert not judge(Facts(architecture=architecture), engine=GPU)
    assert not judge(Facts(architecture=architecture), engine=GPU, quantization={"format": "int8_wo"})


def test_an_architecture_that_was_not_tried_on_the_cpu_is_a_warning() -> None:
    """The verify stage has the last word."""
    (warning,) = warnings(Facts(architecture="Qwen2ForCausalLM"))
    assert "Qwen2ForCausalLM was not run with openvino before" in warning.message


def test_experts_are_not_quantized() -> None:
    """Mixtures of experts are refused unless the experts are excluded."""
    facts = Facts(
        linears={"model.layers.0.mlp.experts.0.up_proj": (64, 64), "model.layers.0.self_attn.o_proj": (64, 64)}
    )
    (found,) = judge(facts, quantization={"format": "fp8"})
    assert "1 expert layers" in found
    assert judge(facts, quantization={"format": "fp8", "exclude": ["lm_head", "*.experts.*"]}) == []


def test_float16_from_a_bfloat16_checkpoint_is_a_warning() -> None:
    """The range shrinks to 65504."""
    (warning,) = warnings(Facts(), quantization={"format": "fp16"}, engine={"dtype": "float16"})
    assert "float16 ends at 65504" in warning.message


@pytest.mark.parametrize(
    ("versions", "sections", "expected"),
    [
        ({"transformers": "5.0.1"}, {"engine": GPU}, "transformers 5.0.1 is installed, and this build needs <5"),
        ({"openvino": "2025.4.0-123"}, {}, "openvino 2025.4.0-123 is installed, and this build needs >=2026.4"),
        (
            {"nvidia-modelopt": "0.37.0"},
            {"quantization": {"format": "fp8"}},
            "nvidia-modelopt 0.37.0 is installed, and this build needs >=0.45 and <1",
        ),
    ],
)
def test_a_toolchain_that_breaks_the_build_is_refused(
    versions: dict[str, str], sections: dict[str, object], expected: str
) -> None:
    """Versions are judged when the host is known."""
    (found,) = [str(problem) for problem in check(config(**sections), None, Host(versions))]
    assert found.startswith(f"environment: {expected}")
    assert "pip install" in found


def test_a_good_or_absent_toolchain_is_no_problem() -> None:
    """What is not installed is not judged here: the stage that needs it says so."""
    good = Host({"transformers": "4.57.6", "nvidia-modelopt": "0.47.0", "openvino": "2026.4.1"})
    for host in (good, Host({})):
        assert check(config(quantization={"format": "fp8"}, engine=GPU), LLAMA_8B, host) == []


def test_a_problem_names_the_line_when_the_provenance_is_known(tmp_path: Path) -> None:
    """With LoadedConfig.provenance a legality problem points into the file like any other."""
    path = tmp_path / "x.yaml"
    path.write_text("name: a\nsource: {path: m}\nquantization:\n  kv_cache: fp8\n")
    loaded = load(path)
    (problem,) = check(loaded.config, None, provenance=loaded.provenance)
    assert problem.where == f"{path}:4 quantization.kv_cache"


def test_errors_come_before_warnings() -> None:
    """The reader sees first what stops the build."""
    found = check(config(quantization={"format": "fp8", "kv_cache": "fp8", "exclude": ["lm_head", "x"]}), Facts())
    assert [problem.severity for problem in found] == ["error", "warning"]


EXPERTS = Facts(
    architecture="MixtralForCausalLM",
    linears={f"model.layers.0.block_sparse_moe.experts.{n}.w{p}": (256, 256) for n in range(4) for p in (1, 2, 3)},
)


def test_experts_take_fp8_where_a_runtime_reads_it() -> None:
    """The LLM API loads ModelOpt's FP8 experts."""
    assert not [said for said in judge(EXPERTS, engine=LLMAPI, quantization={"format": "fp8"}) if "expert" in said]


@pytest.mark.parametrize(
    ("engine", "form", "expected"),
    [
        (LLMAPI, "int4_awq", "12 expert layers: int4_awq of mixtures of experts is not supported. Set format: fp8"),
        ({}, "int8_wo", "the openvino target does not compile quantized mixtures of experts"),
    ],
)
def test_other_formats_of_experts_are_refused(engine: dict[str, str], form: str, expected: str) -> None:
    """With the formats that work, or the globs that leave experts out."""
    found = judge(EXPERTS, engine=engine, quantization={"format": form})
    assert any(expected in said for said in found), found
