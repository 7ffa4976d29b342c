"""Where Hugging Face modules lie in a TensorRT-LLM checkpoint."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.errors import IntegrityError
from pipeline.quantize.trtllm_layout import FAMILIES, Layout

pytestmark = pytest.mark.fast


def layout(architecture: str = "LlamaForCausalLM", tp: int = 1, pp: int = 1, **changes: Any) -> Layout:
    """A model of 8 layers, 8 heads of 16, 2 KV heads and a vocabulary of 501."""
    return Layout.of(
        {
            "architecture": architecture,
            "hidden_size": 128,
            "head_size": 16,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "intermediate_size": 256,
            "num_hidden_layers": 8,
            "vocab_size": 501,
            "mapping": {"world_size": tp * pp, "tp_size": tp, "pp_size": pp},
            **changes,
        }
    )


def stored(where: Layout, module: str) -> tuple[int, str]:
    """Pipeline rank and stored name of a module."""
    place = where.place(module)
    assert place is not None
    return place.stage, place.stored


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("self_attn.q_proj", "attention.qkv"),
        ("self_attn.o_proj", "attention.dense"),
        ("mlp.gate_proj", "mlp.fc"),
        ("mlp.up_proj", "mlp.gate"),
        ("mlp.down_proj", "mlp.proj"),
        ("input_layernorm", "input_layernorm"),
        ("post_attention_layernorm", "post_layernorm"),
    ],
)
def test_llama_modules_have_upstreams_names(module: str, name: str) -> None:
    """The activated branch is fc, the other one gate."""
    assert stored(layout(), f"model.layers.3.{module}") == (0, f"transformer.layers.3.{name}")


def test_layers_are_counted_from_zero_on_every_pipeline_rank() -> None:
    """Layer 5 of 8 on 4 pipeline ranks is layer 1 of rank 2."""
    assert stored(layout(pp=4), "model.layers.5.mlp.up_proj") == (2, "transformer.layers.1.mlp.gate")


@pytest.mark.parametrize(
    ("module", "place"),
    [
        ("model.embed_tokens", (0, "transformer.vocab_embedding")),
        ("model.norm", (3, "transformer.ln_f")),
        ("lm_head", (3, "lm_head")),
    ],
)
def test_the_ends_of_the_model_are_on_the_ends_of_the_pipeline(module: str, place: tuple[int, str]) -> None:
    """Embedding on the first rank, final norm and head on the last."""
    assert stored(layout(pp=4), module) == place


def test_tensor_ranks_of_a_stage_are_neighbours() -> None:
    """Rank = tensor rank + pipeline rank * tensor parallel size."""
    assert list(layout(tp=2, pp=4).ranks(3)) == [6, 7]


def test_q_k_and_v_follow_one_another_on_each_rank() -> None:
    """128 + 32 + 32 rows cut for two ranks."""
    where = layout(tp=2)
    places = [where.place(f"model.layers.0.self_attn.{name}_proj") for name in "qkv"]
    slices = [where.block_slice(place.part, name) for place, name in zip(places, "qkv", strict=True) if place]
    assert slices == [slice(0, 64), slice(64, 80), slice(80, 96)]


def test_few_kv_heads_are_copied_to_several_ranks() -> None:
    """Two KV heads on eight ranks: each rank has one head, four ranks the same one."""
    where = layout(tp=8)
    assert (where.copies("k"), where.rank_rows("k"), where.rank_rows("q")) == (4, 16, 16)


def test_the_vocabulary_is_padded_to_the_ranks() -> None:
    """501 rows on two ranks are 251 each."""
    assert layout(tp=2).rank_rows("vocab") == 251


def test_phi3_keeps_its_fused_tensors_with_the_halves_swapped() -> None:
    """gate_up_proj holds gate first, the stored fc holds it second."""
    where = layout("Phi3ForCausalLM")
    place = where.place("model.layers.0.mlp.gate_up_proj")
    assert place is not None
    assert place.part.blocks == ("gate", "up")
    assert [where.block_slice(place.part, block) for block in place.part.blocks] == [slice(256, 512), slice(0, 256)]


def test_experts_are_stacked_with_w3_first() -> None:
    """[experts, 2 * inner, hidden]: w3, then w1."""
    where = layout("MixtralForCausalLM")
    place = where.place("model.layers.0.block_sparse_moe.experts.11.w1")
    assert place is not None
    assert (place.stored, place.expert) == ("transformer.layers.0.mlp.fc", 11)
    assert where.block_slice(place.part, "gate") == slice(256, 512)


def test_a_module_of_another_family_has_no_place() -> None:
    """So that it is reported instead of dropped."""
    assert layout().place("model.layers.0.self_attn.q_norm") is None


def test_a_layer_beyond_the_last_has_no_place() -> None:
    """The config says 8 layers."""
    assert layout().place("model.layers.8.mlp.up_proj") is None


def test_an_unknown_architecture_is_an_integrity_error() -> None:
    """A reader that guesses would report nonsense."""
    with pytest.raises(IntegrityError, match="FalconForCausalLM"):
        layout("FalconForCausalLM")


def test_a_config_without_a_size_is_an_integrity_error() -> None:
    """The missing field is named."""
    with pytest.raises(IntegrityError, match="num_key_value_heads"):
        Layout.of({"architecture": "LlamaForCausalLM", "mapping": {}, "hidden_size": 8, "num_attention_heads": 1})


def test_every_family_stores_every_part_once() -> None:
    """Two parts of one stored tensor are different blocks of it."""
    for family in FAMILIES:
        places = [(part.stored, part.blocks) for part in family.parts.values()]
        assert len(set(places)) == len(places)
