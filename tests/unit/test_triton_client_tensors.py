"""Requests become the tensors a model declares, and what it does not declare is refused by name."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import RequestError
from pipeline.triton.generation import GenerationRequest
from pipeline.triton.tensors import ModelFace, Tensor, TensorSpec, decode

pytestmark = pytest.mark.fast

ENGINE_TYPES = {
    "text_input": "BYTES",
    "max_tokens": "INT32",
    "temperature": "FP32",
    "seed": "UINT64",
    "stop_words": "BYTES",
    "stream": "BOOL",
    "exclude_input_in_output": "BOOL",
    "return_num_output_tokens": "BOOL",
}
LLMAPI_TYPES = {
    "text_input": "BYTES",
    "streaming": "BOOL",
    "sampling_param_max_tokens": "INT32",
    "sampling_param_stop": "BYTES",
    "sampling_param_exclude_input_from_output": "BOOL",
}


def make_face(types: dict[str, str], *, required: tuple[str, ...] = (), batched: bool = True) -> ModelFace:
    """Declare a model whose inputs have these datatypes."""
    dims = (-1, 1) if batched else (1,)
    inputs = {
        name: TensorSpec(name=name, datatype=datatype, dims=dims, optional=name not in required)
        for name, datatype in types.items()
    }
    return ModelFace(model="m", inputs=inputs, decoupled=True)


def encoded(face: ModelFace, request: GenerationRequest) -> dict[str, Tensor]:
    """Encode and index by name."""
    return {tensor.name: tensor for tensor in face.encode(request)}


def test_engine_names_types_and_batch_axis() -> None:
    """Every value arrives under its public name, in the declared type, with the batch axis."""
    request = GenerationRequest(prompt="hé", max_tokens=5, temperature=0.5, seed=2**63, stop=("a", "bc"))
    tensors = encoded(make_face(ENGINE_TYPES), request)
    assert tensors["text_input"].data == b"\x03\x00\x00\x00h\xc3\xa9"
    assert tensors["max_tokens"].data == struct.pack("<i", 5)
    assert tensors["temperature"].data == struct.pack("<f", 0.5)
    assert tensors["seed"].data == struct.pack("<Q", 2**63)
    assert tensors["stop_words"].shape == (1, 2)
    assert decode("BYTES", tensors["stop_words"].data) == ("a", "bc")
    assert tensors["stream"].data == b"\x01"
    assert tensors["return_num_output_tokens"].data == b"\x01"


def test_llmapi_names() -> None:
    """The llmapi face gets the same wishes under its own names."""
    tensors = encoded(make_face(LLMAPI_TYPES), GenerationRequest(prompt="p", max_tokens=3, stop=("x",), stream=False))
    assert set(tensors) == set(LLMAPI_TYPES)
    assert tensors["streaming"].data == b"\x00"


def test_unbatched_models_get_one_axis() -> None:
    """A model without batching is given rank one."""
    assert encoded(make_face(ENGINE_TYPES, batched=False), GenerationRequest(prompt="p"))["text_input"].shape == (1,)


def test_every_missing_input_is_named() -> None:
    """What the model lacks is refused, all of it at once."""
    request = GenerationRequest(messages=({"role": "user", "content": "x"},), top_k=4, return_log_probs=True)
    with pytest.raises(RequestError) as refusal:
        make_face(ENGINE_TYPES).encode(request)
    assert {problem.where for problem in refusal.value.problems} == {"messages", "top_k", "return_log_probs"}


def test_a_required_input_is_asked_for() -> None:
    """A model that requires max_tokens does not get a guess."""
    with pytest.raises(RequestError, match="max_tokens: model 'm' requires it"):
        make_face(ENGINE_TYPES, required=("max_tokens",)).encode(GenerationRequest(prompt="p"))


def test_streaming_from_a_model_that_cannot_is_refused() -> None:
    """A model that is not decoupled answers once, so streaming is refused and the rest works."""
    face = ModelFace(model="m", inputs=make_face(ENGINE_TYPES).inputs, decoupled=False)
    with pytest.raises(RequestError, match="not decoupled"):
        face.encode(GenerationRequest(prompt="p"))
    assert face.encode(GenerationRequest(prompt="p", stream=False))


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_packed_numbers_decode_to_themselves(values: list[int]) -> None:
    """INT32 content is read back whatever its length."""
    assert decode("INT32", struct.pack(f"<{len(values)}i", *values)) == tuple(values)


@given(st.lists(st.text()))
def test_texts_decode_to_themselves(texts: list[str]) -> None:
    """BYTES content is read back, empty elements and any alphabet included."""
    raw = b"".join(struct.pack("<I", len(text.encode())) + text.encode() for text in texts)
    assert decode("BYTES", raw) == tuple(texts)
