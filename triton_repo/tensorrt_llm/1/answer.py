"""What one Triton request gets back: the responses of its sequences, in order, with the final flag on the last one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from _shared.tensors import failure
from visible_ids import Piece, VisibleIds


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What the client asked for.

    `interval` tells how many ids a streamed response should hold now; the first response never waits.
    """

    outputs: frozenset[str]
    streaming: bool
    interval: Callable[[], int]
    echo_prompt: bool
    log_probs: bool
    num_input_tokens: bool
    num_output_tokens: bool
    perf_metrics: bool


class Answer:
    """The open answer to one request; shared by its sequences.

    Args:
        request_id: the client's id, by which a later request with `stop` cancels this one.
        sender: Triton's response sender.
        wanted: what to put into the responses.
    """

    def __init__(self, request_id: str, sender: Any, wanted: Wanted) -> None:
        self.request_id = request_id
        self._sender = sender
        self.wanted = wanted
        self.arrival_time_ns = time.monotonic_ns()
        self.sequences: list[SequenceAnswer] = []
        self.is_open = True
        # Guard: Triton 2.51 crashes when it is asked about cancellation while the final flag closes the answer.
        self._closing = threading.Lock()

    def cancel(self) -> None:
        """Ask the engine loop to drop every sequence before its next step."""
        for sequence in self.sequences:
            sequence.abandoned = True

    def cancel_if_abandoned(self) -> None:
        """Cancel if the client has gone. Callable from any thread."""
        with self._closing:
            gone = self.is_open and self._sender.is_cancelled()
        if gone:
            self.cancel()

    def send(self, response: Any) -> None:
        """Send a response; the last open sequence's last one carries the final flag."""
        if not self.is_open:
            return
        if all(sequence.ended for sequence in self.sequences):
            self._close(response)
        else:
            self._sender.send(response)

    def end_if_last(self) -> None:
        """Send the bare final flag if every sequence has ended."""
        if self.is_open and all(sequence.ended for sequence in self.sequences):
            self._close(None)

    def fail(self, message: str) -> None:
        """Answer with an error, once, and drop the other sequences."""
        self.cancel()
        if self.is_open:
            self._close(failure(message))

    def _close(self, response: Any) -> None:
        with self._closing:
            self.is_open = False
            self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


class SequenceAnswer:
    """One sequence of an answer; what the engine loop calls a generation.

    Args:
        answer: the request's answer.
        index: number of the sequence among `num_return_sequences`.
        prompt: ids given to the engine.
        config: the engine's sampling settings.
        visible: decides which ids may be shown.
        stop_ids: ids that end a sequence and are not shown.
    """

    def __init__(
        self, answer: Answer, index: int, *, prompt: Sequence[int], config: Any, visible: VisibleIds, stop_ids: set[int]
    ) -> None:
        self.prompt = prompt
        self.config = config
        self.abandoned = False
        self.ended = False
        self._answer = answer
        self._index = index
        self._visible = visible
        self._stop_ids = stop_ids
        self._unsent = Piece()
        self._has_sent = False
        self._cum_log_prob = 0.0
        self._times = {"arrival_time_ns": answer.arrival_time_ns}

    def scheduled(self) -> None:
        """Note when the engine took the prompt."""
        self._times["first_scheduled_time_ns"] = time.monotonic_ns()

    def accept(self, ids: list[int], log_probs: list[float], *, finished: bool) -> None:
        """Show what became visible; see `engine_loop.Generation`."""
        now = time.monotonic_ns()
        self._times.setdefault("first_token_time_ns", now)
        self._times["last_token_time_ns"] = now
        if finished and ids and ids[-1] in self._stop_ids:
            ids, log_probs = ids[:-1], log_probs[: len(ids) - 1]
        piece = self._visible.feed(ids, log_probs, finished=finished)
        self._unsent.ids += piece.ids
        self._unsent.log_probs += piece.log_probs
        self.ended = finished or self._visible.stopped
        self.abandoned |= self._visible.stopped
        if self.ended and self._has_sent and not self._unsent.ids:
            self._answer.end_if_last()
        elif self.ended or self._is_due():
            self._answer.send(self._response())

    def _is_due(self) -> bool:
        wanted = self._answer.wanted
        if not wanted.streaming or not self._unsent.ids:
            return False
        return not self._has_sent or len(self._unsent.ids) >= wanted.interval()

    def close(self) -> None:
        """End without further tokens."""
        self.ended = True
        self._answer.end_if_last()

    def fail(self, message: str) -> None:
        """End with an error."""
        self.ended = True
        self._answer.fail(message)

    def _response(self) -> Any:
        piece, self._unsent = self._unsent, Piece()
        wanted = self._answer.wanted
        ids = [*self.prompt, *piece.ids] if wanted.echo_prompt and not self._has_sent else piece.ids
        self._has_sent = True
        self._cum_log_prob += sum(piece.log_probs)
        values: dict[str, Any] = {
            "output_ids": np.array([[ids]], dtype=np.int32),
            "sequence_length": np.array([[len(ids)]], dtype=np.int32),
            "batch_index": np.array([[0]], dtype=np.int32),
            "sequence_index": np.array([[self._index]], dtype=np.int32),
        }
        if wanted.log_probs:
            values["output_log_probs"] = np.array([[piece.log_probs]], dtype=np.float32)
            values["cum_log_probs"] = np.array([[self._cum_log_prob]], dtype=np.float32)
        if wanted.num_input_tokens:
            values["num_input_tokens"] = np.array([[len(self.prompt)]], dtype=np.int32)
        if wanted.num_output_tokens:
            values["num_output_tokens"] = np.array([[len(piece.ids)]], dtype=np.int32)
        if wanted.perf_metrics:
            values |= {name: np.array([[value]], dtype=np.int64) for name, value in self._times.items()}
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor(name, value) for name, value in values.items() if name in wanted.outputs]
        )
