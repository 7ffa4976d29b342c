"""The public tensor contract seen from a client: which tensor carries which wish, and its bytes.

Two faces exist. The engine face (ensemble, tensorrt_llm_bls) is that of NVIDIA's inflight_batcher_llm
repository; the llmapi face is that of the Python-backend model in TensorRT-LLM's
triton_backend/all_models/llmapi. They differ in names only.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.errors import Problem, RequestError
from pipeline.triton.generation import GenerationRequest

Scalar = str | int | float | bool

ENGINE_NAMES = {
    "prompt": "text_input",
    "messages": "messages",
    "max_tokens": "max_tokens",
    "min_tokens": "min_tokens",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "seed": "seed",
    "stop": "stop_words",
    "stream": "stream",
    "return_log_probs": "return_log_probs",
    "exclude_input_in_output": "exclude_input_in_output",
}
LLMAPI_NAMES = {
    "prompt": "text_input",
    "max_tokens": "sampling_param_max_tokens",
    "temperature": "sampling_param_temperature",
    "top_k": "sampling_param_top_k",
    "top_p": "sampling_param_top_p",
    "seed": "sampling_param_seed",
    "stop": "sampling_param_stop",
    "stream": "streaming",
    "exclude_input_in_output": "sampling_param_exclude_input_from_output",
}
# Facts worth having; asked for where the model can tell.
TELLING = ("return_num_input_tokens", "return_num_output_tokens", "return_finish_reason")

_FORMATS = {"BOOL": "?", "INT32": "i", "INT64": "q", "UINT32": "I", "UINT64": "Q", "FP32": "f", "FP64": "d"}


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One input or output of a model: KServe datatype, and dims including the batch axis (-1: any)."""

    name: str
    datatype: str
    dims: tuple[int, ...]
    optional: bool = False


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """One encoded input."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, kw_only=True)
class ModelFace:
    """How a text model wants to be asked."""

    model: str
    inputs: Mapping[str, TensorSpec]
    decoupled: bool

    @property
    def names(self) -> Mapping[str, str]:
        """Name of the tensor for each field of GenerationRequest."""
        return LLMAPI_NAMES if "streaming" in self.inputs else ENGINE_NAMES

    def encode(self, request: GenerationRequest) -> list[Tensor]:
        """Turn a request into input tensors, each in the model's own datatype and rank.

        Raises:
            RequestError: the model lacks an input the request needs, or needs one the request lacks; all are named.
        """
        wishes = _wishes(request)
        problems = [
            Problem(where=wish, message=f"model '{self.model}' has no input for it.")
            for wish in sorted(wishes)
            if self.names.get(wish) not in self.inputs
        ]
        if request.stream and not self.decoupled:
            problems.append(
                Problem(where="stream", message=f"model '{self.model}' is not decoupled: it cannot stream.")
            )
        values = {self.names[wish]: value for wish, value in wishes.items() if wish in self.names}
        if self.names.get("exclude_input_in_output") in self.inputs:
            values[self.names["exclude_input_in_output"]] = [request.exclude_input_in_output]
        if self.names["stream"] in self.inputs:
            values[self.names["stream"]] = [request.stream]
        values |= {name: [True] for name in TELLING if name in self.inputs}
        if request.messages and not self.inputs["text_input"].optional:
            values["text_input"] = [""]
        problems += [
            Problem(where=name, message=f"model '{self.model}' requires it.")
            for name, spec in sorted(self.inputs.items())
            if not spec.optional and name not in values
        ]
        if problems:
            raise RequestError(
                f"model '{self.model}' cannot take this request.",
                problems=problems,
                hint=f"Its inputs: {', '.join(sorted(self.inputs))}.",
            )
        return [_encode(self.inputs[name], value) for name, value in sorted(values.items())]


def decode(datatype: str, raw: bytes) -> tuple[Scalar, ...]:
    """Decode the raw content of one output tensor, flattened; BYTES as UTF-8 text.

    BYTES elements are a little-endian 4-byte length each, followed by that many bytes (KServe v2 binary
    representation); the other types are packed little-endian.
    """
    if datatype != "BYTES":
        code = _FORMATS[datatype]
        return struct.unpack(f"<{len(raw) // struct.calcsize('<' + code)}{code}", raw)
    texts: list[str] = []
    offset = 0
    while offset < len(raw):
        (size,) = struct.unpack_from("<I", raw, offset)
        texts.append(raw[offset + 4 : offset + 4 + size].decode("utf-8"))
        offset += 4 + size
    return tuple(texts)


def _wishes(request: GenerationRequest) -> dict[str, Sequence[Scalar]]:
    """Collect what the request asks for; what it leaves to the server is absent."""
    wishes: dict[str, Sequence[Scalar]] = {}
    if request.prompt is not None:
        wishes["prompt"] = [request.prompt]
    else:
        wishes["messages"] = [request.messages_json]
    numbers = {
        "max_tokens": request.max_tokens,
        "min_tokens": request.min_tokens,
        "temperature": request.temperature,
        "top_k": request.top_k,
        "top_p": request.top_p,
        "seed": request.seed,
    }
    wishes |= {name: [value] for name, value in numbers.items() if value is not None}
    if request.stop:
        wishes["stop"] = request.stop
    if request.return_log_probs:
        wishes["return_log_probs"] = [True]
    return wishes


def _encode(spec: TensorSpec, values: Sequence[Scalar]) -> Tensor:
    shape = (1,) * (len(spec.dims) - 1) + (len(values),)
    if spec.datatype == "BYTES":
        texts = [str(value).encode() for value in values]
        data = b"".join(struct.pack("<I", len(text)) + text for text in texts)
    else:
        data = struct.pack(f"<{len(values)}{_FORMATS[spec.datatype]}", *values)
    return Tensor(name=spec.name, datatype=spec.datatype, shape=shape, data=data)
