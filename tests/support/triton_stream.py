"""A bare gRPC stream to a Triton model: what it answers, tensor by tensor."""

from __future__ import annotations

import queue
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_TYPES = {
    **dict.fromkeys(
        ("max_tokens", "top_k", "num_return_sequences", "min_tokens", "beam_width", "end_id", "input_ids",
         "input_lengths", "request_output_len", "stop_words_list"), np.int32
    ),
    **dict.fromkeys(("top_p", "temperature", "repetition_penalty"), np.float32),
    "seed": np.uint64,
    "lora_task_id": np.uint64,
}  # fmt: skip
_SHAPES = {"stop_words_list": (1, 2, -1)}


@dataclass
class Reply:
    """The responses with tensors, in order, and how the stream ended."""

    responses: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""
    final: bool = False

    def values(self, name: str) -> list[Any]:
        """All values of an output over the responses that carry it, flat."""
        return [value for r in self.responses if name in r for value in r[name].reshape(-1).tolist()]

    @property
    def text(self) -> str:
        """The sum of the chunks; every chunk by itself must be UTF-8."""
        return "".join(value.decode("utf-8") for value in self.values("text_output"))


def tensor(name: str, value: Any) -> Any:
    """An InferInput of batch size 1; strings as BYTES, bool as BOOL, numbers by the contract's type."""
    from tritonclient.grpc import InferInput
    from tritonclient.utils import np_to_triton_dtype

    values = value if isinstance(value, list) else [value]
    if isinstance(values[0], (str, bytes)):
        array = np.array([[v.encode() if isinstance(v, str) else v for v in values]], dtype=np.object_)
    else:
        array = np.array([values], dtype=_TYPES.get(name, np.bool_)).reshape(_SHAPES.get(name, (1, -1)))
    made = InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    made.set_data_from_numpy(array)
    return made


class Stream:
    """One request on its own connection.

    Args:
        url: host:port of gRPC.
        model: model to ask.
        request_id: the request's id; empty for none.
        inputs: input name -> value.
    """

    def __init__(self, url: str, model: str, request_id: str = "", **inputs: Any) -> None:
        from tritonclient.grpc import InferenceServerClient

        self._queue: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self._client = InferenceServerClient(url)
        self._client.start_stream(lambda result, error: self._queue.put((result, error)))
        self._client.async_stream_infer(
            model,
            [tensor(name, value) for name, value in inputs.items()],
            request_id=request_id,
            enable_empty_final_response=True,
        )
        self.reply = Reply()

    def read(self, responses: int | None = None) -> Reply:
        """Wait for so many responses, or for the end."""
        while not (self.reply.final or self.reply.error) and len(self.reply.responses) != responses:
            self._take(*self._queue.get(timeout=60))
        return self.reply

    def poll(self) -> Reply:
        """Take what has arrived, without waiting."""
        while not self._queue.empty():
            self._take(*self._queue.get())
        return self.reply

    def _take(self, result: Any, error: Any) -> None:
        if error is not None:
            self.reply.error = str(error)
            return
        response = result.get_response()
        outputs = {output.name: result.as_numpy(output.name) for output in response.outputs}
        if outputs:
            self.reply.responses.append(outputs)
        self.reply.final = response.parameters["triton_final_response"].bool_param

    def close(self, *, drop: bool = False) -> None:
        """Close the connection; with `drop` in mid-stream, as a client that dies does."""
        self._client.stop_stream(cancel_requests=drop)
        self._client.close()


def ask(url: str, model: str, request_id: str = "", **inputs: Any) -> Reply:
    """Send one request and read it to its end."""
    stream = Stream(url, model, request_id, **inputs)
    try:
        return stream.read()
    finally:
        stream.close()
