"""A stand-in for TensorRT-LLM's LLM API in tests: the documented names, tokens that follow from the prompt.

Token i of an answer is (last prompt id + i) % 200 + 3, one every few milliseconds; `end_id` and `stop_token_ids` end
it. SamplingParams takes exactly the arguments of tensorrt_llm/sampling_params.py@000a01d that a server needs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from tensorrt_llm import llmapi as llmapi

_PERIOD_S = 0.002


@dataclass(kw_only=True)
class SamplingParams:
    """Strict like the real one: an unknown argument is a TypeError."""

    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    stop_token_ids: list[int] | None = None
    n: int = 1
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logprobs: int | None = None
    guided_decoding: Any = None
    detokenize: bool = True


@dataclass
class Logprob:
    """One entry of a table of log probabilities."""

    logprob: float


@dataclass
class CompletionOutput:
    """One sequence so far."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass
class RequestOutput:
    """An answer so far; iterating it waits for more."""

    prompt: list[int]
    params: SamplingParams
    outputs: list[CompletionOutput]
    aborted: bool = False

    def abort(self) -> None:
        """End it before its time."""
        self.aborted = True

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        """Yield itself after every token."""
        stop_ids = {self.params.end_id, *(self.params.stop_token_ids or ())}
        step = 0
        while not all(output.finish_reason for output in self.outputs):
            await asyncio.sleep(_PERIOD_S)
            for output in self.outputs:
                token = (self.prompt[-1] + step + output.index) % 200 + 3
                output.token_ids.append(token)
                output.logprobs.append({token: Logprob(-0.5)})
                if self.aborted:
                    output.finish_reason = "cancelled"
                elif token in stop_ids:
                    output.finish_reason = "stop"
                elif len(output.token_ids) >= self.params.max_tokens:
                    output.finish_reason = "length"
            step += 1
            yield self


class LLM:
    """Takes any argument, as the real one takes those of model.yaml."""

    def __init__(self, *, model: str, **arguments: Any) -> None:
        self.model = model
        self.arguments = arguments

    def generate_async(self, inputs: list[int], sampling_params: SamplingParams, streaming: bool) -> RequestOutput:
        """Start an answer; a prompt that begins with id 499 fails like a broken engine."""
        assert streaming
        if inputs[0] == 499:
            raise RuntimeError("CUDA error: out of memory")
        outputs = [CompletionOutput(index) for index in range(sampling_params.n)]
        return RequestOutput(inputs, sampling_params, outputs)

    def shutdown(self) -> None:
        """Nothing runs."""
