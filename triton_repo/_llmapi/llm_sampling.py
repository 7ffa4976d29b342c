"""From the tensors of a request to the arguments of TensorRT-LLM's SamplingParams and GuidedDecodingParams.

Names: NVIDIA/TensorRT-LLM tensorrt_llm/sampling_params.py@000a01d.
"""

from __future__ import annotations

from typing import Any

from _shared.tensors import InvalidRequestError, scalar
from core_request import WITHOUT_EFFECT as OF_EVERY_CORE

_GUIDE = "guided_decoding_guide"
_GUIDE_TYPE = "guided_decoding_guide_type"
# Inputs that have no counterpart in the LLM API.
WITHOUT_EFFECT = {name: values for name, values in OF_EVERY_CORE.items() if name not in (_GUIDE, _GUIDE_TYPE)}
# guided_decoding_guide_type -> argument of GuidedDecodingParams.
_GUIDES = {"json_schema": "json", "regex": "regex", "ebnf_grammar": "grammar"}
_ALIKE = ("min_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty")


def sampling_arguments(
    request: Any, *, max_tokens: int, stop_ids: set[int], log_probs: bool, sequences: int
) -> dict[str, Any]:
    """Arguments of SamplingParams; what the client left out is left out.

    top_k and top_p as in the public contract: both absent or 0 is greedy, and so are temperature 0 and top_k 1.

    Raises:
        InvalidRequestError: a value out of range.
    """
    end_id = scalar(request, "end_id", -1)
    first = end_id if end_id in stop_ids else next(iter(sorted(stop_ids)), -1)
    arguments: dict[str, Any] = {
        "max_tokens": max_tokens,
        "end_id": first,
        "stop_token_ids": sorted(stop_ids - {first}) or None,
        "n": sequences,
        # Text is made by the models around this one.
        "detokenize": False,
    }
    if log_probs:
        arguments["logprobs"] = 1
    pad_id = scalar(request, "pad_id")
    if pad_id is not None:
        arguments["pad_id"] = pad_id
    for name in _ALIKE:
        value = scalar(request, name)
        if value is not None:
            arguments[name] = value
    return arguments | _randomness(request)


def _randomness(request: Any) -> dict[str, Any]:
    top_k = scalar(request, "runtime_top_k", 0)
    top_p = scalar(request, "runtime_top_p", 0.0)
    temperature = scalar(request, "temperature", 1.0)
    if top_k < 0 or not 0.0 <= top_p <= 1.0 or temperature < 0:
        raise InvalidRequestError(
            f"top_k {top_k}, top_p {top_p}, temperature {temperature}: "
            "top_k and temperature must not be negative, top_p must lie in 0..1"
        )
    if not (top_k or top_p) or top_k == 1 or temperature == 0:
        return {"top_k": 1}
    chosen = {"top_k": top_k or None, "top_p": top_p or None, "temperature": temperature}
    return chosen | {"seed": scalar(request, "seed", 0)}


def guide_arguments(request: Any) -> dict[str, Any]:
    """Arguments of GuidedDecodingParams; {} for free text.

    Raises:
        InvalidRequestError: an unknown type of guide, or a type without its guide.
    """
    kind = scalar(request, _GUIDE_TYPE, "")
    guide = scalar(request, _GUIDE, "")
    if not kind:
        return {}
    if kind == "json":
        return {"json_object": True}
    if kind not in _GUIDES:
        raise InvalidRequestError(f"{_GUIDE_TYPE}: '{kind}' is none of json, {', '.join(_GUIDES)}")
    if not guide:
        raise InvalidRequestError(f"{_GUIDE}: is empty, and the type is {kind}")
    return {_GUIDES[kind]: guide}
