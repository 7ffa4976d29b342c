"""Core model on a CPU: token ids in, token ids out, through OpenVINO GenAI's continuous batching.

Tensor names, types and meaning are those of TensorRT-LLM's Triton backend (inflight_batcher_llm, generation 1.0-1.2),
so preprocessing, postprocessing, ensemble and BLS are the same on a GPU. Inputs that this engine cannot honour are
refused by name (`core_request.WITHOUT_EFFECT`). Definitions:

- `output_log_probs`: natural logarithm of the softmax of the raw logits at the chosen token, before temperature,
  top_k and top_p; one per generated id of the response. `cum_log_probs`: their sum since the start.
- Stop ids: `end_id` and every end-of-sequence id of the checkpoint end a sequence and are not in `output_ids`. Words
  in `stop_words_list` are compared as text, so that another way to cut the same text into tokens stops as well.
- `num_output_tokens` counts the ids of its own response; a client adds them up.
- Times are nanoseconds of the host's monotonic clock. `first_scheduled_time_ns`: the prompt was handed to the engine.
- `stop=true` with a request id drops every sequence with that id; so does a client that goes away.

Waiting and being refused is decided here, because Triton's own queue holds nothing back on a decoupled model.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any

import openvino_genai as ov_genai
import triton_python_backend_utils as pb_utils
from _shared.tensors import InvalidRequestError, Parameters, failure, invalid, refuse, scalar
from _shared.token_text import TextDecoder
from _shared.tokenizer_dir import TokenizerDirectory
from answer import Answer, SequenceAnswer
from core_request import (
    CLIENT_NAMES,
    WITHOUT_EFFECT,
    Limits,
    number_of_sequences,
    output_length,
    prompt_ids,
    stop_id_lists,
    stop_ids_of,
    wanted_of,
)
from engine_loop import EngineLoop, QueueFullError
from sampling import generation_config
from visible_ids import VisibleIds

_CANCELLATION_CHECK_PERIOD_MS = 100
_WARM_UP_TOKENS = 4
_MAX_IDS_PER_RESPONSE = 4
_STREAMS_PER_ID = 4


class TritonPythonModel:
    """See the module's docstring."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the engine and let it produce tokens: Triton's READY then means that it can."""
        parameters = Parameters(args)
        engine_dir = parameters.path("gpt_model_path")
        engine = json.loads((engine_dir / "engine.json").read_text(encoding="utf-8"))
        limits = engine["limits"]
        self._limits = Limits(
            max_seq_len=limits["max_seq_len"],
            vocab_size=limits["vocab_size"],
            eos_token_ids=tuple(engine["eos_token_ids"]),
        )
        has_tokenizer = bool(parameters.text("tokenizer_dir"))
        self._tokenizer = TokenizerDirectory(parameters.path("tokenizer_dir")) if has_tokenizer else None
        self._exclude_input = parameters.flag("exclude_input_in_output", default=False)
        scheduler = ov_genai.SchedulerConfig()
        for name, value in engine["scheduler"].items():
            setattr(scheduler, name, value)
        properties = dict(engine["plugin_config"])
        self._loop = EngineLoop(
            lambda: ov_genai.ContinuousBatchingPipeline(str(engine_dir), scheduler, "CPU", properties),
            max_batch_size=limits["max_batch_size"],
            max_queue_size=parameters.number("max_queue_size", 0),
        )
        self._stream_interval = parameters.number("stream_interval", 0)
        self._warm_up()
        self._answers: set[Answer] = set()
        self._answers_lock = threading.Lock()
        self._stopping = threading.Event()
        period_ms = parameters.number("cancellation_check_period_ms", _CANCELLATION_CHECK_PERIOD_MS)
        self._watch = threading.Thread(target=self._watch_clients, args=(period_ms / 1000,), daemon=True)
        self._watch.start()

    def execute(self, requests: list[Any]) -> None:
        """Hand requests to the engine loop and return at once; answers follow as they are made."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                if scalar(request, "stop", default=False):
                    self._cancel(request.request_id())
                    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                else:
                    self._start(request, sender)
            except InvalidRequestError as error:
                sender.send(invalid(str(error)), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            except QueueFullError as error:
                sender.send(failure(str(error), unavailable=True), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def finalize(self) -> None:
        """Drop what is in flight and free the engine."""
        self._stopping.set()
        self._watch.join()
        self._loop.stop()

    def _start(self, request: Any, sender: Any) -> None:
        refuse(request, WITHOUT_EFFECT, CLIENT_NAMES)
        prompt = prompt_ids(request, self._limits)
        length = output_length(request, len(prompt), self._limits)
        words = stop_id_lists(request)
        stop_ids = stop_ids_of(request, words, self._limits)
        wanted = wanted_of(request, interval=self._ids_per_response, exclude_input=self._exclude_input)
        answer = Answer(request.request_id(), sender, wanted)
        for index in range(number_of_sequences(request)):
            config = generation_config(
                request, max_new_tokens=length, stop_ids=stop_ids, log_probs=wanted.log_probs, sequence_index=index
            )
            visible = VisibleIds(self._tokenizer, self._texts(words))
            answer.sequences.append(
                SequenceAnswer(answer, index, prompt=prompt, config=config, visible=visible, stop_ids=stop_ids)
            )
        self._loop.submit(answer.sequences)
        with self._answers_lock:
            self._answers.add(answer)

    def _ids_per_response(self) -> int:
        """Ids in a streamed response: parameter `stream_interval`, or by load when it is 0.

        Carrying one response from here to a client costs about a millisecond of CPU, which many streams would take
        from the engine: the more sequences run, the more ids (up to 4) share a response.
        """
        return self._stream_interval or min(_MAX_IDS_PER_RESPONSE, 1 + self._loop.in_flight // _STREAMS_PER_ID)

    def _texts(self, words: list[list[int]]) -> list[str]:
        if self._tokenizer is None:
            if any(len(word) > 1 for word in words):
                raise InvalidRequestError("stop_words_list: words of several ids need the parameter tokenizer_dir")
            return []
        return [TextDecoder(self._tokenizer.bytes_of, at_start=True).feed(word) for word in words]

    def _cancel(self, request_id: str) -> None:
        if not request_id:
            raise InvalidRequestError("stop: needs the request id of the request to cancel")
        for answer in self._open_answers():
            if answer.request_id == request_id:
                answer.cancel()

    def _open_answers(self) -> list[Answer]:
        with self._answers_lock:
            self._answers = {answer for answer in self._answers if answer.is_open}
            return list(self._answers)

    def _watch_clients(self, period_s: float) -> None:
        """Cancel what nobody waits for any more."""
        while not self._stopping.wait(period_s):
            for answer in self._open_answers():
                answer.cancel_if_abandoned()

    def _warm_up(self) -> None:
        warm_up = _WarmUp(min(_WARM_UP_TOKENS, self._limits.max_seq_len - 1))
        self._loop.submit([warm_up])
        warm_up.done.wait()
        if warm_up.error or not warm_up.produced:
            raise pb_utils.TritonModelException(f"warm-up produced no token: {warm_up.error or 'empty answer'}")


class _WarmUp:
    """A generation that only counts."""

    def __init__(self, tokens: int) -> None:
        self.prompt: Sequence[int] = [0]
        self.config = ov_genai.GenerationConfig()
        self.config.max_new_tokens = tokens
        self.config.ignore_eos = True
        self.abandoned = False
        self.produced = 0
        self.error = ""
        self.done = threading.Event()

    def scheduled(self) -> None:
        """Nothing to note."""

    def accept(self, ids: list[int], log_probs: list[float], *, finished: bool) -> None:
        """Count tokens."""
        del log_probs
        self.produced += len(ids)
        if finished:
            self.done.set()

    def close(self) -> None:
        """End of a warm-up that was dropped."""
        self.done.set()

    def fail(self, message: str) -> None:
        """Remember why."""
        self.error = message
        self.done.set()
