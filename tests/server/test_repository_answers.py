"""The emitted repository on a real Triton server: what clients get.

The model is a random tiny Llama, so its bytes are mostly invalid UTF-8: hard on everything that streams text.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.triton_stream import ask

pytestmark = pytest.mark.server

PROMPT = "The capital of France is"
ENTRIES = ("tensorrt_llm_bls", "ensemble")
MESSAGES = '[{"role": "user", "content": "Hi"}]'


@pytest.fixture(params=ENTRIES)
def entry(request: pytest.FixtureRequest) -> str:
    """Each of the two models that take text."""
    name: str = request.param
    return name


def test_streamed_text_equals_unary_text(url: str, entry: str) -> None:
    """Many chunks add up to the one text, and each chunk is UTF-8 by itself."""
    unary = ask(url, entry, text_input=PROMPT, max_tokens=100)
    streamed = ask(url, entry, text_input=PROMPT, max_tokens=100, stream=True)
    assert len(unary.responses) == 1
    assert len(streamed.responses) > 5
    assert streamed.text == unary.text != ""


def test_both_entries_give_the_same_text(url: str) -> None:
    """Ensemble and BLS decode alike."""
    texts = {ask(url, entry, text_input=PROMPT, max_tokens=60, stream=True).text for entry in ENTRIES}
    assert len(texts) == 1


def test_sampled_text_is_reproducible_and_differs_by_seed(url: str, entry: str) -> None:
    """A seed fixes the answer; another seed gives another."""
    sampling: dict[str, Any] = {"text_input": PROMPT, "max_tokens": 40, "top_p": 1.0, "temperature": 1.5}
    first, again = (ask(url, entry, seed=7, **sampling).text for _ in range(2))
    assert first == again != ask(url, entry, seed=8, **sampling).text


@pytest.mark.parametrize("stream", [True, False])
def test_stop_word_ends_the_text_and_is_not_shown(url: str, entry: str, stream: bool) -> None:
    """Any substring works as a stop word, wherever tokens end."""
    full = ask(url, entry, text_input=PROMPT, max_tokens=100).text
    word = next(
        full[at : at + 3] for at in range(4, len(full)) if full[at : at + 3].strip("\ufffd") == full[at : at + 3]
    )
    reply = ask(url, entry, text_input=PROMPT, max_tokens=100, stream=stream, stop_words=["never", word])
    assert reply.text == full[: full.index(word)]
    assert reply.final


def test_end_id_ends_the_text_and_is_not_shown(url: str, entry: str) -> None:
    """The id given as end_id stops the sequence before it."""
    core: dict[str, Any] = {"input_ids": [5, 6, 7], "input_lengths": 3, "request_output_len": 20}
    ids = ask(url, "tensorrt_llm", exclude_input_in_output=True, **core).values("output_ids")
    ended = ask(url, "tensorrt_llm", exclude_input_in_output=True, end_id=ids[4], **core).values("output_ids")
    assert ended == ids[: ids.index(ids[4])]


def test_finish_reason_tells_length_from_stop(url: str) -> None:
    """BLS says why the text ended."""
    full = ask(url, "tensorrt_llm_bls", text_input=PROMPT, max_tokens=50, stream=True)
    stopped = ask(url, "tensorrt_llm_bls", text_input=PROMPT, max_tokens=50, stream=True, stop_words=[full.text[9:11]])
    assert (full.values("finish_reason"), stopped.values("finish_reason")) == ([b"length"], [b"stop"])


def test_token_counts_add_up_to_max_tokens(url: str, entry: str) -> None:
    """num_output_tokens counts each response's own ids, num_input_tokens the prompt."""
    reply = ask(
        url, entry, text_input=PROMPT, max_tokens=30, stream=True,
        return_num_input_tokens=True, return_num_output_tokens=True,
    )  # fmt: skip
    assert sum(reply.values("num_output_tokens")) == 30
    assert len(set(reply.values("num_input_tokens"))) == 1


def test_log_probs_come_per_token_with_their_sum(url: str, entry: str) -> None:
    """One negative number per generated id; cum_log_probs is their running sum."""
    reply = ask(url, entry, text_input=PROMPT, max_tokens=20, stream=True, return_log_probs=True)
    log_probs = reply.values("output_log_probs")
    assert len(log_probs) == 20
    assert max(log_probs) < 0
    assert reply.values("cum_log_probs")[-1] == pytest.approx(sum(log_probs), rel=1e-5)


