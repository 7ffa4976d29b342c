"""A Triton Python model with the text contract of tensorrt_llm_bls that answers with its prompt, word by word.

Words in angle brackets are orders instead of text: <wait:SECONDS>, <error:TEXT>, <die>, <cancelled> (answers how
many streams were cancelled so far). The config parameter `initialize` makes loading fail: raise, die or hang.
Runs inside Triton's interpreter: numpy and the standard library only.
"""

from __future__ import annotations

import json
import os
import threading
import time
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Echoes; each request in its own thread, as an engine with requests in flight does."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load, or fail in the way the config asks for."""
        order = json.loads(args["model_config"])["parameters"].get("initialize", {}).get("string_value", "")
        if order == "raise":
            raise RuntimeError("tokenizer.json not found")
        if order == "die":
            os._exit(3)
        if order == "hang":
            time.sleep(600)
        self.n_cancelled = 0
        # Guard: Triton 2.51 was seen to die when threads of one stub ask for cancellation and end streams at once.
        self._triton = threading.Lock()

    def execute(self, requests: list[Any]) -> None:
        """Start answering."""
        for request in requests:
            threading.Thread(target=self._answer, args=(request, request.get_response_sender())).start()

    def _answer(self, request: Any, sender: Any) -> None:
        words = _text(request, "text_input").split()
        for message in json.loads(_text(request, "messages") or "[]"):
            words += message["content"].split()
        limit = _number(request, "max_tokens") or len(words)
        n_tokens = 0
        for word in words:
            with self._triton:
                gone = sender.is_cancelled()
            if gone:
                self.n_cancelled += 1
                break
            order, _, value = word.strip("<>").partition(":") if word.startswith("<") else ("say", "", word)
            if order == "wait":
                time.sleep(float(value))
            elif order == "die":
                os._exit(3)
            elif order == "error":
                error = pb_utils.TritonError(value, pb_utils.TritonError.INVALID_ARG)
                with self._triton:
                    sender.send(pb_utils.InferenceResponse(error=error))
                break
            elif n_tokens < limit:
                text = str(self.n_cancelled) if order == "cancelled" else value
                with self._triton:
                    sender.send(_response(text + " ", len(words)))
                n_tokens += 1
        with self._triton:
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def _response(text: str, n_input: int) -> Any:
    return pb_utils.InferenceResponse(
        [
            pb_utils.Tensor("text_output", np.array([text.encode()], dtype=object)),
            pb_utils.Tensor("num_output_tokens", np.array([1], dtype=np.int32)),
            pb_utils.Tensor("num_input_tokens", np.array([n_input], dtype=np.int32)),
        ]
    )


def _text(request: Any, name: str) -> str:
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return "" if tensor is None else tensor.as_numpy().reshape(-1)[0].decode()


def _number(request: Any, name: str) -> int | None:
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else int(tensor.as_numpy().reshape(-1)[0])
