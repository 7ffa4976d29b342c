"""The emitted repository on a real Triton server: places, cancellation, queues, and being moved.

The engine takes one sequence at a time and lets it run for a very long time, so that a second request is answered only
if the first one was really dropped.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator

import pytest

from pipeline.config.deployment import ServingConfig
from pipeline.triton.repository import emit
from pipeline.triton.server import Server
from tests.support.triton_repo import tiny_engine
from tests.support.triton_stream import Stream, ask

pytestmark = pytest.mark.server

PROMPT = "The capital of France is"
ENDLESS = 1_000_000
ENTRY = "tensorrt_llm_bls"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """GRPC address of a server whose repository was emitted elsewhere and moved."""
    directory = tmp_path_factory.mktemp("life")
    engine = tiny_engine(directory, max_batch_size=1, max_seq_len=2 * ENDLESS)
    emitted = directory / "emitted"
    emit(engine, ServingConfig(max_queue_size=1), name="tiny", out=emitted)
    moved = directory / "moved" / "here"
    shutil.copytree(emitted, moved)
    shutil.rmtree(emitted)
    shutil.rmtree(engine)
    with Server(moved, log_path=directory / "server.log", ready_timeout_s=120) as server:
        yield f"127.0.0.1:{server.ports.grpc}"


def answered(url: str, model: str = ENTRY) -> bool:
    """A short request gets its answer; tried again while the queue still holds what was just dropped."""
    while "Try again later" in (error := ask(url, model, text_input=PROMPT, max_tokens=3).error):
        time.sleep(0.05)
    return not error


def endless(url: str, model: str = ENTRY, request_id: str = "") -> Stream:
    """A stream that has begun and does not end by itself."""
    stream = Stream(
        url, model, request_id, text_input=PROMPT, max_tokens=ENDLESS, stream=True, end_id=-1, min_tokens=ENDLESS
    )
    stream.read(2)
    return stream


def test_client_that_goes_away_frees_its_place(url: str) -> None:
    """After a drop in mid-stream the only place in the batch is free again."""
    endless(url).close(drop=True)
    endless(url).close(drop=True)
    assert answered(url)


def one_waits_one_refused(url: str, max_tokens: int) -> tuple[Stream, Stream]:
    """Send two requests while one runs: whichever comes first waits, the other is refused."""
    first, second = (
        Stream(url, ENTRY, text_input=PROMPT, max_tokens=max_tokens, stream=True, min_tokens=max_tokens)
        for _ in range(2)
    )
    while not (first.poll().error or second.poll().error):
        time.sleep(0.02)
    return (second, first) if first.reply.error else (first, second)


def test_queue_limit_is_enforced_with_numbers(url: str) -> None:
    """One runs, one waits, the third is refused and told why; the one that waited is answered."""
    running = endless(url)
    waiting, refused = one_waits_one_refused(url, max_tokens=2)
    assert "1 waiting (max_queue_size)" in refused.reply.error
    running.close(drop=True)
    assert waiting.read().error == ""
    waiting.close()
    refused.close()


def test_client_that_goes_away_while_waiting_never_runs(url: str) -> None:
    """A queued endless request whose client left does not take the place that becomes free."""
    running = endless(url)
    waiting, refused = one_waits_one_refused(url, max_tokens=ENDLESS)
    waiting.close(drop=True)
    running.close(drop=True)
    assert answered(url)
    refused.close()


def test_stop_request_cancels_by_id(url: str) -> None:
    """`stop` with the request's id ends an ensemble's stream, which nothing else can."""
    running = endless(url, "ensemble", "to-be-stopped")
    stop = ask(url, "tensorrt_llm", "to-be-stopped", input_ids=[1], input_lengths=1, request_output_len=1, stop=True)
    assert stop.error == ""
    assert running.read().final
    running.close()
    assert answered(url, "ensemble")


def test_stop_without_id_is_refused(url: str) -> None:
    """A cancellation must say of what."""
    reply = ask(url, "tensorrt_llm", input_ids=[1], input_lengths=1, request_output_len=1, stop=True)
    assert "stop: needs the request id" in reply.error


def test_stop_word_in_the_text_cancels_the_engine(url: str) -> None:
    """BLS ends an endless generation at a stop word and frees its place."""
    shown = endless(url)
    text = shown.read(12).text
    shown.close(drop=True)
    word = text[len(text) // 2 :][:2]
    reply = ask(url, ENTRY, text_input=PROMPT, max_tokens=ENDLESS, stop_words=[word])
    assert reply.text == text[: text.index(word)]
    assert answered(url)
