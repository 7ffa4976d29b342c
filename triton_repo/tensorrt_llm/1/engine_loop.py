"""The one thread that drives OpenVINO GenAI's continuous batching: add, step, read, cancel.

`step()` computes one token for every sequence in flight and keeps Python's interpreter lock meanwhile, so nothing else
in this process runs during a step. Cancelling from another thread can race with the release of KV blocks
(openvinotoolkit/model_server#4428); here every call that changes the pipeline is made between two steps.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import openvino as ov
import openvino_genai as ov_genai


class Generation(Protocol):
    """One sequence to generate, and who receives it. Every method is called on the loop's thread."""

    prompt: Sequence[int]
    config: Any
    abandoned: bool

    def scheduled(self) -> None:
        """The engine took the prompt."""
        ...

    def accept(self, ids: list[int], log_probs: list[float], *, finished: bool) -> None:
        """New tokens; the last ones if `finished`. May set `abandoned` to end early."""
        ...

    def close(self) -> None:
        """The sequence was dropped because it was abandoned."""
        ...

    def fail(self, message: str) -> None:
        """The engine failed this sequence."""
        ...


class QueueFullError(RuntimeError):
    """More sequences wait than the deployment allows."""


class EngineLoop:
    """In-flight batching of generations over one pipeline.

    Args:
        build: makes the pipeline; called again after the engine failed.
        max_batch_size: sequences in flight; more wait.
        max_queue_size: sequences that may wait; 0 is no limit.
    """

    def __init__(self, build: Callable[[], Any], *, max_batch_size: int, max_queue_size: int) -> None:
        self._build = build
        self._pipeline = build()
        self._max_batch_size = max_batch_size
        self._max_queue_size = max_queue_size
        self._arrivals: deque[Generation] = deque()
        self._live: dict[int, tuple[Any, Generation]] = {}
        self._next_id = 0
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)
        self._thread.start()

    def submit(self, generations: Sequence[Generation]) -> None:
        """Queue sequences for the next step. Callable from any thread.

        Raises:
            QueueFullError: they would have to wait behind more than `max_queue_size` others.
        """
        with self._changed:
            total = len(self._live) + len(self._arrivals) + len(generations)
            if self._max_queue_size and total > self._max_batch_size + self._max_queue_size:
                raise QueueFullError(
                    f"the server is full: {self._max_batch_size} sequences in flight (max_batch_size) and "
                    f"{self._max_queue_size} waiting (max_queue_size). Try again later."
                )
            self._arrivals.extend(generations)
            self._changed.notify()

    @property
    def in_flight(self) -> int:
        """Sequences that the engine works on."""
        return len(self._live)

    def stop(self) -> None:
        """Drop everything and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._arrivals or self._live or self._pipeline.has_non_finished_requests() or self._closing):
                    self._changed.wait()
            if self._closing:
                break
            self._admit()
            try:
                self._step()
            except RuntimeError as error:
                self._recover(error)
        for generation in self._arrivals:
            generation.fail("the server is stopping")
        for handle, generation in self._live.values():
            handle.cancel()
            generation.fail("the server is stopping")
        if self._pipeline.has_non_finished_requests():
            self._pipeline.step()

    def _admit(self) -> None:
        """Drop what was abandoned, running or waiting, then fill the free places from the queue."""
        for number, (handle, generation) in list(self._live.items()):
            if generation.abandoned:
                handle.cancel()
                del self._live[number]
                generation.close()
        with self._changed:
            abandoned = [generation for generation in self._arrivals if generation.abandoned]
            waiting = [generation for generation in self._arrivals if not generation.abandoned]
            places = self._max_batch_size - len(self._live)
            self._arrivals = deque(waiting[places:])
        for generation in abandoned:
            generation.close()
        for generation in waiting[:places]:
            self._add(generation)

    def _add(self, generation: Generation) -> None:
        # Guard: the engine breaks when two live requests share an id, so clients' ids are never used.
        self._next_id += 1
        ids = ov.Tensor(np.asarray([generation.prompt], dtype=np.int64))
        try:
            handle = self._pipeline.add_request(self._next_id, ids, generation.config)
        except RuntimeError as error:
            generation.fail(f"the engine refused the request: {_last_line(error)}")
            return
        self._live[self._next_id] = (handle, generation)
        generation.scheduled()

    def _step(self) -> None:
        if self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        for number, (handle, generation) in list(self._live.items()):
            if self._read(handle, generation):
                del self._live[number]

    def _read(self, handle: Any, generation: Generation) -> bool:
        """Pass on what a sequence produced; whether it ended."""
        ids: list[int] = []
        log_probs: list[float] = []
        finished = False
        while handle.can_read():
            for output in handle.read().values():
                ids += output.generated_ids
                log_probs += output.generated_log_probs
                finished |= output.finish_reason != ov_genai.GenerationFinishReason.NONE
        if ids or finished:
            generation.accept(ids, log_probs, finished=finished)
        if not finished and handle.get_status() == ov_genai.GenerationStatus.IGNORED:
            generation.fail("the engine dropped the sequence: it does not fit into the KV cache (kv_cache.size_gib)")
            return True
        return finished

    def _recover(self, error: RuntimeError) -> None:
        """An exception out of step() leaves the pipeline unusable: answer everyone and start a fresh one."""
        for _, generation in self._live.values():
            generation.fail(f"the engine failed: {_last_line(error)}")
        self._live.clear()
        self._pipeline = self._build()


def _last_line(error: RuntimeError) -> str:
    """OpenVINO puts file and line of its source first and the reason last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
