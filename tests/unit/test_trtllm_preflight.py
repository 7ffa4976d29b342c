"""What fails before a GPU is touched: checks that calculate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoints.architecture import Architecture, Rope
from pipeline.config import legality
from pipeline.targets.tensorrt_llm.preflight import preflight
from tests.support.model_facts import model_facts
from tests.support.trtllm_cases import (
    A100,
    H100,
    LLAMA_2_7B,
    LLAMA_3_1_8B,
    LLAMA_3_3_70B,
    OLD_DRIVER,
    QWEN2_72B,
    decoder,
    gpu_config,
    machine,
    said,
)

pytestmark = pytest.mark.fast

B = "engine__build__"
S = "serving__tensorrt_llm__"
TP = "engine__tensor_parallel_size"
AWQ = {"quantization__format": "int4_awq"}


# --- 12: group sizes and tensor parallelism ---------------------------------------------------------------


def group_errors(architecture: Architecture, **values: Any) -> set[str]:
    """Who refuses a group size: legality, or the padding check here."""
    config = gpu_config(engine__max_seq_len=4096, engine__gpu="H200", **values)
    problems = [*legality.check(config, architecture), *preflight(config, architecture)]
    return {getattr(one, "id", "legality") for one in problems if one.where == "quantization.group_size"}


@pytest.mark.parametrize(
    ("architecture", "group", "tensor", "expected"),
    [
        (LLAMA_2_7B, 128, 1, set()),
        (LLAMA_2_7B, 128, 2, set()),
        (LLAMA_2_7B, 128, 4, {"legality"}),
        (LLAMA_2_7B, 64, 4, set()),
        (QWEN2_72B, 128, 1, set()),
        (QWEN2_72B, 128, 2, {"legality"}),
        (QWEN2_72B, 64, 2, set()),
        (QWEN2_72B, 64, 4, {"legality"}),
        (LLAMA_3_1_8B, 128, 8, set()),
    ],
)
def test_published_group_misfits_are_found(
    architecture: Architecture, group: int, tensor: int, expected: set[str]
) -> None:
    """11008 = 86 x 128 and 29568 = 231 x 128 = 462 x 64 (NVIDIA/TensorRT-LLM#1636, #776, #2445, #648)."""
    values = {**AWQ, "quantization__group_size": group, TP: tensor}
    assert group_errors(architecture, **values) == expected


def test_padding_of_either_axis_is_refused_where_the_group_size_alone_fits() -> None:
    """A hidden size of 3584 is a multiple of 128, but not of the 1024 that eight GPUs pad to."""
    narrow = decoder(hidden_size=3584, num_attention_heads=32, head_dim=128, num_hidden_layers=2)
    (found,) = said("TL12", narrow, **AWQ, **{TP: 8})
    assert "multiples of 1024" in found
    assert "14336 x 3584 in model.layers.*.mlp.gate_proj, model.layers.*.mlp.up_proj" in found
    assert "Set group_size: 64." in found
    assert said("TL12", narrow, **AWQ, **{TP: 4}) == []


def test_w4a8_pads_to_128_whatever_the_group_is() -> None:
    """There is no smaller group to offer, so fewer GPUs are."""
    narrow = decoder(hidden_size=3584, num_attention_heads=32, head_dim=128, num_hidden_layers=2)
    (found,) = said("TL12", narrow, quantization__format="w4a8_awq", **{TP: 8})
    assert "Use tensor_parallel_size 7" not in found
    assert "Use tensor_parallel_size 4" in found


def test_excluded_layers_are_not_padded() -> None:
    """A layer that stays at 16 bit has no groups."""
    narrow = decoder(hidden_size=3584, num_attention_heads=32, head_dim=128, num_hidden_layers=2)
    exclude = ("lm_head", "*.self_attn.*", "*.mlp.*")
    assert said("TL12", narrow, **AWQ, **{TP: 8}, quantization__exclude=exclude) == []


# --- 16, 23, 26, precision by model ------------------------------------------------------------------------


def test_unknown_rope_type_is_refused() -> None:
    """llama3 is known; 'proportional' is not."""
    odd = decoder(rope=Rope(theta=1e4, scaling={"rope_type": "proportional"}))
    (found,) = said("TL16", odd)
    assert found.startswith("error source: rope_scaling of type 'proportional'")
    assert said("TL16", LLAMA_3_1_8B) == []
    assert said("TL16", LLAMA_2_7B) == []


def test_shared_head_needs_one_pipeline_stage() -> None:
    """Gemma's head is the embedding; a tied Llama has a copy."""
    gemma = decoder(architecture="GemmaForCausalLM", tie_word_embeddings=True)
    llama = decoder(tie_word_embeddings=True)
    assert len(said("TL23", gemma, engine__pipeline_parallel_size=2)) == 1
    assert said("TL23", gemma) == []
    assert said("TL23", llama, engine__pipeline_parallel_size=2) == []


@pytest.mark.parametrize(
    ("architecture", "part"),
    [
        ("GptOssForCausalLM", "only the LLM API serves it. Set it to tensorrt_llm_llmapi."),
        ("Unheard", "KeyError"),
        ("", "an unnamed architecture"),
        ("Qwen3ForCausalLM", "warning"),
    ],
)
def test_architecture_outside_the_map_is_found(architecture: str, part: str) -> None:
    """With the way out that is left."""
    (found,) = said("TL26", decoder(architecture=architecture))
    assert part in found


def test_architecture_in_the_map_is_quiet() -> None:
    """Llama, Mistral and Mixtral share a class."""
    for name in ("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"):
        assert said("TL26", decoder(architecture=name)) == []


def test_precision_outside_upstreams_table_is_a_warning() -> None:
    """Mixtral has no SmoothQuant there; Llama has every format."""
    mixtral = model_facts("mixtral-8x7b").architecture
    (found,) = said("TL-5.2", mixtral, quantization__format="int8_sq")
    assert found.startswith("warning quantization.format: upstream does not list int8_sq for MixtralForCausalLM")
    assert said("TL-5.2", mixtral, quantization__format="bf16") == []
    for form in ("fp8", "int8_sq", "int4_awq", "w4a8_awq", "int8_wo", "int4_wo"):
        assert said("TL-5.2", LLAMA_3_1_8B, quantization__format=form) == []


# --- 1, 2, 5: image and machine ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "count"),
    [
        ({f"{B}image_tag": "26.05"}, 0),
        ({f"{B}image_tag": "26.03"}, 1),
        ({f"{B}image_tag": "26.08"}, 1),
        ({f"{B}image_tag": "25.10"}, 1),
        ({f"{B}image_tag": "25.10", "engine__toolchain": "1.0.0"}, 0),
        ({f"{B}image": "mirror.example/tritonserver:26.05-trtllm-python-py3"}, 0),
        ({f"{B}image": "mirror.example/tritonserver:26.05-trtllm-python-py3@sha256:00"}, 0),
        ({f"{B}image": "mirror.example/tritonserver:25.12-trtllm-python-py3"}, 1),
        ({f"{B}image": "mirror.example/mine"}, 1),
    ],
)
def test_image_must_carry_the_pinned_release(values: dict[str, Any], count: int) -> None:
    """Tags of the table that carry it pass; others, unknown ones and images without a tag are named."""
    assert len(said("TL1", **values)) == count


