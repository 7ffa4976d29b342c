"""Text to token ids: applies the chat template to messages, tokenizes the prompt, stop words and defaults.

Ids equal those of the Hugging Face tokenizer of the checkpoint. Stop words are encoded without special tokens; the
checkpoint's end-of-sequence ids beyond the first follow them as words of one id, because the core model's contract has
room for one `end_id` only.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from _shared.tensors import InvalidRequestError, Parameters, invalid, refuse, scalar, strings
from _shared.tokenizer_dir import ChatTemplateError, TokenizerDirectory

_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "DECODER_QUERY": (),
    "IMAGE_BYTES": (),
    "IMAGE_URL": (),
    "VIDEO_BYTES": (),
    "EMBEDDING_BIAS_WORDS": (),
    "EMBEDDING_BIAS_WEIGHTS": (),
    "PROMPT_TABLE_EXTRA_ID": (),
}


class TritonPythonModel:
    """See the module's docstring."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the tokenizer."""
        parameters = Parameters(args)
        self._tokenizer = TokenizerDirectory(parameters.path("tokenizer_dir"))
        self._add_special_tokens = parameters.flag("add_special_tokens", default=True)
        self._default_max_tokens = parameters.number("default_max_tokens", 256)
        self._eos_ids = parameters.ids("eos_token_ids")
        pad = self._tokenizer.token_id("pad_token")
        self._pad_id = pad if pad is not None else (self._eos_ids or [0])[0]

    def execute(self, requests: list[Any]) -> list[Any]:
        """One response per request; a bad request fails alone."""
        responses = []
        for request in requests:
            try:
                responses.append(self._preprocess(request))
            except (InvalidRequestError, ChatTemplateError) as error:
                responses.append(invalid(str(error)))
        return responses

    def _preprocess(self, request: Any) -> Any:
        refuse(request, _WITHOUT_EFFECT)
        ids = self._prompt_ids(request)
        if not ids:
            raise InvalidRequestError("text_input: the prompt is empty")
        stop_words = self._encode_words(request, "STOP_WORDS_DICT")
        end_id = scalar(request, "END_ID", (self._eos_ids or [-1])[0])
        stop_words += [[eos] for eos in self._eos_ids if eos != end_id]
        max_tokens = scalar(request, "REQUEST_OUTPUT_LEN", self._default_max_tokens)
        outputs = {
            "INPUT_ID": np.array([ids], dtype=np.int32),
            "REQUEST_INPUT_LEN": np.array([[len(ids)]], dtype=np.int32),
            "DECODER_INPUT_ID": np.array([[self._pad_id]], dtype=np.int32),
            "REQUEST_DECODER_INPUT_LEN": np.array([[1]], dtype=np.int32),
            "BAD_WORDS_IDS": _word_list(self._encode_words(request, "BAD_WORDS_DICT")),
            "STOP_WORDS_IDS": _word_list(stop_words),
            "EMBEDDING_BIAS": np.empty((1, 0), dtype=np.float32),
            "REQUEST_OUTPUT_LEN": np.array([[max_tokens]], dtype=np.int32),
            "OUT_END_ID": np.array([[end_id]], dtype=np.int32),
            "OUT_PAD_ID": np.array([[scalar(request, "PAD_ID", self._pad_id)]], dtype=np.int32),
            "OUT_PROMPT_TABLE_EXTRA_IDS": np.empty((1, 0), dtype=np.uint64),
        }
        wanted = set(request.requested_output_names())
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor(name, value) for name, value in outputs.items() if name in wanted]
        )

    def _encode_words(self, request: Any, name: str) -> list[list[int]]:
        return [self._tokenizer.encode(word, add_special_tokens=False) for word in strings(request, name)]

    def _prompt_ids(self, request: Any) -> list[int]:
        text = scalar(request, "QUERY", "")
        messages = scalar(request, "MESSAGES", "")
        if not messages:
            return self._tokenizer.encode(text, add_special_tokens=self._add_special_tokens)
        if text:
            raise InvalidRequestError("messages: text_input must be empty when messages are sent")
        turns = _parse(messages, "messages", list)
        options = _parse(scalar(request, "CHAT_TEMPLATE_KWARGS", "") or "{}", "chat_template_kwargs", dict)
        if not turns or not all(isinstance(turn, dict) and "role" in turn for turn in turns):
            raise InvalidRequestError("messages: expected a JSON list of objects with role and content")
        # The template writes the special tokens itself; adding them again would give two beginnings.
        return self._tokenizer.encode(self._tokenizer.render(turns, options), add_special_tokens=False)


def _parse(text: str, name: str, kind: type) -> Any:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InvalidRequestError(f"{name}: not JSON ({error})") from error
    if not isinstance(value, kind):
        raise InvalidRequestError(f"{name}: expected a JSON {kind.__name__}, got {type(value).__name__}")
    return value


def _word_list(words: list[list[int]]) -> Any:
    """Words as the contract has them: int32 [1, 2, n], row 0 all ids joined, row 1 where each word ends, then -1."""
    flat = [token for word in words for token in word]
    ends = np.cumsum([len(word) for word in words if word], dtype=np.int32).tolist()
    return np.array([[flat, ends + [-1] * (len(flat) - len(ends))]], dtype=np.int32)
