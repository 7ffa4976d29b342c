"""What a request to a core model asks for, checked; the same for every engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from _shared.tensors import InvalidRequestError, array, scalar
from answer import Wanted

# Inputs of the public contract that no Python core honours, with the values that ask for nothing.
WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "encoder_input_features": (),
    "encoder_output_lengths": (0,),
    "draft_input_ids": (),
    "decoder_input_lengths": (0, 1),
    "draft_logits": (),
    "draft_acceptance_threshold": (0.0,),
    "bad_words_list": (),
    "embedding_bias": (),
    "beam_width": (1,),
    "runtime_top_p_min": (0.0,),
    "runtime_top_p_decay": (1.0,),
    "runtime_top_p_reset_ids": (-1,),
    "len_penalty": (0.0, 1.0),
    "early_stopping": (False,),
    "beam_search_diversity_rate": (0.0,),
    "return_context_logits": (False,),
    "return_generation_logits": (False,),
    "prompt_embedding_table": (),
    "prompt_table_extra_ids": (),
    "prompt_vocab_size": (0,),
    "cross_attention_mask": (),
    "mrope_rotary_cos_sin": (),
    "mrope_position_deltas": (),
    "lora_task_id": (),
    "lora_weights": (),
    "lora_config": (),
    "context_phase_params": (),
    "skip_cross_attn_blocks": (False,),
    "retention_token_range_starts": (),
    "retention_token_range_ends": (),
    "retention_token_range_priorities": (),
    "retention_token_range_durations_ms": (),
    "retention_decode_priority": (),
    "retention_decode_duration_ms": (),
    "guided_decoding_guide_type": (),
    "guided_decoding_guide": (),
    "lookahead_window_size": (),
    "lookahead_ngram_size": (),
    "lookahead_verification_set_size": (),
}
# What clients of the ensemble and of BLS call the inputs that have another name here.
CLIENT_NAMES = {
    "bad_words_list": "bad_words",
    "len_penalty": "length_penalty",
    "prompt_table_extra_ids": "prompt_table_extra_id",
}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the engine was built for."""

    max_seq_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]


def prompt_ids(request: Any, limits: Limits) -> list[int]:
    """`input_ids` cut to `input_lengths`, every id checked: the engine itself reads any id and answers nonsense."""
    values = array(request, "input_ids")
    length = scalar(request, "input_lengths")
    if values is None or not length or length < 0:
        raise InvalidRequestError("input_ids: the prompt is empty")
    if length > values.size:
        raise InvalidRequestError(f"input_lengths: {length} is more than the {values.size} ids sent")
    ids: list[int] = values[:length].tolist()
    wrong = next((token for token in ids if not 0 <= token < limits.vocab_size), None)
    if wrong is not None:
        raise InvalidRequestError(f"input_ids: {wrong} is not in the vocabulary of {limits.vocab_size}")
    return ids


def output_length(request: Any, prompt_length: int, limits: Limits) -> int:
    """`request_output_len`, checked against the engine's sequence length."""
    length = scalar(request, "request_output_len")
    if length is None or length < 1:
        raise InvalidRequestError(f"request_output_len (max_tokens): {length} is not a positive number of tokens")
    if prompt_length + length > limits.max_seq_len:
        raise InvalidRequestError(
            f"prompt ({prompt_length} tokens) + max_tokens ({length}) = {prompt_length + length} exceeds "
            f"max_seq_len {limits.max_seq_len} of this engine. Shorten the prompt or ask for at most "
            f"{max(limits.max_seq_len - prompt_length, 0)} tokens."
        )
    return int(length)


def stop_id_lists(request: Any) -> list[list[int]]:
    """`stop_words_list` taken apart: shape [2, n], row 0 all ids joined, row 1 the end of each word, padded with -1."""
    values = array(request, "stop_words_list")
    if values is None:
        return []
    if values.size % 2:
        raise InvalidRequestError("stop_words_list: expected shape [2, n]")
    flat, ends = values.reshape(2, -1).tolist()
    words = []
    start = 0
    for end in ends:
        if end < 0:
            break
        if end <= start or end > len(flat):
            raise InvalidRequestError(f"stop_words_list: word ends {ends} do not rise within {len(flat)} ids")
        words.append(flat[start:end])
        start = end
    return words


def stop_ids_of(request: Any, words: list[list[int]], limits: Limits) -> set[int]:
    """Ids that end a sequence: the checkpoint's own, `end_id`, and stop words of one id."""
    stop_ids = {*limits.eos_token_ids, scalar(request, "end_id", -1), *(word[0] for word in words if len(word) == 1)}
    stop_ids.discard(-1)
    return stop_ids


def number_of_sequences(request: Any) -> int:
    """`num_return_sequences`, 1 unless given."""
    count = scalar(request, "num_return_sequences", 1)
    if count < 1:
        raise InvalidRequestError(f"num_return_sequences: {count} is not a positive number")
    return int(count)


def wanted_of(request: Any, *, interval: Callable[[], int], exclude_input: bool) -> Wanted:
    """What to put into the responses.

    Args:
        request: the Triton request.
        interval: ids that a streamed response should hold.
        exclude_input: leave the prompt out unless the request says otherwise.
    """
    return Wanted(
        outputs=frozenset(request.requested_output_names()),
        streaming=scalar(request, "streaming", default=False),
        interval=interval,
        echo_prompt=not scalar(request, "exclude_input_in_output", exclude_input),
        log_probs=scalar(request, "return_log_probs", default=False),
        num_input_tokens=scalar(request, "return_num_input_tokens", default=False),
        num_output_tokens=scalar(request, "return_num_output_tokens", default=False),
        perf_metrics=scalar(request, "return_perf_metrics", default=False),
    )
