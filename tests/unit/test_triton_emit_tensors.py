"""The C++ core model's tensors against the public contract: TensorRT-LLM's Triton backend, generation 1.0-1.2.

The table is written from the reference (NVIDIA/TensorRT-LLM triton_backend/all_models/inflight_batcher_llm,
tensorrt_llm/config.pbtxt@2a9abd9), not from our templates: name, type, dims, and flags r (reshape to a scalar),
o (optional), g (ragged batch).
"""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.config.deployment import ServingConfig
from pipeline.triton.model_config import parse
from pipeline.triton.repository import emit
from tests.support.gpu_engine import llama_8b_fp8

pytestmark = pytest.mark.fast

INPUTS = """
input_ids INT32 -1 og
encoder_input_features FP16 -1,-1 og
encoder_output_lengths INT32 1 ro
input_lengths INT32 1 r
request_output_len INT32 1 r
num_return_sequences INT32 1 ro
draft_input_ids INT32 -1 og
decoder_input_ids INT32 -1 og
decoder_input_lengths INT32 1 ro
draft_logits FP32 -1,-1 og
draft_acceptance_threshold FP32 1 ro
end_id INT32 1 ro
pad_id INT32 1 ro
stop_words_list INT32 2,-1 og
bad_words_list INT32 2,-1 og
embedding_bias FP32 -1 og
beam_width INT32 1 ro
temperature FP32 1 ro
runtime_top_k INT32 1 ro
runtime_top_p FP32 1 ro
runtime_top_p_min FP32 1 ro
runtime_top_p_decay FP32 1 ro
runtime_top_p_reset_ids INT32 1 ro
len_penalty FP32 1 ro
early_stopping BOOL 1 ro
repetition_penalty FP32 1 ro
min_tokens INT32 1 ro
beam_search_diversity_rate FP32 1 ro
presence_penalty FP32 1 ro
frequency_penalty FP32 1 ro
seed UINT64 1 ro
return_log_probs BOOL 1 ro
return_context_logits BOOL 1 ro
return_generation_logits BOOL 1 ro
return_perf_metrics BOOL 1 ro
return_num_input_tokens BOOL 1 ro
return_num_output_tokens BOOL 1 ro
exclude_input_in_output BOOL 1 ro
stop BOOL 1 ro
streaming BOOL 1 ro
prompt_embedding_table FP16 -1,-1 og
prompt_table_extra_ids UINT64 -1 og
prompt_vocab_size INT32 1 ro
cross_attention_mask BOOL -1,-1 og
mrope_rotary_cos_sin FP32 -1 o
mrope_position_deltas INT64 1 o
lora_task_id UINT64 1 ro
lora_weights FP16 -1,-1 og
lora_config INT32 -1,3 og
context_phase_params UINT8 -1 og
skip_cross_attn_blocks BOOL 1 og
retention_token_range_starts INT32 -1 og
retention_token_range_ends INT32 -1 og
retention_token_range_priorities INT32 -1 og
retention_token_range_durations_ms INT32 -1 og
retention_decode_priority INT32 1 og
retention_decode_duration_ms INT32 1 og
guided_decoding_guide_type STRING 1 og
guided_decoding_guide STRING 1 og
lookahead_window_size INT32 1 og
lookahead_ngram_size INT32 1 og
lookahead_verification_set_size INT32 1 og
"""
OUTPUTS = """
output_ids INT32 -1,-1
sequence_length INT32 -1
cum_log_probs FP32 -1
output_log_probs FP32 -1,-1
context_logits FP32 -1,-1
generation_logits FP32 -1,-1,-1
batch_index INT32 1
sequence_index INT32 1
context_phase_params UINT8 -1
kv_cache_alloc_new_blocks INT32 1
kv_cache_reused_blocks INT32 1
kv_cache_alloc_total_blocks INT32 1
arrival_time_ns INT64 1
first_scheduled_time_ns INT64 1
first_token_time_ns INT64 1
last_token_time_ns INT64 1
acceptance_rate FP32 1
total_accepted_draft_tokens INT32 1
total_draft_tokens INT32 1
num_input_tokens INT32 1
num_output_tokens INT32 1
"""


def _rows(text: str) -> set[str]:
    return {line.strip() for line in text.strip().splitlines()}


def _described(tensor: Any) -> str:
    from tritonclient.grpc.model_config_pb2 import DataType

    words = [tensor.name, DataType.Name(tensor.data_type).removeprefix("TYPE_"), ",".join(map(str, tensor.dims))]
    flags = {
        "r": tensor.HasField("reshape"),
        "o": getattr(tensor, "optional", False),
        "g": getattr(tensor, "allow_ragged_batch", False),
    }
    return " ".join(words) + (" " + "".join(f for f, on in flags.items() if on)).rstrip()


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The C++ core model of a Llama-3.1-8B FP8 for an H100."""
    directory = tmp_path_factory.mktemp("tensors")
    emit(llama_8b_fp8(directory / "engine"), ServingConfig(), name="llama", out=directory / "out")
    path = directory / "out" / "tensorrt_llm" / "config.pbtxt"
    return parse(path.read_text(), str(path))


def test_every_input_of_the_contract_is_there_and_no_other(core: Any) -> None:
    """Names, types, dims and flags of all 62 inputs."""
    assert {_described(tensor) for tensor in core.input} == _rows(INPUTS)


def test_every_output_of_the_contract_is_there_and_no_other(core: Any) -> None:
    """Names, types and dims of all 21 outputs."""
    assert {_described(tensor) for tensor in core.output} == _rows(OUTPUTS)
    assert len(core.output) == len(_rows(OUTPUTS))


def test_scalars_are_reshaped_to_no_dimension(core: Any) -> None:
    """`reshape: { shape: [] }` as upstream has it."""
    assert all(list(tensor.reshape.shape) == [] for tensor in core.input if tensor.HasField("reshape"))


def test_fixed_parts_are_upstreams(core: Any) -> None:
    """Name, backend, one CPU instance, decoupled, batching and the input memory flag."""
    assert (core.name, core.backend, core.max_batch_size) == ("tensorrt_llm", "tensorrtllm", 64)
    assert [(group.count, group.kind == group.KIND_CPU) for group in core.instance_group] == [(1, True)]
    assert core.model_transaction_policy.decoupled is True
    assert list(core.dynamic_batching.preferred_batch_size) == [64]
    assert core.parameters["FORCE_CPU_ONLY_INPUT_TENSORS"].string_value == "no"
