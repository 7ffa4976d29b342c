"""Each shipped GPU deployment passes everything that can be judged here, and its plan is the committed one.

The architecture files are of public models, without weights. Golden plans are written again with
`python -m tests.golden.refresh`; other tests here compare with published facts instead of our own output.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeline.config.load import load
from pipeline.errors import ConfigError
from pipeline.targets.tensorrt_llm.budget import budget, usable_bytes
from pipeline.targets.tensorrt_llm.preflight import preflight
from tests.golden.refresh import render
from tests.support.deployment_plans import CONFIGS, PLANS, ROOT, findings, name_of, plan
from tests.support.model_facts import BYTES_16_BIT, NAMES, model_facts

pytestmark = pytest.mark.fast

GB = 10**9
# What has to be shipped: model -> <format>-<target>-<gpu>-tp<n>.
SHIPPED = {
    "llama-3.1-8b": {
        "fp8-tensorrt-llm-h100-tp1",
        "bf16-tensorrt-llm-h100-tp1",
        "int4-awq-tensorrt-llm-h100-tp1",
        "bf16-tensorrt-llm-a100-tp1",
        "int4-awq-tensorrt-llm-a100-tp1",
    },
    "llama-3.3-70b": {
        "fp8-tensorrt-llm-h100-tp2",
        "fp8-tensorrt-llm-h100-tp4",
        "int4-awq-tensorrt-llm-a100-tp2",
    },
    "mistral-7b": {"fp8-tensorrt-llm-h100-tp1", "int4-awq-tensorrt-llm-a100-tp1"},
    "mixtral-8x7b": {"bf16-tensorrt-llm-h100-tp2", "bf16-tensorrt-llm-llmapi-h100-tp2"},
    "qwen2.5-7b": {"fp8-tensorrt-llm-h100-tp1", "fp8-tensorrt-llm-llmapi-h100-tp1"},
    "qwen2.5-32b": {
        "fp8-tensorrt-llm-h100-tp1",
        "fp8-tensorrt-llm-llmapi-h100-tp1",
        "int4-awq-tensorrt-llm-a100-tp1",
        "int4-awq-tensorrt-llm-llmapi-a100-tp1",
    },
}
# Warnings that a shipped config comes with: its own comment says why it is shipped all the same.
WARNED = {
    "qwen2.5-7b--fp8-tensorrt-llm-h100-tp1": "upstream does not list fp8 for Qwen2ForCausalLM",
    "qwen2.5-32b--fp8-tensorrt-llm-h100-tp1": "upstream does not list fp8 for Qwen2ForCausalLM",
}
every_config = pytest.mark.parametrize("path", CONFIGS, ids=name_of)


def shipped(model: str, name: str) -> Path:
    """Path of a shipped config."""
    return ROOT / "build_configs" / model / f"{name}.yaml"


def test_the_deployments_are_the_promised_ones() -> None:
    """No more, no less; among them no FP8 for A100."""
    found = {model: {path.stem for path in CONFIGS if path.parent.name == model} for model in NAMES}
    assert found == SHIPPED
    assert len(CONFIGS) == 18
    assert not [path for path in CONFIGS if path.stem.startswith("fp8") and "a100" in path.stem]


def test_there_is_one_golden_plan_for_each() -> None:
    """A plan of a config that is gone would never be compared."""
    assert {path.stem for path in PLANS.glob("*.json")} == {name_of(path) for path in CONFIGS}


@every_config
def test_a_deployment_has_no_finding_but_those_it_admits(path: Path) -> None:
    """Neither load, nor the legality table, nor preflight has an error, or a warning that is not written down here."""
    found = findings(load(path), path.parent.name)
    assert [str(problem) for problem in found if problem.severity == "error"] == []
    admitted = WARNED.get(name_of(path))
    assert len(found) == (admitted is not None), [str(problem) for problem in found]
    assert all(problem.message.startswith(str(admitted)) for problem in found)


@every_config
def test_the_plan_is_the_golden_one(path: Path) -> None:
    """Command or arguments at load, image, findings and memory, byte for byte."""
    golden = (PLANS / f"{name_of(path)}.json").read_text(encoding="utf-8")
    assert render(plan(path)) == golden, "python -m tests.golden.refresh, then read the difference"


@every_config
def test_a_deployment_pins_the_model_that_its_facts_describe(path: Path) -> None:
    """Hub id and commit are those of the architecture file, so preflight judged this model."""
    source, facts = load(path).config.source, model_facts(path.parent.name)
    assert (source.hub, source.revision) == (facts.model, facts.revision)
    assert re.fullmatch(r"[0-9a-f]{40}", facts.revision)


@every_config
def test_a_deployment_is_named_by_its_file(path: Path) -> None:
    """<model>-<format>[-llmapi]-<gpu>-tp<n>, so that a repository tells what is in it."""
    config = load(path).config
    target = "-llmapi" if config.engine.target == "tensorrt_llm_llmapi" else ""
    form = config.quantization.format.replace("_", "-")
    assert config.engine.gpu is not None
    machine = f"{config.engine.gpu.lower()}-tp{config.engine.tensor_parallel_size}"
    assert config.name == f"{path.parent.name}-{form}{target}-{machine}"


@pytest.mark.parametrize("name", NAMES)
def test_computed_shapes_add_up_to_the_published_size(name: str) -> None:
    """Every tensor is counted: the bytes are those of the model's own safetensors index."""
    facts = model_facts(name)
    assert facts.architecture.parameters * BYTES_16_BIT == facts.weights_bytes
    assert facts.sources


