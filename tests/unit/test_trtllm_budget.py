"""Memory of a GPU: counted weights, published capacities, and laws that hold for every model."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.checkpoints.architecture import Architecture
from pipeline.config.schema import BuildConfig
from pipeline.targets.tensorrt_llm.budget import (
    GIB,
    budget,
    kv_bytes_per_token,
    max_num_tokens,
    max_seq_len,
    usable_bytes,
)
from pipeline.targets.tensorrt_llm.weights import weight_bytes
from tests.support.model_facts import NAMES, model_facts
from tests.support.trtllm_cases import LLAMA_2_7B, LLAMA_3_1_8B, LLAMA_3_3_70B, QWEN3_32B, decoder, gpu_config

pytestmark = pytest.mark.fast

# ai-dynamo/aiconfigurator@095f58a5 tests/integration/test_trtllm_kv_cache_capacity.py, H100 SXM 80 GB, bf16 KV,
# fraction 0.8: (model, format, tp, max_seq_len, max_num_tokens, measured sequences of max_seq_len).
MEASURED = [
    (LLAMA_3_1_8B, "bf16", 2, 5096, 4096, 173),
    (LLAMA_3_1_8B, "bf16", 4, 5096, 4096, 363),
    (LLAMA_3_1_8B, "bf16", 2, 7144, 4096, 124),
    (LLAMA_3_1_8B, "bf16", 4, 7144, 4096, 259),
    (LLAMA_3_1_8B, "bf16", 2, 7144, 8192, 123),
    (LLAMA_3_1_8B, "bf16", 4, 7144, 8192, 258),
    (LLAMA_3_1_8B, "bf16", 2, 9192, 8192, 96),
    (LLAMA_3_1_8B, "bf16", 4, 9192, 8192, 201),
    (QWEN3_32B, "fp8", 2, 5096, 4096, 75),
    (QWEN3_32B, "fp8", 4, 5096, 4096, 169),
    (QWEN3_32B, "fp8", 2, 7144, 4096, 53),
    (QWEN3_32B, "fp8", 4, 7144, 4096, 121),
    (QWEN3_32B, "fp8", 2, 7144, 8192, 53),
    (QWEN3_32B, "fp8", 4, 7144, 8192, 120),
    (QWEN3_32B, "fp8", 2, 9192, 8192, 41),
    (QWEN3_32B, "fp8", 4, 9192, 8192, 93),
]


@pytest.mark.parametrize(("model", "form", "tensor", "length", "tokens", "measured"), MEASURED)
def test_kv_capacity_is_close_to_what_was_measured(
    *, model: Architecture, form: str, tensor: int, length: int, tokens: int, measured: int
) -> None:
    """The closed form is within 2.5 % of TensorRT-LLM on H100."""
    config = gpu_config(
        quantization__format=form,
        engine__tensor_parallel_size=tensor,
        engine__max_seq_len=length,
        engine__max_num_tokens=tokens,
        engine__kv_cache__free_gpu_memory_fraction=0.8,
    )
    found = budget(config, model, memory_bytes=usable_bytes("H100", 80))
    assert found.tokens / length == pytest.approx(measured + 0.5, rel=0.025)


@pytest.mark.parametrize("name", NAMES)
def test_16_bit_weights_are_those_of_the_published_checkpoint(name: str) -> None:
    """Only biases and routers, below 0.01 %, are left out."""
    facts = model_facts(name)
    counted = weight_bytes(gpu_config(quantization__format="bf16"), facts.architecture)
    assert counted <= facts.weights_bytes
    assert counted == pytest.approx(facts.weights_bytes, rel=1e-4)


def test_llama_weights_are_exact() -> None:
    """A Llama has neither biases nor routers, so every byte is counted."""
    facts = model_facts("llama-3.1-8b")
    assert weight_bytes(gpu_config(quantization__format="bf16"), facts.architecture) == facts.weights_bytes


def test_7b_model_has_about_14_gb_of_16_bit_weights() -> None:
    """The rule of thumb: 7 billion parameters of 2 bytes."""
    assert weight_bytes(gpu_config(quantization__format="bf16"), LLAMA_2_7B) / 1e9 == pytest.approx(13.5, abs=0.5)


@pytest.mark.parametrize(
    ("form", "group", "bits"),
    [("fp8", 128, 8), ("int8_sq", 128, 8), ("int8_wo", 128, 8), ("int4_awq", 128, 4.125), ("int4_awq", 64, 4.25)],
)
def test_weights_of_a_format_have_its_bits_with_scales(form: str, group: int, bits: float) -> None:
    """A group of 128 four-bit weights shares a 16-bit scale: 4.125 bits; the tables stay at 16 bit."""
    config = gpu_config(quantization__format=form, quantization__group_size=group)
    linear = sum(out * inner for name, (out, inner) in LLAMA_3_1_8B.linears.items() if name != "lm_head")
    tables = 2 * 128256 * 4096 * 2
    assert weight_bytes(config, LLAMA_3_1_8B) - tables == pytest.approx(linear * bits / 8, rel=0.005)


def test_excluded_layers_keep_16_bit() -> None:
    """What quantization.exclude names is counted with 2 bytes a weight."""
    all_quantized = gpu_config(quantization__format="fp8")
    kept = gpu_config(quantization__format="fp8", quantization__exclude=("lm_head", "*.mlp.down_proj"))
    assert weight_bytes(kept, LLAMA_3_1_8B) - weight_bytes(all_quantized, LLAMA_3_1_8B) == 32 * 4096 * 14336


def test_kv_bytes_follow_the_formula() -> None:
    """2 x 32 layers x 8 heads x 128 x 2 bytes; FP8 is half, tensor parallelism divides the heads."""
    assert kv_bytes_per_token(gpu_config(), LLAMA_3_1_8B) == 131072
    fp8 = gpu_config(quantization__format="fp8", quantization__kv_cache="fp8")
    assert kv_bytes_per_token(fp8, LLAMA_3_1_8B) == 65536
    assert kv_bytes_per_token(gpu_config(engine__tensor_parallel_size=4), LLAMA_3_1_8B) == 32768


def test_few_kv_heads_are_copied_and_never_less_than_one() -> None:
    """8 heads on 16 GPUs are one each, as on 8."""
    eight, sixteen = (gpu_config(engine__tensor_parallel_size=n) for n in (8, 16))
    assert kv_bytes_per_token(eight, LLAMA_3_1_8B) == kv_bytes_per_token(sixteen, LLAMA_3_1_8B) == 16384


def test_pool_holds_whole_blocks() -> None:
    """Published log: 63.44 GiB at 256 KiB a token and 64 tokens a block are 259840 tokens (docs, memory.md)."""
    config = gpu_config(engine__kv_cache__size_gib=63.44, engine__kv_cache__tokens_per_block=64)
    model = decoder(num_key_value_heads=16)
    assert kv_bytes_per_token(config, model) == 262144
    assert budget(config, model, memory_bytes=500 * GIB).tokens == 259840


def test_pipeline_stages_share_the_layers_and_the_fullest_counts() -> None:
    """The first stage has the embedding and the last the head, so a stage is half of the whole."""
    whole, half = (weight_bytes(gpu_config(engine__pipeline_parallel_size=n), LLAMA_3_1_8B) for n in (1, 2))
    assert half == pytest.approx(whole / 2, rel=1e-5)


def test_copied_head_of_a_tied_model_counts_and_a_shared_one_does_not() -> None:
    """The export writes a second table for tied models, except for Gemma on one pipeline rank."""
    tied = decoder(tie_word_embeddings=True)
    gemma = decoder(tie_word_embeddings=True, architecture="GemmaForCausalLM")
    table = 128256 * 4096 * 2
    assert weight_bytes(gpu_config(), tied) - weight_bytes(gpu_config(), gemma) == table


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, 2048),
        ({"engine__max_batch_size": 1, "engine__max_seq_len": 1024}, 1024),
        ({"engine__max_num_tokens": 16, "engine__max_batch_size": 8}, 32),
        (
            {
                "engine__build__max_draft_len": 63,
                "engine__build__speculative_decoding_mode": "medusa",
                "engine__max_num_tokens": 1024,
            },
            4096,
        ),
        ({"engine__build__remove_input_padding": "disable"}, 64 * 8192),
    ],
)
def test_tokens_per_iteration_are_what_the_build_makes_of_them(values: dict[str, object], expected: int) -> None:
    """Lowered to batch x length, raised to a block and to every sequence's drafts, or all of a padded batch."""
    assert max_num_tokens(gpu_config(**values), LLAMA_3_1_8B) == expected


