"""From the tensors of a request to OpenVINO GenAI's GenerationConfig, with TensorRT-LLM's meaning of each input."""

from __future__ import annotations

from typing import Any

import openvino_genai as ov_genai
from _shared.tensors import InvalidRequestError, scalar


def generation_config(
    request: Any, *, max_new_tokens: int, stop_ids: set[int], log_probs: bool, sequence_index: int
) -> Any:
    """The engine's sampling settings of one sequence.

    top_k and top_p mean what they mean in TensorRT-LLM: both absent or 0 is greedy, top_k alone samples from the k
    best, top_p alone from the nucleus; temperature 0 and top_k 1 are greedy. The seed is 0 unless given; sequence i of
    several uses seed + i.

    Raises:
        InvalidRequestError: a value that the engine rejects.
    """
    config = ov_genai.GenerationConfig()
    config.max_new_tokens = max_new_tokens
    config.min_new_tokens = scalar(request, "min_tokens", 0)
    config.stop_token_ids = stop_ids
    config.logprobs = int(log_probs)
    config.repetition_penalty = scalar(request, "repetition_penalty", 1.0)
    config.presence_penalty = scalar(request, "presence_penalty", 0.0)
    config.frequency_penalty = scalar(request, "frequency_penalty", 0.0)
    top_k = scalar(request, "runtime_top_k", 0)
    top_p = scalar(request, "runtime_top_p", 0.0)
    temperature = scalar(request, "temperature", 1.0)
    if top_k < 0 or not 0.0 <= top_p <= 1.0 or temperature < 0:
        raise InvalidRequestError(
            f"top_k {top_k}, top_p {top_p}, temperature {temperature}: "
            "top_k and temperature must not be negative, top_p must lie in 0..1"
        )
    if (top_k or top_p) and top_k != 1 and temperature > 0:
        config.do_sample = True
        config.temperature = temperature
        config.top_k = top_k
        config.top_p = top_p or 1.0
        config.rng_seed = (scalar(request, "seed", 0) + sequence_index) % (1 << 63)
    try:
        config.validate()
    except RuntimeError as error:
        raise InvalidRequestError(f"sampling parameters: {str(error).strip().splitlines()[-1]}") from error
    return config
