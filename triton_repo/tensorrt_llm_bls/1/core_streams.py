"""Reading many streams of the core model in one process, which Triton's stub gets wrong in two places (tried on 2.51).

Both were found with a debugger under a storm of short streams; DESIGN.md, "Triton quirks", tells more.

- The stub drops its own reference to a finished stream on a thread without Python's interpreter lock. If that is the
  last reference, Python objects are destroyed unlocked and the process crashes sooner or later. The stub does so within
  milliseconds, so our reference is kept longer.
- A thread that wakes up in a stream's `__next__` waits for the interpreter lock while it holds the stream's lock. If
  the stub's thread brings the next response meanwhile, and the `exec` of a third thread returns before either, the
  three wait for each other for ever. So a response is held back until the one before it was taken.
"""

from __future__ import annotations

import builtins
import threading
import time
from collections import deque
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import triton_python_backend_utils as pb_utils

_KEPT_S = 1.0
# Far longer than a thread waits for the interpreter lock: a response that nobody takes must not stop the others.
_TURN_S = 0.5


class CoreStreams:
    """See the module's docstring. One for each process; methods are callable from any thread."""

    def __init__(self) -> None:
        self._ended: deque[tuple[float, Any]] = deque()
        self._turn = threading.Condition()
        self._is_untaken = False
        self._unpacking = threading.local()
        # Guard: the only Python code that the stub runs between getting a response and touching its stream.
        self._import = builtins.__import__
        builtins.__import__ = self._import_in_turn

    def read(self, request: Any) -> Iterator[Any]:
        """Return the responses to a request, as they come.

        A thread of their own takes them from Triton, so that what the caller does with them holds nobody up.

        Raises:
            TritonModelException: the model cannot be called.
        """
        taken: SimpleQueue[Any] = SimpleQueue()
        threading.Thread(target=self._take, args=(request, taken), daemon=True).start()
        while (response := taken.get()) is not None:
            if isinstance(response, pb_utils.TritonModelException):
                raise response
            yield response

    def release(self) -> None:
        """Let go of streams that ended long enough ago. Only one thread may call it, now and then."""
        oldest = time.monotonic() - _KEPT_S
        while self._ended and self._ended[0][0] < oldest:
            self._ended.popleft()

    def _take(self, request: Any, taken: SimpleQueue[Any]) -> None:
        try:
            stream = request.exec(decoupled=True)
            for number, response in enumerate(stream):
                # The first response came with `exec`, on this thread; those without tensors had no turn to wait for.
                if number and response.output_tensors():
                    self._end_turn()
                taken.put(response)
            self._ended.append((time.monotonic(), stream))
        except pb_utils.TritonModelException as error:
            taken.put(error)
        finally:
            taken.put(None)

    def _end_turn(self) -> None:
        with self._turn:
            self._is_untaken = False
            self._turn.notify()

    def _import_in_turn(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Import; the stub's thread, which imports numpy for every tensor that it unpacks, waits for its turn first.

        That thread is new to Python with every response, so what is thread-local ends with the response.
        """
        is_stub = name == "numpy" and threading.current_thread().name.startswith("Dummy-")
        if is_stub and not hasattr(self._unpacking, "has_turn"):
            self._unpacking.has_turn = True
            with self._turn:
                self._turn.wait_for(lambda: not self._is_untaken, _TURN_S)
                self._is_untaken = True
        return self._import(name, *arguments, **options)