def test_installed_release_must_be_the_pinned_one() -> None:
    """An error where the build runs on the host, a warning where it may, nothing in a container."""
    host = machine(H100, tensorrt_llm="1.3.0")
    assert said("TL1", host=host, **{f"{B}where": "host"})[0].startswith("error engine.toolchain")
    assert said("TL1", host=host)[0].startswith("warning")
    assert said("TL1", host=host, **{f"{B}where": "container"}) == []
    assert said("TL1", host=machine(H100, tensorrt_llm="1.2.1"), **{f"{B}where": "host"}) == []


HERE = {f"{B}where": "host"}
LATER = {f"{B}where": "deferred"}


def test_driver_must_start_the_image() -> None:
    """R575 starts 1.0.0, not 1.2.1; a machine that could also defer the build is warned only."""
    assert said("TL5", host=machine(OLD_DRIVER), **HERE)[0].startswith("error")
    assert said("TL5", host=machine(OLD_DRIVER))[0].startswith("warning")
    assert said("TL5", host=machine(OLD_DRIVER), **HERE, engine__toolchain="1.0.0") == []
    assert said("TL5", host=machine(OLD_DRIVER), **LATER) == []
    assert said("TL5", host=machine(H100), **HERE) == []


def test_gpu_of_the_machine_must_be_the_configs() -> None:
    """An A100 cannot build for H100; a mixed machine is warned about; a deferred build asks nothing of a CPU."""
    assert said("TL2", host=machine(A100), **HERE)[0].startswith("error")
    assert said("TL2", host=machine(A100))[0].startswith("warning")
    assert said("TL2", host=machine(H100, A100), **HERE)[0].startswith("warning")
    assert said("TL2", host=machine(H100), **HERE) == []
    assert said("TL2", host=machine(A100), **LATER) == []
    assert said("TL2", host=machine()) == []
    assert len(said("TL2", host=machine(), **HERE)) == 1


