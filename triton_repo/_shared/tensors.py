"""Reading a Triton request and its model's parameters, and answering with errors that name the input."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

_TRUE = ("1", "true", "True", "TRUE")


class InvalidRequestError(ValueError):
    """The client sent something that this model cannot honour; the message names the input."""


class Parameters:
    """`parameters` of config.pbtxt and the directory that relative paths in them start from."""

    def __init__(self, args: dict[str, str]) -> None:
        self.config: dict[str, Any] = json.loads(args["model_config"])
        self._values = {key: value["string_value"] for key, value in self.config.get("parameters", {}).items()}
        self.directory = Path(args["model_repository"]) / args["model_version"]

    def text(self, key: str, default: str = "") -> str:
        """Value of a parameter; the default when absent or empty."""
        return self._values.get(key) or default

    def flag(self, key: str, *, default: bool) -> bool:
        """Boolean parameter, written as TensorRT-LLM's backend accepts it."""
        value = self.text(key)
        return value in _TRUE if value else default

    def number(self, key: str, default: int) -> int:
        """Integer parameter."""
        return int(self.text(key) or default)

    def ids(self, key: str) -> list[int]:
        """Comma-separated integers."""
        return [int(part) for part in self.text(key).split(",") if part.strip()]

    def path(self, key: str) -> Path:
        """Path parameter; a relative one starts at the model's version directory."""
        return self.directory / self.text(key)


def array(request: Any, name: str) -> Any:
    """Content of an input as a flat numpy array, or None if it was not sent or is empty."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        return None
    values = tensor.as_numpy()
    return values.reshape(-1) if values.size else None


def scalar(request: Any, name: str, default: Any = None) -> Any:
    """First value of an input as a Python scalar (strings as str), or the default if it was not sent.

    Raises:
        InvalidRequestError: more than one value, or a string that is not UTF-8.
    """
    values = array(request, name)
    if values is None:
        return default
    if values.size != 1:
        raise InvalidRequestError(
            f"{name}: {values.size} values in one request. Send one request per prompt; they are batched in flight."
        )
    value = values[0]
    return _text(name, value) if values.dtype == np.object_ else value.item()


def strings(request: Any, name: str) -> list[str]:
    """All values of a STRING input, without the empty ones that clients send for 'none'."""
    values = array(request, name)
    return [] if values is None else [text for text in (_text(name, value) for value in values) if text]


def _text(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return bytes(value).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{name}: not UTF-8 ({error.reason} at byte {error.start})") from error


def refuse(request: Any, harmless: Mapping[str, tuple[Any, ...]], shown_as: Mapping[str, str] | None = None) -> None:
    """Refuse inputs that cannot be honoured, unless they carry a value without effect.

    Args:
        request: the Triton request.
        harmless: input name -> values that mean what happens anyway; an absent or empty input always does.
        shown_as: input name -> what clients call it, for the message.

    Raises:
        InvalidRequestError: names the first offending input and its value.
    """
    for name, accepted in harmless.items():
        values = array(request, name)
        if values is None:
            continue
        sent = [_text(name, value) if values.dtype == np.object_ else value.item() for value in values[:4]]
        if all(value in accepted or value == "" for value in sent) and values.size <= len(sent):
            continue
        shown = ", ".join(repr(value) for value in sent) + (", …" if values.size > len(sent) else "")
        client_name = (shown_as or {}).get(name, name)
        raise InvalidRequestError(f"{client_name}: not supported by this model (sent {shown}). Leave it out.")


def invalid(message: str) -> Any:
    """An INVALID_ARGUMENT answer."""
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, pb_utils.TritonError.INVALID_ARG))


def failure(message: str, *, unavailable: bool = False) -> Any:
    """An INTERNAL answer, or UNAVAILABLE when trying again later may help."""
    code = pb_utils.TritonError.UNAVAILABLE if unavailable else pb_utils.TritonError.INTERNAL
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code))
