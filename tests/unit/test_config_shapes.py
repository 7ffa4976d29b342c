"""The arithmetic of shapes: groups, ranks, lengths and layers that do not fit the model, and what fits."""

from __future__ import annotations

import pytest

from tests.support.architectures import LLAMA_8B, Facts, llama_linears
from tests.support.judging import GPU, judge, warnings

pytestmark = pytest.mark.fast

NO_PAGING = {"enable_chunked_context": False, "max_num_tokens": 8192, "kv_cache": {"enable_block_reuse": False}}


def test_a_group_size_that_does_not_divide_names_the_layers_and_the_largest_that_fits() -> None:
    """576 = 9 x 64: six kinds of layers fail with 128, down_proj does not."""
    (found,) = judge(Facts(), quantization={"format": "int4_awq", "group_size": 128})
    assert found == (
        "quantization.group_size: 128 does not divide the inputs of 180 layers: 576 in "
        "model.layers.*.self_attn.q_proj, model.layers.*.self_attn.k_proj, model.layers.*.self_attn.v_proj, "
        "model.layers.*.self_attn.o_proj, model.layers.*.mlp.gate_proj, model.layers.*.mlp.up_proj. "
        "Set group_size: 64, the largest that fits every layer."
    )


def test_excluded_layers_do_not_count_for_the_group_size() -> None:
    """What stays at 16 bit has no groups."""
    facts = Facts(linears={"model.layers.0.mlp.down_proj": (64, 100), "model.layers.0.self_attn.o_proj": (64, 128)})
    exclude = ["lm_head", "*.down_proj"]
    assert judge(facts, quantization={"format": "int4_awq", "group_size": 64, "exclude": exclude}) == []
    assert len(judge(facts, quantization={"format": "int4_awq", "group_size": 64})) == 1


def test_tensor_parallelism_splits_the_inputs_of_row_parallel_layers() -> None:
    """Llama-2-7B: 11008 = 86 x 128 = 172 x 64, so four GPUs take groups of 64 and eight take none of them."""
    facts = Facts(
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=32,
        num_hidden_layers=2,
        tie_word_embeddings=False,
        linears=llama_linears(2, 4096, 11008, 4096),
    )
    awq = {"format": "int4_awq", "group_size": 128}
    (four,) = judge(facts, quantization=awq, engine={**GPU, "tensor_parallel_size": 4})
    assert "2 layers: 2752 in model.layers.*.mlp.down_proj. Set group_size: 64" in four
    (eight,) = judge(facts, quantization=awq, engine={**GPU, "tensor_parallel_size": 8})
    assert "1376 in model.layers.*.mlp.down_proj. No group size of 64 or 128 fits" in eight
    assert judge(facts, quantization=awq, engine={**GPU, "tensor_parallel_size": 2}) == []


def test_an_odd_number_of_outputs_cannot_be_packed() -> None:
    """int4 stores two outputs in a byte."""
    facts = Facts(linears={"model.layers.0.mlp.up_proj": (65, 128)})
    (found,) = judge(facts, quantization={"format": "int4_awq"})
    assert "odd number: 65 in model.layers.*.mlp.up_proj" in found


@pytest.mark.parametrize(
    ("engine", "form", "expected"),
    [
        ({"tensor_parallel_size": 3}, "bf16", "3 does not divide 32 attention heads. Use 1, 2, 4, 8, 16 or 32."),
        ({"pipeline_parallel_size": 5}, "bf16", "5 does not divide 32 layers. Use 1, 2, 4, 8, 16 or 32."),
        ({"tensor_parallel_size": 16}, "int8_sq", "int8_sq cannot copy 8 key-value heads to 16 GPUs"),
        ({"max_num_tokens": 600000}, "bf16", "600000 tokens x hidden size 4096 pass TensorRT's limit"),
    ],
)
def test_parallelism_and_volumes_must_fit_the_model(engine: dict[str, object], form: str, expected: str) -> None:
    """Heads, layers and tensor volumes are checked with the numbers in the message."""
    (found,) = judge(LLAMA_8B, quantization={"format": form}, engine={**GPU, **engine})
    assert expected in found