def test_quantizing_needs_both_copies_in_host_memory() -> None:
    """70B to FP8 is about 140 + 70 GB (docs, workflow.md); unquantized formats hold one."""
    fp8 = {"quantization__format": "fp8", TP: 4}
    (found,) = said("TL24", LLAMA_3_3_70B, machine(memory_gib=180), **fp8)
    assert found.startswith("error host memory: quantizing needs at least 199.1 GiB")
    assert said("TL24", LLAMA_3_3_70B, machine(memory_gib=256, available_gib=100), **fp8)[0].startswith("warning")
    assert said("TL24", LLAMA_3_3_70B, machine(memory_gib=256), **fp8) == []
    assert said("TL24", LLAMA_3_3_70B, machine(memory_gib=100), **{TP: 4}) == []


def test_build_workers_must_fit_into_host_memory() -> None:
    """Each worker loads its rank; too many are killed, one is offered."""
    values = {TP: 4, f"{B}workers": 4}
    cards = (H100,) * 4
    (found,) = said("TL27", LLAMA_3_3_70B, machine(*cards, memory_gib=100), **values)
    assert found.startswith("error engine.build.workers: 4 worker(s) load 32.9 GiB each")
    assert found.endswith("Use 2. [TL27]")
    assert said("TL27", LLAMA_3_3_70B, machine(*cards, memory_gib=200), **values)[0].startswith("warning")
    assert said("TL27", LLAMA_3_3_70B, machine(*cards, memory_gib=512), **values) == []
    assert said("TL27", LLAMA_3_3_70B, machine(*cards, memory_gib=100), **values, **{f"{B}where": "deferred"}) == []


def test_more_workers_than_ranks_or_gpus_are_named() -> None:
    """Upstream caps them silently."""
    assert "1 rank(s)" in said("TL27", host=machine(H100, H100), **{f"{B}workers": 2})[0]
    assert "this machine has 1" in said("TL27", host=machine(H100), **{f"{B}workers": 2, TP: 2})[0]
    assert said("TL27", host=machine(H100, H100), **{f"{B}workers": 2, TP: 2}) == []


# --- 22, 28, 29, 30, 33, 62: sizes ---------------------------------------------------------------------------


def test_more_gpus_than_a_node_has_need_nodes() -> None:
    """Sixteen ranks are two nodes of eight."""
    values = {TP: 8, "engine__pipeline_parallel_size": 2}
    assert said("TL22", **values)[0].endswith("Set it to 2, or use fewer GPUs. [TL22]")
    assert said("TL22", **values, **{f"{S}num_nodes": 2}) == []


def test_chunked_context_that_the_server_turns_off_limits_prompts() -> None:
    """engine.enable_chunked_context alone is judged by config/rules.py."""
    (found,) = said("TL28", **{f"{S}enable_chunked_context": False})
    assert "prompts above 2048 tokens" in found
    assert said("TL28", **{f"{S}enable_chunked_context": False}, engine__max_num_tokens=8192) == []
    assert said("TL28", **{f"{S}enable_chunked_context": True}) == []


@pytest.mark.parametrize(
    ("values", "count"),
    [
        ({f"{B}remove_input_padding": "disable"}, 1),
        ({f"{B}remove_input_padding": "disable", "engine__max_batch_size": 32}, 0),
        ({f"{B}gather_context_logits": True, "engine__max_num_tokens": 17000}, 1),
        ({f"{B}gather_context_logits": True, "engine__max_num_tokens": 16384}, 0),
        ({"engine__max_num_tokens": 17000}, 0),
    ],
)
def test_tensors_of_2_to_the_31_elements_are_refused(values: dict[str, Any], count: int) -> None:
    """64 x 8192 padded tokens x 4096 are 2^31; 17000 rows of 128256 logits are more."""
    assert len(said("TL29", **values)) == count


def test_server_may_not_ask_for_more_than_the_engine() -> None:
    """Beams and batch size."""
    assert len(said("TL30", **{f"{S}max_beam_width": 2})) == 1
    assert said("TL30", **{f"{S}max_beam_width": 2}, engine__max_beam_width=2) == []
    assert len(said("TL62", **{f"{S}triton_max_batch_size": 65})) == 1
    assert said("TL62", **{f"{S}triton_max_batch_size": 64}) == []


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"engine__max_batch_size": 1, "engine__max_seq_len": 1024}, "lowers 2048 to 1024"),
        ({"engine__max_batch_size": 8, "engine__max_num_tokens": 16}, "raises 16 to 32"),
        ({"engine__opt_num_tokens": 4096}, "lowers 4096 to max_num_tokens 2048"),
    ],
)
def test_sizes_that_the_build_changes_are_named(values: dict[str, Any], part: str) -> None:
    """Each with the value to write."""
    assert any(part in found for found in said("TL33", **values))