@pytest.mark.parametrize(
    ("model", "layer", "shape"),
    [
        ("llama-3.1-8b", "model.layers.31.self_attn.k_proj", (1024, 4096)),
        ("llama-3.3-70b", "model.layers.79.mlp.down_proj", (8192, 28672)),
        ("qwen2.5-7b", "model.layers.0.self_attn.v_proj", (512, 3584)),
        ("qwen2.5-32b", "model.layers.63.mlp.up_proj", (27648, 5120)),
        ("mixtral-8x7b", "model.layers.31.block_sparse_moe.experts.7.w2", (4096, 14336)),
        ("mistral-7b", "lm_head", (32768, 4096)),
    ],
)
def test_linears_have_the_published_shapes(model: str, layer: str, shape: tuple[int, int]) -> None:
    """Spot checks with shapes as transformers prints these models."""
    linears = model_facts(model).architecture.linears
    assert linears[layer] == shape
    assert not [name for name in linears if name.endswith((".gate", "embed_tokens", "norm"))]


# Keys and values of a token on one GPU, by hand: 2 x layers x KV heads on the GPU x 128 x bytes.
@pytest.mark.parametrize(
    ("model", "name", "kv_bytes"),
    [
        ("llama-3.1-8b", "fp8-tensorrt-llm-h100-tp1", 65536),
        ("llama-3.1-8b", "bf16-tensorrt-llm-a100-tp1", 131072),
        ("llama-3.3-70b", "fp8-tensorrt-llm-h100-tp2", 81920),
        ("llama-3.3-70b", "fp8-tensorrt-llm-h100-tp4", 40960),
        ("llama-3.3-70b", "int4-awq-tensorrt-llm-a100-tp2", 163840),
        ("qwen2.5-7b", "fp8-tensorrt-llm-llmapi-h100-tp1", 28672),
        ("qwen2.5-32b", "int4-awq-tensorrt-llm-a100-tp1", 262144),
        ("mixtral-8x7b", "bf16-tensorrt-llm-h100-tp2", 65536),
    ],
)
def test_the_batch_fits_the_memory_of_its_gpus(model: str, name: str, kv_bytes: int) -> None:
    """A token costs what arithmetic says, and the batch is at most what the heuristic of trtllm-bench rounds up to.

    The heuristic: NVIDIA/TensorRT-LLM tensorrt_llm/bench/build/tuning.py@b171e87, for 1000 tokens in and 1000 out.
    """
    config, architecture = load(shipped(model, name)).config, model_facts(model).architecture
    found = budget(config, architecture, memory_bytes=int(79.1 * 2**30))
    assert found.kv_bytes_per_token == kv_bytes
    requests = found.tokens / 2000
    rounding = 32 if requests < 256 else 128
    assert config.engine.max_batch_size <= requests + 2 * rounding
    assert config.engine.max_batch_size >= min(requests, 512) / 2


