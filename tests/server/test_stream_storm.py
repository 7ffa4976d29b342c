"""Many short concurrent streams through the recommended entry: Triton's stub must survive them.

Without `core_streams.py` the first few hundred crash it.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from pipeline.triton.client import Client
from pipeline.triton.generation import GenerationRequest
from tests.support.triton_stream import Stream, ask

pytestmark = pytest.mark.server

ENTRY = "tensorrt_llm_bls"
STREAMS = 1000
ABANDONED = 150


def test_short_streams_are_all_answered_in_full(url: str) -> None:
    """Eight at a time, each gets its tokens and its end."""
    with Client(url) as client, ThreadPoolExecutor(8) as pool:

        def tokens(number: int) -> int | None:
            request = GenerationRequest(prompt=f"Question {number}:", max_tokens=8, min_tokens=8, top_k=1, stream=True)
            return client.generate_text(request)[1].output_tokens

        assert set(pool.map(tokens, range(STREAMS))) == {8}


def test_streams_that_clients_leave_disturb_no_other(url: str) -> None:
    """Clients go away in mid-stream between others that stay; all who stay are answered."""

    def one(number: int) -> str:
        if number % 3:
            return ask(url, ENTRY, text_input="Hello", max_tokens=8, stream=True).error
        stream = Stream(url, ENTRY, text_input="Hello", max_tokens=400, min_tokens=400, stream=True)
        stream.read(1 + number % 4)
        stream.close(drop=True)
        return ""

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(one, range(3 * ABANDONED))) == {""}
