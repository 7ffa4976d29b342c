"""One request: preprocessing, the core model's stream, text, responses."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from _shared.tensors import refuse, scalar, strings
from _shared.token_text import TextDecoder
from _shared.tokenizer_dir import TokenizerDirectory
from core_streams import CoreStreams
from stream_text import StreamText

_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "image_input": (),
    "image_bytes_input": (),
    "image_url_input": (),
    "image_sizes_input": (),
    "video_bytes_input": (),
    "num_draft_tokens": (0,),
    "use_draft_logits": (False,),
    "beam_width": (1,),
}
_TO_PREPROCESSING = {
    "text_input": "QUERY",
    "decoder_text_input": "DECODER_QUERY",
    "messages": "MESSAGES",
    "chat_template_kwargs": "CHAT_TEMPLATE_KWARGS",
    "max_tokens": "REQUEST_OUTPUT_LEN",
    "bad_words": "BAD_WORDS_DICT",
    "embedding_bias_words": "EMBEDDING_BIAS_WORDS",
    "embedding_bias_weights": "EMBEDDING_BIAS_WEIGHTS",
    "end_id": "END_ID",
    "pad_id": "PAD_ID",
    "prompt_table_extra_id": "PROMPT_TABLE_EXTRA_ID",
}
_FROM_PREPROCESSING = {
    "INPUT_ID": "input_ids",
    "REQUEST_INPUT_LEN": "input_lengths",
    "REQUEST_OUTPUT_LEN": "request_output_len",
    "STOP_WORDS_IDS": "stop_words_list",
    "BAD_WORDS_IDS": "bad_words_list",
    "EMBEDDING_BIAS": "embedding_bias",
    "OUT_END_ID": "end_id",
    "OUT_PAD_ID": "pad_id",
}
_TO_CORE = {
    "num_return_sequences": "num_return_sequences",
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "temperature": "temperature",
    "length_penalty": "len_penalty",
    "repetition_penalty": "repetition_penalty",
    "min_tokens": "min_tokens",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "seed": "seed",
    "return_log_probs": "return_log_probs",
    "return_context_logits": "return_context_logits",
    "return_generation_logits": "return_generation_logits",
    "return_perf_metrics": "return_perf_metrics",
    "return_num_input_tokens": "return_num_input_tokens",
    "return_num_output_tokens": "return_num_output_tokens",
    "prompt_embedding_table": "prompt_embedding_table",
    "prompt_vocab_size": "prompt_vocab_size",
    "lora_task_id": "lora_task_id",
    "lora_weights": "lora_weights",
    "lora_config": "lora_config",
    "guided_decoding_guide_type": "guided_decoding_guide_type",
    "guided_decoding_guide": "guided_decoding_guide",
}
_OURS = frozenset({"text_output", "finish_reason"})
_ALWAYS_FROM_CORE = frozenset({"output_ids", "sequence_length", "sequence_index"})
_REQUIRED_BY_CORE = ("input_ids", "input_lengths", "request_output_len")


class CallFailedError(RuntimeError):
    """A model that this one calls answered with an error, which the client gets as it is."""

    def __init__(self, cause: Any) -> None:
        super().__init__(cause.message())
        self.cause = cause


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """What every request shares.

    `eos_ids` are the checkpoint's own stop ids; `exclude_input` is the answer when a request does not say.
    """

    core_model: str
    tokenizer: TokenizerDirectory
    eos_ids: frozenset[int]
    exclude_input: bool
    core_streams: CoreStreams


@dataclass
class _Sequence:
    """One of `num_return_sequences`: its text, and what waits for the next response."""

    text: StreamText
    unsent: str = ""
    outputs: dict[str, Any] = field(default_factory=dict)

    def add(self, outputs: dict[str, Any]) -> None:
        """Join the core's outputs of several responses: counts add up, log probabilities line up."""
        for name, value in outputs.items():
            earlier = self.outputs.get(name)
            if earlier is not None and name == "num_output_tokens":
                self.outputs[name] = earlier + value
            elif earlier is not None and name == "output_log_probs":
                self.outputs[name] = np.concatenate([earlier, value], axis=-1)
            else:
                self.outputs[name] = value