def test_draft_tokens_lengthen_sequences() -> None:
    """The build adds max_draft_len to max_seq_len."""
    config = gpu_config(engine__build__max_draft_len=10, engine__build__speculative_decoding_mode="medusa")
    assert max_seq_len(config, LLAMA_3_1_8B) == 8202


def test_attention_window_and_beams_decide_what_a_sequence_takes() -> None:
    """A window of 1024 keeps 1024 tokens; four beams hold four times that."""
    config = gpu_config(engine__max_beam_width=4, serving__tensorrt_llm__max_attention_window_size="1024")
    assert budget(config, LLAMA_3_1_8B).tokens_per_sequence == 4096


def test_variant_is_the_smallest_that_is_enough() -> None:
    """8B at 16 bit runs on 40 GB; 70B in 4 bits on one GPU needs 80 GB."""
    small = gpu_config(engine__gpu="A100")
    large = gpu_config(engine__gpu="A100", quantization__format="int4_awq")
    assert budget(small, LLAMA_3_1_8B).memory_gb == 40
    assert budget(large, LLAMA_3_3_70B).memory_gb == 80


def test_largest_variant_is_judged_when_none_is_enough() -> None:
    """140 GB of weights fit on no H100; free memory is negative."""
    found = budget(gpu_config(), LLAMA_3_3_70B)
    assert (found.memory_gb, found.fits, found.tokens) == (94, False, 0)
    assert found.free < 0


