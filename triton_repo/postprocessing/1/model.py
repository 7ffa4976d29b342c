"""Token ids of one response to text.

Tried on Triton 2.51: an ensemble calls this model once for every response of a decoupled core model; a tensor from
preprocessing cannot come along (Triton refuses to load such an ensemble: "receives inputs originated from different
decoupled models"), and nothing tells the last response from the others. The request id does arrive. Hence:

- The core model on a CPU sends whole characters only (`visible_ids`), so each response is decoded alone: parameter
  `whole_responses`.
- A core model that sends single ids (TensorRT-LLM's) may cut a character in two. Its first bytes are then kept for the
  next response of the same request id; a client that sends no id, or an id that two live requests share, gets U+FFFD
  there. An unfinished character at the very end is dropped, because the end is not seen here.
- A response that begins with the beginning-of-text token echoes the prompt and is decoded as the beginning of a text.

`tensorrt_llm_bls` has none of these limits and is the recommended entry.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from _shared.tensors import Parameters
from _shared.token_text import TextDecoder
from _shared.tokenizer_dir import TokenizerDirectory

_MAX_OPEN_STREAMS = 4096


class TritonPythonModel:
    """See the module's docstring."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the tokenizer."""
        parameters = Parameters(args)
        self._tokenizer = TokenizerDirectory(
            parameters.path("tokenizer_dir"), skip_special_tokens=parameters.flag("skip_special_tokens", default=True)
        )
        self._whole_responses = parameters.flag("whole_responses", default=False)
        self._bos_id = self._tokenizer.token_id("bos_token")
        self._open: OrderedDict[tuple[str, int], TextDecoder] = OrderedDict()

    def execute(self, requests: list[Any]) -> list[Any]:
        """One response per request: OUTPUT holds one text per beam."""
        responses = []
        for request in requests:
            tokens = pb_utils.get_input_tensor_by_name(request, "TOKENS_BATCH").as_numpy()
            lengths = pb_utils.get_input_tensor_by_name(request, "SEQUENCE_LENGTH").as_numpy()
            beams = tokens.reshape(-1, tokens.shape[-1])
            texts = [
                self._text(request.request_id(), beam, ids[:length].tolist())
                for beam, (ids, length) in enumerate(zip(beams, lengths.reshape(-1), strict=True))
            ]
            output = np.array(texts, dtype=np.object_).reshape(lengths.shape)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", output)]))
        return responses

    def _text(self, request_id: str, beam: int, ids: list[int]) -> bytes:
        at_start = self._bos_id is not None and ids[:1] == [self._bos_id]
        has_state = bool(request_id) and not self._whole_responses
        decoder = self._open.pop((request_id, beam), None) if has_state and not at_start else None
        decoder = decoder or TextDecoder(self._tokenizer.bytes_of, at_start=at_start)
        text = decoder.feed(ids)
        if not has_state:
            text += decoder.finish()
        elif not decoder.is_whole:
            self._open[request_id, beam] = decoder
            if len(self._open) > _MAX_OPEN_STREAMS:
                self._open.popitem(last=False)
        return text.encode("utf-8")