class Conversation:
    """Runs one request on the calling thread.

    Args:
        deployment: what every request shares.
        request: the Triton request.
        sender: its response sender.
        request_id: unique among live requests; the core model knows the request by it.
    """

    def __init__(self, deployment: Deployment, request: Any, sender: Any, request_id: str) -> None:
        self._deployment = deployment
        self._request = request
        self._sender = sender
        self._request_id = request_id
        self._wanted = frozenset(request.requested_output_names())
        self._client_gone = threading.Event()
        self._core_inputs: list[Any] = []
        self._sequences: list[_Sequence] = []
        self._answered = False
        # Guard: Triton 2.51 crashes when it is asked about cancellation while the final flag closes the answer.
        self._closing = threading.Lock()

    def run(self) -> None:
        """Answer the request.

        Raises:
            InvalidRequestError: an input that cannot be honoured.
            CallFailedError: preprocessing or the core model answered with an error.
        """
        refuse(self._request, _WITHOUT_EFFECT)
        streaming = scalar(self._request, "stream", default=False)
        stop_words = strings(self._request, "stop_words")
        prepared = self._preprocess()
        self._open_sequences(prepared, stop_words)
        inputs = [
            *(_tensor(target, prepared[source]) for source, target in _FROM_PREPROCESSING.items()),
            *self._renamed(_TO_CORE),
            # The prompt is echoed here, as text; a stop word ends an answer early only if its tokens can be seen.
            _tensor("exclude_input_in_output", np.array([[True]])),
            _tensor("streaming", np.array([[streaming or bool(stop_words)]])),
        ]
        self._core_inputs = [tensor for tensor in inputs if tensor is not None]
        for response in self._core(self._core_inputs):
            if response.has_error():
                raise CallFailedError(response.error())
            if self._client_gone.is_set():
                self._stop_core()
            elif not self._answered:
                self._receive(response, streaming=streaming)
        if self._client_gone.is_set():
            self._close(None)
        elif not self._answered:
            self._finish()

    def fail(self, response: Any) -> None:
        """End with an error response."""
        if not self._answered:
            self._close(response)

    def cancel_if_abandoned(self) -> None:
        """Stop the engine if the client has gone. Callable from any thread."""
        with self._closing:
            gone = not (self._answered or self._client_gone.is_set()) and self._sender.is_cancelled()
        if gone:
            self._client_gone.set()
            self._stop_core()

    def _preprocess(self) -> dict[str, Any]:
        response = pb_utils.InferenceRequest(
            model_name="preprocessing",
            inputs=self._renamed(_TO_PREPROCESSING),
            requested_output_names=list(_FROM_PREPROCESSING),
        ).exec()
        if response.has_error():
            raise CallFailedError(response.error())
        return {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}

    def _open_sequences(self, prepared: dict[str, Any], stop_words: list[str]) -> None:
        bytes_of = self._deployment.tokenizer.bytes_of
        stop_ids = {*self._deployment.eos_ids, int(prepared["OUT_END_ID"].reshape(-1)[0])}
        max_tokens = int(prepared["REQUEST_OUTPUT_LEN"].reshape(-1)[0])
        echo = ""
        if not scalar(self._request, "exclude_input_in_output", self._deployment.exclude_input):
            echo = TextDecoder(bytes_of, at_start=True).feed(prepared["INPUT_ID"].reshape(-1).tolist())
        self._sequences = [
            _Sequence(StreamText(bytes_of, stop_words, stop_ids, max_tokens), unsent=echo)
            for _ in range(max(scalar(self._request, "num_return_sequences", 1), 1))
        ]

    def _renamed(self, names: Mapping[str, str]) -> list[Any]:
        """The client's tensors under the names of the model that gets them."""
        sent = ((target, pb_utils.get_input_tensor_by_name(self._request, name)) for name, target in names.items())
        tensors = (_tensor(target, tensor.as_numpy()) for target, tensor in sent if tensor is not None)
        return [tensor for tensor in tensors if tensor is not None]

    def _core(self, inputs: list[Any]) -> Iterator[Any]:
        request = pb_utils.InferenceRequest(
            model_name=self._deployment.core_model,
            request_id=self._request_id,
            inputs=inputs,
            requested_output_names=sorted((self._wanted - _OURS) | _ALWAYS_FROM_CORE),
        )
        responses = self._deployment.core_streams.read(request)
        return (response for response in responses if response.has_error() or response.output_tensors())

    def _stop_core(self) -> None:
        if self._core_inputs:
            required = [tensor for tensor in self._core_inputs if tensor.name() in _REQUIRED_BY_CORE]
            for _ in self._core([*required, _tensor("stop", np.array([[True]]))]):
                pass

    def _receive(self, response: Any, *, streaming: bool) -> None:
        outputs = {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
        length = int(outputs["sequence_length"].reshape(-1)[0])
        sequence = self._sequences[int(outputs["sequence_index"].reshape(-1)[0])]
        sequence.unsent += sequence.text.feed(outputs["output_ids"].reshape(-1)[:length].tolist())
        sequence.add({name: value for name, value in outputs.items() if name in self._wanted})
        if all(each.text.stopped for each in self._sequences):
            self._finish()
            self._stop_core()
        elif streaming and sequence.unsent:
            self._sender.send(self._response(sequence, finish_reason=None))

    def _finish(self) -> None:
        """The last response of each sequence: what was held back, the reason of its end, and the final flag."""
        for sequence in self._sequences:
            sequence.unsent += sequence.text.finish()
            response = self._response(sequence, finish_reason=sequence.text.finish_reason)
            if sequence is self._sequences[-1]:
                self._close(response)
            else:
                self._sender.send(response)

    def _close(self, response: Any) -> None:
        with self._closing:
            self._answered = True
            self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _response(self, sequence: _Sequence, *, finish_reason: str | None) -> Any:
        tensors = [pb_utils.Tensor(name, value) for name, value in sequence.outputs.items()]
        if "text_output" in self._wanted:
            tensors.append(_tensor("text_output", _string(sequence.unsent)))
        if finish_reason is not None and "finish_reason" in self._wanted:
            tensors.append(_tensor("finish_reason", _string(finish_reason)))
        sequence.unsent, sequence.outputs = "", {}
        return pb_utils.InferenceResponse(tensors)


def _tensor(name: str, values: Any) -> Any:
    """A tensor, or None for an empty one: optional inputs are left out rather than sent empty."""
    return pb_utils.Tensor(name, values) if values.size else None


def _string(text: str) -> Any:
    return np.array([[text.encode("utf-8")]], dtype=np.object_)