def test_backend_fraction_goes_before_the_engines() -> None:
    """serving.tensorrt_llm wins over engine.kv_cache, which wins over upstream's 0.9."""
    engine = {"engine__kv_cache__free_gpu_memory_fraction": 0.5}
    assert budget(gpu_config(), LLAMA_3_1_8B).kv_fraction == 0.9
    assert budget(gpu_config(**engine), LLAMA_3_1_8B).kv_fraction == 0.5
    both = gpu_config(**engine, serving__tensorrt_llm__kv_cache_free_gpu_mem_fraction=0.7)
    assert budget(both, LLAMA_3_1_8B).kv_fraction == 0.7


def test_adapters_context_logits_prompt_tables_and_streaming_change_the_rows() -> None:
    """Each option that takes memory has its row; streamed weights leave the GPU."""
    plain = {row.what: row.n_bytes for row in budget(gpu_config(), LLAMA_3_1_8B).rows}
    config = gpu_config(
        engine__build__lora_plugin="auto",
        engine__build__gather_context_logits=True,
        engine__build__max_prompt_embedding_table_size=100,
        engine__build__weight_streaming=True,
        serving__tensorrt_llm__gpu_weights_percent=0.5,
    )
    rows = {row.what: row.n_bytes for row in budget(config, LLAMA_3_1_8B).rows}
    assert rows["context logits"] == 2048 * 128256 * 4
    assert rows["prompt table"] == 100 * 4096 * 2
    assert rows["weights"] == plain["weights"] // 2
    assert rows["LoRA cache"] > 0


