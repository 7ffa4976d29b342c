"""The figures of a generation, recovered exactly from known times."""

from __future__ import annotations

import pytest

from pipeline.triton.generation import Chunk, GenerationRequest, summarize

pytestmark = pytest.mark.fast

MS = 1_000_000


def test_times_and_rates_follow_their_definitions() -> None:
    """TTFT, ITL, E2E and rate of three tokens at 30, 50 and 70 ms."""
    chunks = [Chunk(text="x", received_ns=at * MS, tokens=1, input_tokens=7) for at in (30, 50, 70)]
    chunks.append(Chunk(text="", received_ns=90 * MS, final=True, finish_reason="stop"))
    summary = summarize(10 * MS, chunks)
    assert (summary.ttft_ms, summary.mean_itl_ms, summary.e2e_ms) == (20.0, 20.0, 60.0)
    assert (summary.input_tokens, summary.output_tokens, summary.output_tokens_per_s) == (7, 3, 50.0)
    assert summary.finish_reason == "stop"
    assert summary.complete


def test_tokens_of_the_first_chunk_are_no_gap() -> None:
    """After a first chunk of two tokens, four more in 40 ms are 10 ms apart."""
    chunks = [
        Chunk(text="ab", received_ns=10 * MS, tokens=2),
        Chunk(text="c", received_ns=30 * MS, tokens=1),
        Chunk(text="def", received_ns=50 * MS, tokens=3, final=True),
    ]
    assert summarize(0, chunks).mean_itl_ms == 10.0


def test_one_token_has_no_inter_token_latency() -> None:
    """ITL of a single token is absent, not zero."""
    assert summarize(0, [Chunk(text="x", received_ns=5, tokens=1, final=True)]).mean_itl_ms is None


def test_unknown_token_counts_stay_unknown() -> None:
    """A server that does not count tokens gives times but no rates."""
    chunks = [Chunk(text="x", received_ns=at * MS) for at in (1, 2)]
    summary = summarize(0, chunks)
    assert (summary.output_tokens, summary.mean_itl_ms, summary.output_tokens_per_s) == (None, None, None)
    assert summary.e2e_ms == 2.0


def test_held_back_text_counts_from_its_token() -> None:
    """A token whose text waits for the rest of a character is the first token."""
    chunks = [Chunk(text="", received_ns=MS, tokens=1), Chunk(text="é", received_ns=3 * MS, tokens=1, final=True)]
    assert summarize(0, chunks).ttft_ms == 1.0


def test_nothing_received_is_incomplete_and_absent() -> None:
    """Figures of a generation cut before its first chunk are all absent."""
    summary = summarize(0, [])
    assert not summary.complete
    assert (summary.ttft_ms, summary.e2e_ms, summary.output_tokens) == (None, None, None)


@pytest.mark.parametrize("fields", [{}, {"prompt": "a", "messages": ({"role": "user", "content": "b"},)}])
def test_a_request_has_a_prompt_or_messages(fields: dict[str, object]) -> None:
    """Neither and both are refused."""
    with pytest.raises(ValueError, match="either a prompt or messages"):
        GenerationRequest(**fields)  # type: ignore[arg-type]
