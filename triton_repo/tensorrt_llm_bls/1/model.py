"""The recommended entry: text in, text out, each request scripted by one thread from prompt to last character.

Unlike the ensemble it sees a stream from beginning to end: characters that span responses, stop words on text across
any border, the reason why a sequence ended, and a client that goes away (tried on Triton 2.51: an ensemble does not
tell its models that the client has gone, so they generate to the end). A stop word on text cancels the engine through
the public contract, a request with `stop` and the same id.

Order per request: every response is sent by the request's own thread. The last one carries the final flag, what was
held back of the text (usually nothing) and `finish_reason`. `num_output_tokens` counts the ids of its own response.
"""

from __future__ import annotations

import threading
import uuid
from typing import Any

import triton_python_backend_utils as pb_utils
from _shared.tensors import InvalidRequestError, Parameters, failure, invalid
from _shared.tokenizer_dir import TokenizerDirectory
from conversation import CallFailedError, Conversation, Deployment
from core_streams import CoreStreams

_CANCELLATION_CHECK_PERIOD_MS = 100


class TritonPythonModel:
    """See the module's docstring."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the tokenizer and start watching for clients that go away."""
        parameters = Parameters(args)
        self._deployment = Deployment(
            core_model=parameters.text("tensorrt_llm_model_name", "tensorrt_llm"),
            tokenizer=TokenizerDirectory(
                parameters.path("tokenizer_dir"),
                skip_special_tokens=parameters.flag("skip_special_tokens", default=True),
            ),
            eos_ids=frozenset(parameters.ids("eos_token_ids")),
            exclude_input=parameters.flag("exclude_input_in_output", default=False),
            core_streams=CoreStreams(),
        )
        self._open: dict[str, Conversation] = {}
        self._open_lock = threading.Lock()
        self._stopping = threading.Event()
        period_ms = parameters.number("cancellation_check_period_ms", _CANCELLATION_CHECK_PERIOD_MS)
        self._watch = threading.Thread(target=self._watch_clients, args=(period_ms / 1000,), daemon=True)
        self._watch.start()

    def execute(self, requests: list[Any]) -> None:
        """Start a thread for each request and return at once."""
        for request in requests:
            threading.Thread(target=self._serve, args=(request, request.get_response_sender()), daemon=True).start()

    def finalize(self) -> None:
        """Stop watching; Triton has drained the requests."""
        self._stopping.set()
        self._watch.join()

    def _serve(self, request: Any, sender: Any) -> None:
        # The engine is cancelled by id, so two live requests must never share one.
        with self._open_lock:
            request_id = request.request_id()
            if not request_id or request_id in self._open:
                request_id = uuid.uuid4().hex
            conversation = self._open[request_id] = Conversation(self._deployment, request, sender, request_id)
        try:
            conversation.run()
        except InvalidRequestError as error:
            conversation.fail(invalid(str(error)))
        except CallFailedError as error:
            conversation.fail(pb_utils.InferenceResponse(error=error.cause))
        except pb_utils.TritonModelException as error:
            conversation.fail(failure(str(error)))
        finally:
            with self._open_lock:
                del self._open[request_id]

    def _watch_clients(self, period_s: float) -> None:
        """Cancel what nobody waits for any more, and let go of what has ended."""
        while not self._stopping.wait(period_s):
            self._deployment.core_streams.release()
            with self._open_lock:
                conversations = list(self._open.values())
            for conversation in conversations:
                conversation.cancel_if_abandoned()