def test_document_and_table_tell_the_same() -> None:
    """JSON has integers only where bytes are meant, and printed rows add up to the capacity."""
    found = budget(gpu_config(quantization__format="fp8"), LLAMA_3_1_8B)
    document = json.loads(json.dumps(found.document()))
    assert sum(row.n_bytes for row in found.table()) == found.capacity
    assert document["used_bytes"] + document["free_bytes"] == document["capacity_bytes"]
    assert document["kv_tokens"] == found.tokens
    assert document["fits"] is True


def test_engine_without_kv_cache_has_no_pool() -> None:
    """kv_cache.type disabled takes nothing and still fits."""
    found = budget(gpu_config(engine__kv_cache__type="disabled"), LLAMA_3_1_8B)
    assert (found.kv_pool, found.tokens, found.fits) == (0, 0, True)


def test_budget_without_a_gpu_is_an_error() -> None:
    """Nothing can be judged without the GPU's name."""
    with pytest.raises(ValueError, match=r"engine\.gpu"):
        budget(gpu_config(engine__gpu=None), LLAMA_3_1_8B)


def _engine(tensor: int, form: str, tokens: int) -> BuildConfig:
    return gpu_config(
        quantization__format=form,
        engine__tensor_parallel_size=tensor,
        engine__max_num_tokens=tokens,
        engine__gpu="H200",
    )


SIZES = {
    "form": st.sampled_from(["bf16", "fp8", "int8_sq", "int4_awq", "w4a8_awq", "int8_wo", "int4_wo"]),
    "tokens": st.integers(64, 32768),
    "layers": st.integers(1, 8),
    "hidden": st.integers(1, 8).map(lambda n: n * 1024),
    "heads": st.sampled_from([8, 16]),
}


@settings(deadline=None)
@given(**SIZES)
def test_more_tensor_parallelism_never_needs_more_weights_activations_or_kv(
    form: str, tokens: int, layers: int, hidden: int, heads: int
) -> None:
    """Per GPU; only communication buffers appear with the second GPU."""
    model = decoder(num_hidden_layers=layers, hidden_size=hidden, num_key_value_heads=heads)
    before: dict[str, int] = {}
    for tensor in (1, 2, 4, 8):
        config = _engine(tensor, form, tokens)
        found = budget(config, model)
        rows = {row.what: row.n_bytes for row in found.rows} | {"kv": found.kv_bytes_per_token}
        assert all(rows[what] <= before.get(what, rows[what]) for what in ("weights", "activations", "kv"))
        before = rows


@settings(deadline=None)
@given(**SIZES)
def test_narrower_formats_and_fewer_tokens_never_need_more(
    form: str, tokens: int, layers: int, hidden: int, heads: int
) -> None:
    """16 bit is the widest, and activations grow with tokens."""
    model = decoder(num_hidden_layers=layers, hidden_size=hidden, num_key_value_heads=heads)
    assert weight_bytes(_engine(1, form, tokens), model) <= weight_bytes(_engine(1, "bf16", tokens), model)
    assert budget(_engine(1, form, tokens), model).used <= budget(_engine(1, form, 2 * tokens), model).used


@settings(deadline=None)
@given(fraction=st.floats(0.01, 1), gib=st.integers(1, 200))
def test_pool_never_takes_more_than_its_share_and_tokens_never_more_than_the_pool(fraction: float, gib: int) -> None:
    """Whatever the memory and the fraction are."""
    config = gpu_config(engine__kv_cache__free_gpu_memory_fraction=fraction)
    found = budget(config, LLAMA_3_1_8B, memory_bytes=gib * GIB)
    assert 0 <= found.kv_pool <= max(0, found.free) * fraction + 1
    assert found.tokens * found.kv_bytes_per_token <= found.kv_pool
    assert found.tokens % 32 == 0
