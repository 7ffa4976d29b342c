"""Core model on GPUs without an engine file: token ids in, token ids out, through TensorRT-LLM's LLM API.

The tensors are those of every core model here (TensorRT-LLM's Triton backend, inflight_batcher_llm, generation
1.0-1.2), so preprocessing, postprocessing, ensemble and BLS stay the same files, and a client or Triton's OpenAI
frontend that knows the engine's names works unchanged. Upstream's own llmapi model has other names and no batch axis.

model.yaml: arguments of LLM() at top level, and `triton_config`, as upstream has it; `model` is relative to this
directory. Stop ids, stop words as text, echo, counts and cancellation mean what they mean in the core model for CPUs.
Time stamps are this process's. One node only: the LLM API starts its ranks itself. Never run on a GPU yet.

A request is one coroutine on the event loop's thread; only that thread touches the LLM API after start-up.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import triton_python_backend_utils as pb_utils
import yaml
from _shared.tensors import InvalidRequestError, Parameters, failure, invalid, refuse, scalar
from _shared.token_text import TextDecoder
from _shared.tokenizer_dir import TokenizerDirectory
from answer import Answer, SequenceAnswer
from core_request import (
    CLIENT_NAMES,
    Limits,
    number_of_sequences,
    output_length,
    prompt_ids,
    stop_id_lists,
    stop_ids_of,
    wanted_of,
)
from llm_sampling import WITHOUT_EFFECT, guide_arguments, sampling_arguments
from visible_ids import VisibleIds

_WARM_UP_TOKENS = 4


class TritonPythonModel:
    """See the module's docstring."""

    def initialize(self, args: dict[str, str]) -> None:
        """Start the LLM and let it produce tokens: Triton's READY then means that it can."""
        parameters = Parameters(args)
        settings = yaml.safe_load((parameters.directory / "model.yaml").read_text(encoding="utf-8"))
        triton = settings.pop("triton_config")
        engine = json.loads((parameters.directory / "engine.json").read_text(encoding="utf-8"))
        self._limits = Limits(
            max_seq_len=engine["limits"]["max_seq_len"],
            vocab_size=engine["limits"]["vocab_size"],
            eos_token_ids=tuple(engine["eos_token_ids"]),
        )
        self._tokenizer = TokenizerDirectory(parameters.path("tokenizer_dir"))
        self._exclude_input = parameters.flag("exclude_input_in_output", default=False)
        queue_size = parameters.number("max_queue_size", 0)
        self._max_open = engine["limits"]["max_batch_size"] + queue_size if queue_size else None
        self._open: dict[Answer, Any] = {}
        self._open_lock = threading.Lock()
        # Guard: importing it opens the GPUs, and what it starts inherits that; nothing else may come first.
        import tensorrt_llm

        self._api = tensorrt_llm
        self._llm = tensorrt_llm.LLM(**settings | {"model": str(parameters.directory / settings["model"])})
        self._loop = asyncio.new_event_loop()
        self._loop_thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._loop_thread.start()
        self._warm_up()
        self._stopping = threading.Event()
        period_s = triton.get("cancellation_check_period_ms", 100) / 1000
        self._watch = threading.Thread(target=self._watch_clients, args=(period_s,), daemon=True)
        self._watch.start()

    def execute(self, requests: list[Any]) -> None:
        """Start a coroutine for each request and return at once."""
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
            except _QueueFullError as error:
                sender.send(failure(str(error), unavailable=True), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def finalize(self) -> None:
        """Stop the threads and the LLM."""
        self._stopping.set()
        self._watch.join()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._loop_thread.join()
        self._llm.shutdown()

    def _start(self, request: Any, sender: Any) -> None:
        refuse(request, WITHOUT_EFFECT, CLIENT_NAMES)
        prompt = prompt_ids(request, self._limits)
        length = output_length(request, len(prompt), self._limits)
        words = stop_id_lists(request)
        stop_ids = stop_ids_of(request, words, self._limits)
        wanted = wanted_of(request, interval=lambda: 1, exclude_input=self._exclude_input)
        sequences = number_of_sequences(request)
        arguments = sampling_arguments(
            request, max_tokens=length, stop_ids=stop_ids, log_probs=wanted.log_probs, sequences=sequences
        )
        guide = guide_arguments(request)
        if guide:
            arguments["guided_decoding"] = self._api.llmapi.GuidedDecodingParams(**guide)
        answer = Answer(request.request_id(), sender, wanted)
        texts = [TextDecoder(self._tokenizer.bytes_of, at_start=True).feed(word) for word in words]
        for index in range(sequences):
            visible = VisibleIds(self._tokenizer, texts)
            answer.sequences.append(
                SequenceAnswer(answer, index, prompt=prompt, config=None, visible=visible, stop_ids=stop_ids)
            )
        with self._open_lock:
            if self._max_open is not None and len(self._open) >= self._max_open:
                raise _QueueFullError(f"{len(self._open)} requests run or wait (max_queue_size). Try again later.")
            self._open[answer] = None
        future = asyncio.run_coroutine_threadsafe(self._answer(answer, prompt, arguments), self._loop)
        future.add_done_callback(lambda done: self._settle(answer, done))

    async def _answer(self, answer: Answer, prompt: Sequence[int], arguments: dict[str, Any]) -> None:
        for sequence in answer.sequences:
            sequence.scheduled()
        stream = self._llm.generate_async(list(prompt), self._api.SamplingParams(**arguments), streaming=True)
        with self._open_lock:
            self._open[answer] = stream
        taken = [0] * len(answer.sequences)
        aborted = False
        async for output in stream:
            for index, (sequence, part) in enumerate(zip(answer.sequences, output.outputs, strict=True)):
                if sequence.ended:
                    continue
                ids = list(part.token_ids[taken[index] :])
                log_probs = _log_probs(part, taken[index], ids) if answer.wanted.log_probs else [0.0] * len(ids)
                taken[index] += len(ids)
                finished = part.finish_reason is not None
                if ids or finished:
                    sequence.accept(ids, log_probs, finished=finished)
            # A stop word in the text, or a client that went away. The stream then ends by itself.
            if not aborted and all(sequence.abandoned for sequence in answer.sequences):
                aborted = True
                stream.abort()
        for sequence in answer.sequences:
            if not sequence.ended:
                sequence.close()

    def _settle(self, answer: Answer, done: Future[None]) -> None:
        """Forget an answer, and tell the client when its coroutine failed."""
        with self._open_lock:
            self._open.pop(answer, None)
        error = None if done.cancelled() else done.exception()
        if error is not None:
            answer.fail(f"the engine failed: {error}")

    def _cancel(self, request_id: str) -> None:
        if not request_id:
            raise InvalidRequestError("stop: needs the request id of the request to cancel")
        for answer in self._open_answers():
            if answer.request_id == request_id:
                answer.cancel()
        self._abort_abandoned()

    def _open_answers(self) -> list[Answer]:
        with self._open_lock:
            return list(self._open)

    def _watch_clients(self, period_s: float) -> None:
        """Cancel what nobody waits for any more."""
        while not self._stopping.wait(period_s):
            for answer in self._open_answers():
                answer.cancel_if_abandoned()
            self._abort_abandoned()

    def _abort_abandoned(self) -> None:
        """Tell the LLM, which then ends the stream, even while it waits for its turn."""
        with self._open_lock:
            streams = [
                stream
                for answer, stream in self._open.items()
                if stream is not None and all(sequence.abandoned for sequence in answer.sequences)
            ]
        for stream in streams:
            self._loop.call_soon_threadsafe(stream.abort)

    def _warm_up(self) -> None:
        produced = asyncio.run_coroutine_threadsafe(self._generate_some(), self._loop).result()
        if not produced:
            raise pb_utils.TritonModelException("warm-up produced no token")

    async def _generate_some(self) -> int:
        tokens = max(1, min(_WARM_UP_TOKENS, self._limits.max_seq_len - 1))
        arguments = {"max_tokens": tokens, "end_id": -1, "top_k": 1, "detokenize": False}
        count = 0
        async for output in self._llm.generate_async([0], self._api.SamplingParams(**arguments), streaming=True):
            count = len(output.outputs[0].token_ids)
        return count


class _QueueFullError(RuntimeError):
    """More requests than `max_queue_size` lets wait."""


def _log_probs(part: Any, start: int, ids: list[int]) -> list[float]:
    """Log probability of each new id: the LLM API gives a table {id: Logprob} for each position, or the number."""
    entries = part.logprobs[start : start + len(ids)]
    return [
        float(entry[token].logprob) if isinstance(entry, dict) else float(entry)
        for token, entry in zip(ids, entries, strict=True)
    ]