@every_config
def test_the_catalogue_says_what_the_budget_says(path: Path) -> None:
    """The table of build_configs/README.md has a row with weights, tokens of an 80 GB card, and the batch."""
    config, architecture = load(path).config, model_facts(path.parent.name).architecture
    found = budget(config, architecture, memory_bytes=usable_bytes("H100", 80))
    (weights,) = (row.n_bytes for row in found.rows if row.what == "weights")
    figures = f"{weights / 2**30:.1f} GiB | {found.tokens:,} | {config.engine.max_batch_size}"
    text = (ROOT / "build_configs" / "README.md").read_text(encoding="utf-8")
    assert f"| `{path.parent.name}/{path.stem}` | {figures} |" in text


@pytest.mark.parametrize("model", NAMES)
def test_a_downloaded_checkpoint_replaces_the_hub(model: str) -> None:
    """The overrides that the fragments name make a config of a directory, for nodes without network."""
    path = next(path for path in CONFIGS if path.parent.name == model)
    loaded = load(path, ["source.hub=null", "source.revision=null", "source.path=checkpoint"])
    assert loaded.config.source.path == Path.cwd() / "checkpoint"
    assert loaded.config.source.hub is None


def flags(path: Path) -> dict[str, str]:
    """The command of a plan as flag -> value."""
    command = plan(path)["command"]
    assert command[0] == "trtllm-build"
    assert len(command) % 2 == 1
    return dict(zip(command[1::2], command[2::2], strict=True))


@pytest.mark.parametrize(
    ("model", "name", "expected"),
    [
        # FP8 weights and KV on SM 90: block reuse stays possible, attention of prompts in FP8, GEMM plugin off.
        (
            "llama-3.1-8b",
            "fp8-tensorrt-llm-h100-tp1",
            {"--use_paged_context_fmha": "enable", "--use_fp8_context_fmha": "enable", "--gemm_plugin": "disable"},
        ),
        # 16-bit KV on SM 80: paged prompt attention works, FP8 attention does not exist; AWQ forces the fused MLP off.
        (
            "llama-3.1-8b",
            "int4-awq-tensorrt-llm-a100-tp1",
            {"--use_paged_context_fmha": "enable", "--use_fp8_context_fmha": "disable", "--use_fused_mlp": "disable"},
        ),
        # 16-bit models gain from the GEMM plugin.
        ("llama-3.1-8b", "bf16-tensorrt-llm-h100-tp1", {"--gemm_plugin": "auto", "--use_fused_mlp": "enable"}),
        # The case study on Llama 3.3 70B with TP 4: several profiles and reduce fusion; a rank is built on each GPU.
        (
            "llama-3.3-70b",
            "fp8-tensorrt-llm-h100-tp4",
            {"--multiple_profiles": "enable", "--reduce_fusion": "enable", "--workers": "4"},
        ),
        # Reduce fusion is not proven on Ampere, and the build resets it for Mistral.
        ("llama-3.3-70b", "int4-awq-tensorrt-llm-a100-tp2", {"--reduce_fusion": "disable"}),
        ("mistral-7b", "fp8-tensorrt-llm-h100-tp1", {"--reduce_fusion": "disable"}),
    ],
)
def test_the_command_follows_the_published_rules(model: str, name: str, expected: dict[str, str]) -> None:
    """Options by NVIDIA/TensorRT-LLM builder.py@008b2b8 and useful-build-time-flags.md@2a9abd9."""
    found = flags(shipped(model, name))
    assert {name: found[name] for name in expected} == expected
    # Not left to defaults that moved between releases.
    assert {"--tokens_per_block", "--use_paged_context_fmha", "--use_fp8_context_fmha"} <= set(found)


