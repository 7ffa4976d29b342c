"""From request tensors to the LLM API's arguments: the pure part of its core model, with a request of plain arrays."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.support.triton_repo import ROOT

pytestmark = pytest.mark.fast


class _Tensor:
    def __init__(self, value: Any) -> None:
        self._values = np.array([[value]], dtype=np.object_ if isinstance(value, bytes) else None)

    def as_numpy(self) -> Any:
        return self._values


class _Request:
    def __init__(self, **inputs: Any) -> None:
        self.inputs = inputs


@pytest.fixture
def sampling(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module, imported with the one function of Triton's helper that it reaches."""
    helper = ModuleType("triton_python_backend_utils")
    helper.__dict__["get_input_tensor_by_name"] = lambda request, name: (
        _Tensor(request.inputs[name]) if name in request.inputs else None
    )
    before = set(sys.modules)
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", helper)
    for place in (ROOT, ROOT / "tensorrt_llm" / "1", ROOT / "_llmapi"):
        monkeypatch.syspath_prepend(str(place))
    for name in ("_shared.tensors", "answer", "core_request"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import llm_sampling

    yield llm_sampling
    for name in set(sys.modules) - before:
        if name.startswith("_shared") or name in ("answer", "core_request", "llm_sampling", "visible_ids"):
            del sys.modules[name]


def arguments(sampling: ModuleType, **inputs: Any) -> dict[str, Any]:
    """Arguments for a request with three stop ids."""
    made: dict[str, Any] = sampling.sampling_arguments(
        _Request(**inputs), max_tokens=9, stop_ids={2, 0, 7}, log_probs=False, sequences=1
    )
    return made


def test_request_without_wishes_is_greedy(sampling: ModuleType) -> None:
    """The whole set: nothing that the client left out, and text is not made by the LLM API."""
    assert arguments(sampling) == {
        "max_tokens": 9,
        "end_id": 0,
        "stop_token_ids": [2, 7],
        "n": 1,
        "detokenize": False,
        "top_k": 1,
    }


@pytest.mark.parametrize(
    "inputs",
    [{"temperature": 0.7}, {"runtime_top_k": 1, "temperature": 0.7}, {"runtime_top_p": 0.9, "temperature": 0.0}],
)
def test_greedy_forms_of_the_public_contract_are_greedy(sampling: ModuleType, inputs: dict[str, Any]) -> None:
    """A temperature alone does not sample; temperature 0 and top_k 1 never do."""
    made = arguments(sampling, **inputs)
    assert made["top_k"] == 1
    assert "temperature" not in made


def test_sampling_wishes_are_passed_on(sampling: ModuleType) -> None:
    """top_p, temperature and seed."""
    made = arguments(sampling, runtime_top_p=0.5, temperature=2.0, seed=11)
    assert (made["top_k"], made["top_p"], made["temperature"], made["seed"]) == (None, 0.5, 2.0, 11)


def test_penalties_and_lengths_are_passed_on(sampling: ModuleType) -> None:
    """Names are the same on both sides."""
    wishes = {"min_tokens": 3, "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    assert wishes.items() <= arguments(sampling, **wishes, pad_id=4).items()


def test_end_id_of_the_request_is_the_end_id(sampling: ModuleType) -> None:
    """The others stop as well."""
    made = arguments(sampling, end_id=7)
    assert (made["end_id"], made["stop_token_ids"]) == (7, [0, 2])


def test_value_out_of_range_is_refused(sampling: ModuleType) -> None:
    """The message has the values."""
    with pytest.raises(ValueError, match=r"top_p 1\.5"):
        arguments(sampling, runtime_top_p=1.5)


@pytest.mark.parametrize(
    ("kind", "guide", "expected"),
    [
        ("json", "", {"json_object": True}),
        ("json_schema", "{}", {"json": "{}"}),
        ("regex", "a+", {"regex": "a+"}),
        ("ebnf_grammar", "root ::= x", {"grammar": "root ::= x"}),
    ],
)
def test_guides_have_their_names(sampling: ModuleType, kind: str, guide: str, expected: dict[str, Any]) -> None:
    """Types of the public contract -> fields of GuidedDecodingParams."""
    request = _Request(guided_decoding_guide_type=kind.encode(), guided_decoding_guide=guide.encode())
    assert sampling.guide_arguments(request) == expected


def test_unknown_guide_is_refused(sampling: ModuleType) -> None:
    """The message lists what there is."""
    with pytest.raises(ValueError, match="none of json, json_schema, regex, ebnf_grammar"):
        sampling.guide_arguments(_Request(guided_decoding_guide_type=b"xml"))


def test_request_without_guide_is_free_text(sampling: ModuleType) -> None:
    """No arguments, no guided decoding."""
    assert sampling.guide_arguments(_Request()) == {}