def test_sizes_that_the_build_keeps_are_quiet() -> None:
    """The defaults are kept."""
    assert said("TL33") == []


# --- 47, 50: launch ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "count"), [("0,1", 0), ("0,1;2,3", 0), ("0", 1), ("0,0", 1), ("0-1", 1), ("0,1;2", 1)]
)
def test_gpus_are_one_per_rank(text: str, count: int) -> None:
    """Two ranks per instance, each on a GPU of its own."""
    assert len(said("TL47", **{TP: 2, f"{S}gpu_device_ids": text})) == count


@pytest.mark.parametrize(
    ("text", "count"), [("1,2", 0), ("1,2;3,4", 0), ("0,1", 1), ("1", 1), ("1,2;2,3", 1), ("a", 1)]
)
def test_participants_are_one_per_rank_and_never_rank_0(text: str, count: int) -> None:
    """Rank 0 is the orchestrator."""
    values = {TP: 2, "serving__launch_mode": "orchestrator_no_spawn", f"{S}participant_ids": text}
    assert len(said("TL50", **values)) == count


# --- 64, 65: adapters -------------------------------------------------------------------------------------------


def adapter(path: Path, **config: Any) -> str:
    """A directory with adapter_config.json; returns its path."""
    path.mkdir()
    (path / "adapter_config.json").write_text(json.dumps(config))
    return str(path)


def test_adapter_above_the_engines_rank_is_refused(tmp_path: Path) -> None:
    """'low_rank must be smaller than mMaxLowRank (64)' is found before the build (NVIDIA/TensorRT-LLM#1903)."""
    wide = adapter(tmp_path / "wide", r=128, target_modules=["q_proj"])
    (found,) = said("TL65", **{f"{B}lora_dir": (wide,)})
    assert found.endswith("Raise it to 128. [TL65]")
    cache = {f"{S}lora_cache_max_adapter_size": 128}
    assert said("TL65", **{f"{B}lora_dir": (wide,), f"{B}max_lora_rank": 128}, **cache) == []


def test_adapter_with_other_modules_is_refused(tmp_path: Path) -> None:
    """Hugging Face's names are translated to upstream's."""
    directory = adapter(tmp_path / "a", r=8, target_modules=["q_proj", "down_proj"])
    values = {f"{B}lora_dir": (directory,)}
    assert said("TL65", **values, **{f"{B}lora_target_modules": ("attn_q",)})[0].endswith("Add mlp_4h_to_h. [TL65]")
    assert said("TL65", **values, **{f"{B}lora_target_modules": ("attn_q", "mlp_4h_to_h")}) == []
    assert said("TL65", **values) == []


def test_unreadable_and_foreign_adapters_are_named(tmp_path: Path) -> None:
    """A path of another machine is a warning; a wrong file is an error."""
    assert said("TL65", **{f"{B}lora_dir": (str(tmp_path / "none"),)})[0].startswith("warning")
    foreign = adapter(tmp_path / "foreign", peft_type="IA3")
    assert said("TL65", **{f"{B}lora_dir": (foreign,)})[0].startswith("error")
    assert said("TL65", **{f"{B}lora_dir": (str(tmp_path / "none"),), f"{B}lora_ckpt_source": "nemo"}) == []


def test_caches_must_hold_the_adapters(tmp_path: Path) -> None:
    """Rank above the cache's is an error; more bytes than the host cache has is a warning."""
    values = {f"{B}lora_plugin": "auto", f"{B}max_lora_rank": 128}
    assert said("TL64", **values)[0].endswith("Set it to 128. [TL64]")
    assert said("TL64", **values, **{f"{S}lora_cache_max_adapter_size": 128}) == []
    directory = adapter(tmp_path / "a", r=8, target_modules=["q_proj"])
    need = 32 * 8 * (4096 + 4096) * 2
    room = {f"{B}lora_dir": (directory,), f"{S}lora_cache_host_memory_bytes": need - 1}
    assert said("TL64", **room)[0].endswith(f"Set it to {need} or more. [TL64]")
    assert said("TL64", **{**room, f"{S}lora_cache_host_memory_bytes": need}) == []