def test_key_value_heads_must_be_shared_or_copied_evenly() -> None:
    """6 KV heads over 4 GPUs go neither way."""
    facts = Facts(num_attention_heads=12, num_key_value_heads=6, tie_word_embeddings=False)
    (found,) = judge(facts, engine={**GPU, "tensor_parallel_size": 4})
    assert "6 key-value heads can neither be shared by 4 GPUs" in found
    assert "Use 1, 2, 3, 6 or 12." in found


def test_more_gpus_than_kv_heads_copy_them_in_fp8() -> None:
    """Per-tensor scales can be copied, per-channel ones cannot."""
    assert judge(LLAMA_8B, quantization={"format": "fp8"}, engine={**GPU, "tensor_parallel_size": 16}) == []


def test_features_must_divide_evenly_over_the_gpus() -> None:
    """The message names the layers and the sizes that work."""
    facts = Facts(num_attention_heads=9, num_key_value_heads=9, tie_word_embeddings=False)
    (found,) = judge(facts, quantization={"format": "fp8"}, engine={**GPU, "tensor_parallel_size": 9})
    assert "9 does not divide the features of 90 layers: 1536 in" in found
    assert found.endswith(("Use 1, 2, 3, 4, 6 or 8.", "Use 1 or 3."))


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"engine": {"max_seq_len": 9000}}, "engine.max_seq_len: 9000 tokens are more than the model has positions"),
        ({"calibration": {"max_seq_len": 9000}}, "calibration.max_seq_len: 9000 tokens are more than the model has"),
        (
            {"engine": {"enable_chunked_context": False}},
            (
                "engine.max_num_tokens: without chunked context a prompt must fit into one iteration: 2048 tokens < "
                "the model's 8192 positions."
            ),
        ),
        (
            {"serving": {"default_max_tokens": 8192}},
            "serving.default_max_tokens: an answer of 8192 tokens leaves no room",
        ),
    ],
)
def test_lengths_must_fit_the_models_positions(sections: dict[str, object], expected: str) -> None:
    """The model's own length bounds what a config may promise."""
    (found,) = judge(Facts(), **sections)
    assert found.startswith(expected)


def test_excluding_a_part_of_fused_layers_is_refused() -> None:
    """q, k and v share a scale: all or none."""
    exclude = ["lm_head", "*.q_proj"]
    (found,) = judge(Facts(), quantization={"format": "int4_awq", "group_size": 64, "exclude": exclude})
    assert "in 30 layers q_proj would stay at 16 bit while k_proj, v_proj would not" in found
    assert judge(Facts(), quantization={"format": "fp8", "exclude": exclude}) == []


def test_a_tied_lm_head_must_be_excluded() -> None:
    """It has no weight of its own."""
    (found,) = judge(Facts(), quantization={"format": "fp8", "exclude": []})
    assert found == (
        "quantization.exclude: lm_head is not excluded, and it shares its weight with the embedding. "
        "Add lm_head to the list."
    )


def test_globs_that_match_nothing_are_warnings_and_name_an_example() -> None:
    """A misspelt layer would silently be quantized otherwise; the default lm_head is no mistake."""
    exclude = ["lm_head", "*.down_prj"]
    (warning,) = warnings(Facts(), quantization={"format": "fp8", "exclude": exclude})
    assert warning.message == "'*.down_prj' matches no layer of this model."
    assert "model.layers.0.self_attn.q_proj" in warning.hint


def test_a_glob_of_a_module_covers_what_is_inside() -> None:
    """'model.layers.0' excludes the seven linears of the first block, and excluding all blocks leaves nothing."""
    assert judge(Facts(), quantization={"format": "fp8", "exclude": ["lm_head", "model.layers.0"]}) == []
    (found,) = judge(Facts(), quantization={"format": "fp8", "exclude": ["lm_head", "model.layers.*"]})
    assert "no layer is left to quantize" in found