@pytest.mark.parametrize(
    ("model", "name", "changes", "where"),
    [
        ("llama-3.1-8b", "fp8-tensorrt-llm-h100-tp1", ["engine.gpu=A100"], "quantization.format"),
        ("llama-3.3-70b", "fp8-tensorrt-llm-h100-tp4", ["engine.gpu=A100"], "quantization.kv_cache"),
        ("qwen2.5-7b", "fp8-tensorrt-llm-llmapi-h100-tp1", ["engine.gpu=A100"], "quantization.format"),
        (
            "llama-3.1-8b",
            "int4-awq-tensorrt-llm-a100-tp1",
            ["quantization.format=w4a8_awq"],
            "quantization.format",
        ),
        (
            "llama-3.1-8b",
            "int4-awq-tensorrt-llm-h100-tp1",
            ["quantization.kv_cache=fp8"],
            "engine.kv_cache.enable_block_reuse",
        ),
        ("llama-3.1-8b", "bf16-tensorrt-llm-h100-tp1", ["quantization.kv_cache=int8"], "engine.enable_chunked_context"),
        ("llama-3.3-70b", "fp8-tensorrt-llm-h100-tp4", ["engine.tensor_parallel_size=3"], "tensor_parallel_size"),
        ("llama-3.3-70b", "fp8-tensorrt-llm-h100-tp2", ["engine.max_num_tokens=262144"], "engine.max_num_tokens"),
        ("llama-3.1-8b", "fp8-tensorrt-llm-h100-tp1", ["engine.max_seq_len=262144"], "engine.max_seq_len"),
        ("mistral-7b", "fp8-tensorrt-llm-h100-tp1", ["engine.pipeline_parallel_size=3"], "pipeline_parallel_size"),
        ("mixtral-8x7b", "bf16-tensorrt-llm-llmapi-h100-tp2", ["quantization.format=int8_sq"], "quantization.format"),
        ("mixtral-8x7b", "bf16-tensorrt-llm-h100-tp2", ["quantization.format=int8_sq"], "quantization.format"),
        ("qwen2.5-7b", "fp8-tensorrt-llm-h100-tp1", ["engine.tensor_parallel_size=8"], "tensor_parallel_size"),
        (
            "qwen2.5-32b",
            "int4-awq-tensorrt-llm-llmapi-a100-tp1",
            ["quantization.kv_cache=fp8"],
            "quantization.kv_cache",
        ),
    ],
)
def test_an_impossible_variant_is_refused(model: str, name: str, changes: list[str], where: str) -> None:
    """The config with the change has an error at that key, with something to do."""
    errors = [each for each in findings(load(shipped(model, name), changes), model) if each.severity == "error"]
    named = [problem for problem in errors if problem.where.endswith(where)]
    assert named, [str(problem) for problem in errors]
    assert all(problem.hint for problem in named)


def test_a_model_that_does_not_fit_is_refused_with_what_would_fit() -> None:
    """70B at 16 bit on one H100 does not fit its weights; the finding names a change of the config."""
    loaded = load(
        shipped("llama-3.3-70b", "fp8-tensorrt-llm-h100-tp2"),
        ["quantization.format=bf16", "quantization.kv_cache=auto", "engine.tensor_parallel_size=1"],
    )
    architecture = model_facts("llama-3.3-70b").architecture
    assert architecture.parameters * BYTES_16_BIT > 80 * GB
    errors = [problem for problem in preflight(loaded.config, architecture) if problem.severity == "error"]
    assert errors
    assert any(re.search(r"tensor_parallel_size|quantization\.format", problem.hint) for problem in errors)


def test_a_toolchain_without_engines_is_refused_while_the_config_is_read() -> None:
    """From 1.3 on there is no trtllm-build."""
    with pytest.raises(ConfigError, match="toolchain"):
        load(shipped("llama-3.1-8b", "fp8-tensorrt-llm-h100-tp1"), ["engine.toolchain=1.3.0"])
