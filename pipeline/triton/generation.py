"""What is asked of a model and what comes back: requests, chunks and the summary of a finished generation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000

Message = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One generation. Give `prompt` or `messages` (role and content); None leaves a choice to the server.

    Args:
        prompt: text that is continued as it stands.
        messages: a conversation; the server applies the model's chat template.
        max_tokens: output tokens at most.
        min_tokens: output tokens before an end-of-sequence token may end the answer.
        temperature: 0 is greedy where the server allows it.
        top_k: sample from the k likeliest tokens; 1 is greedy.
        top_p: sample from the smallest set with this probability mass.
        seed: of the sampling.
        stop: texts that end the answer; they are not part of it.
        stream: a chunk for each token rather than one for the answer.
        return_log_probs: ask for the log probability of each output token.
        exclude_input_in_output: answer without the prompt.
        timeout_s: deadline of the whole generation; the server is told to stop when it passes.
    """

    prompt: str | None = None
    messages: tuple[Message, ...] = ()
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = True
    return_log_probs: bool = False
    exclude_input_in_output: bool = True
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        """Refuse a request with both a prompt and messages, or neither."""
        if (self.prompt is None) == (not self.messages):
            raise ValueError("a generation request has either a prompt or messages")

    @property
    def messages_json(self) -> str:
        """The conversation as the JSON text that travels to the server."""
        return json.dumps([dict(message) for message in self.messages], ensure_ascii=False)


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One response of a generation.

    `tokens` is the number of output tokens in this chunk, None when the server does not tell. Every
    generation has exactly one chunk with `final`, its last, which may be empty. `received_ns` is
    time.monotonic_ns() when the chunk was handed over.
    """

    text: str
    received_ns: int
    final: bool = False
    tokens: int | None = None
    input_tokens: int | None = None
    finish_reason: str | None = None
    log_probs: tuple[float, ...] = ()

    @property
    def has_content(self) -> bool:
        """True when the chunk carries text or tokens, rather than only the final flag."""
        return bool(self.text) or bool(self.tokens)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The figures of one generation; None is always "not known", never 0.

    ttft_ms: send start to the first chunk with content.
    mean_itl_ms: mean gap between successive tokens, (last - first) / (output tokens - tokens of the first chunk).
    e2e_ms: send start to the last chunk with content.
    output_tokens_per_s: output tokens / E2E, prefill included.
    """

    input_tokens: int | None
    output_tokens: int | None
    ttft_ms: float | None
    mean_itl_ms: float | None
    e2e_ms: float | None
    output_tokens_per_s: float | None
    finish_reason: str | None
    complete: bool


def summarize(sent_ns: int, chunks: Sequence[Chunk]) -> Summary:
    """Compute the figures of one generation from when it was sent and what came; pure.

    Args:
        sent_ns: time.monotonic_ns() when sending started.
        chunks: in order; without a final one the generation was cut short, and so says `complete`.
    """
    content = [chunk for chunk in chunks if chunk.has_content]
    first, last = (content[0], content[-1]) if content else (None, None)
    counts = [chunk.tokens for chunk in content if chunk.tokens is not None]
    output_tokens = sum(counts) if counts else None
    e2e_ns = last.received_ns - sent_ns if last else None
    return Summary(
        input_tokens=next((chunk.input_tokens for chunk in chunks if chunk.input_tokens is not None), None),
        output_tokens=output_tokens,
        ttft_ms=(first.received_ns - sent_ns) / NS_PER_MS if first else None,
        mean_itl_ms=_mean_itl_ms(first, last, output_tokens) if first and last else None,
        e2e_ms=None if e2e_ns is None else e2e_ns / NS_PER_MS,
        output_tokens_per_s=output_tokens * NS_PER_S / e2e_ns if output_tokens and e2e_ns else None,
        finish_reason=next((chunk.finish_reason for chunk in reversed(chunks) if chunk.finish_reason), None),
        complete=bool(chunks) and chunks[-1].final,
    )


def _mean_itl_ms(first: Chunk, last: Chunk, output_tokens: int | None) -> float | None:
    if output_tokens is None:
        return None
    gaps = output_tokens - (first.tokens or 0)
    return (last.received_ns - first.received_ns) / NS_PER_MS / gaps if gaps > 0 else None