def test_perf_metrics_are_in_order(url: str, entry: str) -> None:
    """arrival, scheduled, first and last token follow each other."""
    reply = ask(url, entry, text_input=PROMPT, max_tokens=8, return_perf_metrics=True)
    names = ("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns")
    times = [reply.values(name)[0] for name in names]
    assert times == sorted(times)


@pytest.mark.parametrize("stream", [True, False])
def test_prompt_is_echoed_when_asked(url: str, entry: str, stream: bool) -> None:
    """exclude_input_in_output=false puts the prompt before the answer."""
    answer = ask(url, entry, text_input=PROMPT, max_tokens=10, stream=stream).text
    echoed = ask(url, entry, text_input=PROMPT, max_tokens=10, stream=stream, exclude_input_in_output=False).text
    assert echoed == PROMPT + answer


def test_messages_are_templated(url: str, entry: str) -> None:
    """Messages give the answer of the prompt that the chat template writes."""
    prompt = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    by_text = ask(url, entry, text_input=prompt, max_tokens=10).text
    assert ask(url, entry, text_input="", max_tokens=10, messages=MESSAGES).text == by_text


def test_several_sequences_come_with_their_index(url: str, entry: str) -> None:
    """num_return_sequences gives that many different answers, each in its own response."""
    reply = ask(url, entry, text_input=PROMPT, max_tokens=20, num_return_sequences=3, top_k=50)
    assert sorted(reply.values("sequence_index")) == [0, 1, 2]
    assert len(set(reply.values("text_output"))) == 3


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"text_input": PROMPT, "max_tokens": 400}, "= 4\\d\\d exceeds max_seq_len 256"),
        ({"text_input": PROMPT, "max_tokens": 0}, "max_tokens.*0 is not a positive"),
        ({"text_input": "", "max_tokens": 4}, "text_input: the prompt is empty"),
        ({"text_input": b"\xff", "max_tokens": 4}, "not UTF-8"),
        ({"text_input": PROMPT, "max_tokens": 4, "messages": MESSAGES}, "text_input must be empty"),
        ({"text_input": "", "max_tokens": 4, "messages": "{"}, "messages: not JSON"),
        ({"text_input": "", "max_tokens": 4, "messages": '[{"content": "x"}]'}, "role"),
        ({"text_input": PROMPT, "max_tokens": 4, "beam_width": 2}, "beam_width: not supported by this model .sent 2."),
        ({"text_input": PROMPT, "max_tokens": 4, "bad_words": ["no"]}, "bad_words: not supported"),
        ({"text_input": PROMPT, "max_tokens": 4, "lora_task_id": 1}, "lora_task_id: not supported"),
        ({"text_input": PROMPT, "max_tokens": 4, "return_context_logits": True}, "return_context_logits: not supp"),
        ({"text_input": PROMPT, "max_tokens": 4, "top_p": 1.5}, "top_p must lie in 0..1"),
        ({"text_input": PROMPT, "max_tokens": 4, "num_return_sequences": 0}, "num_return_sequences: 0"),
    ],
)
def test_bad_input_is_refused_by_name(url: str, entry: str, inputs: dict[str, Any], words: str) -> None:
    """The error names the client's input, and the server answers the next request."""
    reply = ask(url, entry, **inputs)
    assert reply.responses == []
    assert re.search(words, reply.error), reply.error
    assert ask(url, entry, text_input=PROMPT, max_tokens=2).error == ""


def test_foreign_token_id_is_refused(url: str) -> None:
    """The core model checks ids against the vocabulary; the engine would answer nonsense."""
    reply = ask(url, "tensorrt_llm", input_ids=[5, 512], input_lengths=2, request_output_len=4)
    assert "input_ids: 512 is not in the vocabulary of 512" in reply.error


def test_sixteen_concurrent_streams_do_not_mix(url: str, entry: str) -> None:
    """Each of sixteen streams with its own prompt gets what it gets alone."""
    prompts = [f"The capital of {letter * 3} is" for letter in "ABCDEFGHIJKLMNOP"]
    alone = [ask(url, entry, text_input=prompt, max_tokens=24).text for prompt in prompts]
    with ThreadPoolExecutor(16) as pool:
        replies = list(
            pool.map(lambda prompt: ask(url, entry, prompt, text_input=prompt, max_tokens=24, stream=True), prompts)
        )
    assert [reply.error for reply in replies] == [""] * 16
    assert [reply.text for reply in replies] == alone
