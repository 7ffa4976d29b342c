"""The LLM API repository on a real Triton, with a stand-in for the package tensorrt_llm (tests/support).

Shown: our core model between Triton and an LLM API of the documented form. Not shown: TensorRT-LLM, which needs a GPU.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from pipeline.config.deployment import ServingConfig
from pipeline.triton.repository import emit
from pipeline.triton.server import Server
from tests.support.gpu_engine import llmapi_model
from tests.support.triton_stream import Stream, ask

pytestmark = pytest.mark.server

ENTRIES = ("tensorrt_llm_bls", "ensemble")
PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An emitted repository with the stand-in beside the core model's code."""
    directory = tmp_path_factory.mktemp("llmapi")
    out = directory / "repository"
    engine = llmapi_model(directory / "engine", max_batch_size=1, max_seq_len=1_000_000)
    emit(engine, ServingConfig(max_queue_size=1), name="x", out=out)
    standin = Path(__file__).parents[1] / "support" / "tensorrt_llm_standin" / "tensorrt_llm"
    shutil.copytree(standin, out / "tensorrt_llm" / "1" / "tensorrt_llm")
    return out


@pytest.fixture(scope="module")
def url(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """GRPC address of the server."""
    log = tmp_path_factory.mktemp("log") / "server.log"
    with Server(repository, log_path=log, ready_timeout_s=120) as server:
        yield f"127.0.0.1:{server.ports.grpc}"


def expected(repository: Path, count: int, until: int | None = None) -> str:
    """The stand-in's answer to the prompt, decoded by Hugging Face's tokenizer."""
    tokenizer = Tokenizer.from_file(str(repository / "preprocessing" / "1" / "tokenizer" / "tokenizer.json"))
    last = tokenizer.encode(PROMPT).ids[-1]
    ids = [(last + step) % 200 + 3 for step in range(count)]
    if until is not None:
        ids = ids[: ids.index(until)]
    return tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("stream", [True, False])
def test_engine_names_of_the_public_contract_work(url: str, repository: Path, entry: str, stream: bool) -> None:
    """text_input, max_tokens and stream in, text_output out: what Triton's OpenAI frontend sends and reads."""
    reply = ask(url, entry, text_input=PROMPT, max_tokens=20, stream=stream)
    assert reply.error == ""
    assert reply.text == expected(repository, 20)
    assert (len(reply.responses) > 3) is stream


def test_counts_and_finish_reason_are_told(url: str) -> None:
    """The frontend's usage numbers."""
    reply = ask(
        url,
        "tensorrt_llm_bls",
        text_input=PROMPT,
        max_tokens=9,
        return_num_input_tokens=True,
        return_num_output_tokens=True,
    )
    assert sum(reply.values("num_output_tokens")) == 9
    assert reply.values("num_input_tokens")[0] > 0
    assert reply.values("finish_reason") == [b"length"]


@pytest.mark.parametrize("entry", ENTRIES)
def test_stop_word_ends_the_text(url: str, repository: Path, entry: str) -> None:
    """A word in the text, wherever tokens end."""
    full = expected(repository, 40)
    word = full[12:15]
    reply = ask(url, entry, text_input=PROMPT, max_tokens=40, stop_words=[word])
    assert reply.text == full[: full.index(word)]


def test_end_id_ends_the_sequence(url: str, repository: Path) -> None:
    """`end_id` stops the LLM and is not shown."""
    tokenizer = Tokenizer.from_file(str(repository / "preprocessing" / "1" / "tokenizer" / "tokenizer.json"))
    end_id = (tokenizer.encode(PROMPT).ids[-1] + 5) % 200 + 3
    reply = ask(url, "tensorrt_llm_bls", text_input=PROMPT, max_tokens=40, end_id=end_id)
    assert reply.text == expected(repository, 40, until=end_id)
    assert reply.values("finish_reason") == [b"stop"]


def test_several_sequences_are_told_apart(url: str) -> None:
    """`n` of the LLM API is num_return_sequences."""
    reply = ask(url, "tensorrt_llm_bls", text_input=PROMPT, max_tokens=5, num_return_sequences=2)
    assert sorted(set(reply.values("sequence_index"))) == [0, 1]


def test_log_probabilities_come_along(url: str) -> None:
    """One for each id, and their sum."""
    reply = ask(url, "tensorrt_llm_bls", text_input=PROMPT, max_tokens=5, return_log_probs=True)
    assert reply.values("output_log_probs") == [-0.5] * 5
    assert reply.values("cum_log_probs")[-1] == pytest.approx(-2.5)


def test_guided_decoding_is_accepted(url: str) -> None:
    """The frontend's tool calls arrive as a JSON schema."""
    reply = ask(
        url,
        "tensorrt_llm_bls",
        text_input=PROMPT,
        max_tokens=3,
        guided_decoding_guide_type="json_schema",
        guided_decoding_guide="{}",
    )
    assert reply.error == ""


def test_input_without_counterpart_is_refused_by_name(url: str) -> None:
    """Nothing is silently ignored."""
    reply = ask(url, "tensorrt_llm_bls", text_input=PROMPT, max_tokens=3, lora_task_id=1)
    assert "lora_task_id" in reply.error


def test_failure_of_the_engine_reaches_the_client(url: str) -> None:
    """An exception inside the LLM API is an error response, and the next request is served."""
    reply = ask(url, "tensorrt_llm", input_ids=[499], input_lengths=1, request_output_len=2)
    assert "CUDA error: out of memory" in reply.error
    assert ask(url, "tensorrt_llm_bls", text_input=PROMPT, max_tokens=2).error == ""


def endless(url: str) -> Stream:
    """A stream that has begun and does not end by itself within a test."""
    stream = Stream(url, "tensorrt_llm_bls", text_input=PROMPT, max_tokens=500_000, stream=True, end_id=-1)
    stream.read(2)
    return stream


def test_client_that_goes_away_frees_its_place(url: str) -> None:
    """One runs and one may wait; dropped ones are aborted, so later ones are served."""
    for _ in range(3):
        endless(url).close(drop=True)
    while "Try again later" in (error := ask(url, "tensorrt_llm_bls", text_input=PROMPT, max_tokens=2).error):
        time.sleep(0.05)
    assert error == ""


def test_queue_limit_is_enforced(url: str) -> None:
    """max_batch_size 1 and max_queue_size 1: the third is refused and told why."""
    running, waiting = endless(url), endless(url)
    reply = ask(url, "tensorrt_llm_bls", text_input=PROMPT, max_tokens=2)
    assert "max_queue_size" in reply.error
    running.close(drop=True)
    waiting.close(drop=True)
