"""Detokenization and stop words inside the Triton models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from tests.support.checkpoints import tiny_tokenizer
from tests.support.triton_repo import use_model_code

use_model_code("tensorrt_llm", "tensorrt_llm_bls")

from _shared.stop_words import StopMatcher  # noqa: E402
from _shared.token_text import TextDecoder, TokenBytes, UnsupportedDecoderError  # noqa: E402
from _shared.tokenizer_dir import ChatTemplateError, TokenizerDirectory  # noqa: E402
from stream_text import StreamText  # noqa: E402
from visible_ids import VisibleIds  # noqa: E402

pytestmark = pytest.mark.fast

WORLD = "日本語 😀👨‍👩‍👧 e\u0301 ñ Ελλάδα नमस्ते 한국어\n\tx"
IDS = st.lists(st.integers(0, 520), max_size=40)
CUTS = st.lists(st.integers(1, 5), min_size=1, max_size=40)
WORDS = st.lists(st.text("abc", min_size=1, max_size=3), max_size=3)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TokenizerDirectory:
    """A byte-level tokenizer: 3 special ids, all 256 bytes, some merges."""
    directory = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer(directory)
    return TokenizerDirectory(directory)


def sentencepiece_like() -> tuple[Tokenizer, dict[str, object]]:
    """A Llama-2-like tokenizer: words with a space marker, and a token for each byte."""
    words = ["<unk>", "▁Paris", "▁", "is", "▁the", ",", "你"]
    vocabulary = {token: n for n, token in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))  # noqa: S106  (not a password)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer, json.loads(tokenizer.to_str())["decoder"]


def pieces(values: list[int] | str, cuts: list[int]) -> list[list[int] | str]:
    """Cut a sequence into pieces of the given sizes, repeated."""
    result, at, turn = [], 0, 0
    while at < len(values):
        size = cuts[turn % len(cuts)]
        result.append(values[at : at + size])
        at, turn = at + size, turn + 1
    return result


def whole_text(table: TokenBytes, ids: list[int]) -> str:
    """Text of ids decoded at once."""
    decoder = TextDecoder(table)
    return decoder.feed(ids) + decoder.finish()


@given(ids=IDS, cuts=CUTS)
def test_text_does_not_depend_on_how_ids_are_cut(
    tokenizer: TokenizerDirectory, ids: list[int], cuts: list[int]
) -> None:
    """The chunks of any cutting add up to the text decoded at once."""
    decoder = TextDecoder(tokenizer.bytes_of)
    chunks = [decoder.feed(piece) for piece in pieces(ids, cuts)]
    assert "".join(chunks) + decoder.finish() == whole_text(tokenizer.bytes_of, ids)


@given(ids=IDS)
def test_byte_level_text_equals_the_tokenizers_own(tokenizer: TokenizerDirectory, ids: list[int]) -> None:
    """Any ids, valid UTF-8 or not, read as Hugging Face's decoder reads them."""
    assert whole_text(tokenizer.bytes_of, ids) == tokenizer.tokenizer.decode(ids, skip_special_tokens=True)


@given(text=st.text(max_size=20), cuts=CUTS)
def test_no_chunk_of_valid_text_holds_a_broken_character(
    tokenizer: TokenizerDirectory, text: str, cuts: list[int]
) -> None:
    """Streaming valid text never shows U+FFFD, wherever the ids are cut."""
    text = text.replace("\ufffd", "")
    decoder = TextDecoder(tokenizer.bytes_of)
    chunks = [decoder.feed(piece) for piece in pieces(tokenizer.encode(text, add_special_tokens=False), cuts)]
    assert "".join(chunks) == text
    assert not any("\ufffd" in chunk for chunk in chunks)


def test_scripts_of_the_world_survive_single_token_chunks(tokenizer: TokenizerDirectory) -> None:
    """CJK, emoji with joiners and combining marks come out whole, one id at a time."""
    decoder = TextDecoder(tokenizer.bytes_of)
    ids = tokenizer.encode(WORLD, add_special_tokens=False)
    assert "".join(decoder.feed([token]) for token in ids) == WORLD


def test_unfinished_character_at_the_end_becomes_one_replacement(tokenizer: TokenizerDirectory) -> None:
    """Three of four bytes of an emoji are flushed as one U+FFFD."""
    ids = tokenizer.encode("a😀", add_special_tokens=False)[:-1]
    decoder = TextDecoder(tokenizer.bytes_of)
    assert decoder.feed(ids) == "a"
    assert not decoder.is_whole
    assert decoder.finish() == "\ufffd"


def test_leading_space_belongs_to_a_continuation() -> None:
    """A SentencePiece-like word keeps its space after a prompt and loses it at the start of a text."""
    tokenizer, decoder = sentencepiece_like()
    table = TokenBytes(tokenizer, decoder)
    assert TextDecoder(table).feed([1, 3]) == " Parisis"
    assert TextDecoder(table, at_start=True).feed([1, 4]) == "Paris the" == tokenizer.decode([1, 4])


def test_byte_tokens_join_into_characters() -> None:
    """Byte-fallback tokens wait until their character is whole."""
    tokenizer, description = sentencepiece_like()
    decoder = TextDecoder(TokenBytes(tokenizer, description))
    ids = [7 + byte for byte in "好".encode()]
    assert [decoder.feed([token]) for token in ids] == ["", "", "好"]


def test_decoder_without_bytes_is_refused() -> None:
    """A WordPiece decoder cannot be streamed byte-exactly and says so."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))  # noqa: S106  (not a password)
    with pytest.raises(UnsupportedDecoderError, match="WordPiece"):
        TokenBytes(tokenizer, {"type": "WordPiece", "prefix": "##", "cleanup": True})


def slow_stop(text: str, words: list[str]) -> tuple[str, bool]:
    """The definition: read character by character, stop when a word is complete."""
    for end in range(len(text) + 1):
        ending = [word for word in words if text[:end].endswith(word)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


@given(text=st.text("abc", max_size=20), words=WORDS, cuts=CUTS)
def test_stop_words_are_found_across_any_cut(text: str, words: list[str], cuts: list[int]) -> None:
    """The visible text and the verdict equal the character-wise definition for every cutting."""
    matcher = StopMatcher(words)
    shown = "".join(matcher.feed(piece) for piece in pieces(text, cuts))
    shown += "" if matcher.matched is not None else matcher.finish()
    assert (shown, matcher.matched is not None) == slow_stop(text, words)


def test_possible_stop_word_is_held_back_and_released() -> None:
    """A beginning of a stop word waits, and is shown once it turns out to be something else."""
    matcher = StopMatcher(["</s>"])
    assert [matcher.feed("ok </"), matcher.feed("b>")] == ["ok ", "</b>"]


@given(ids=IDS, cuts=CUTS)
def test_every_response_of_the_core_decodes_alone(
    tokenizer: TokenizerDirectory, ids: list[int], cuts: list[int]
) -> None:
    """Decoding each response by itself, as the ensemble does, gives the text of the whole."""
    visible = VisibleIds(tokenizer, [])
    parts = pieces(ids, cuts)
    released = [visible.feed(part, [0.0] * len(part), finished=part is parts[-1]).ids for part in parts]
    assert [token for part in released for token in part] == ids
    assert "".join(whole_text(tokenizer.bytes_of, part) for part in released) == whole_text(tokenizer.bytes_of, ids)


@given(ids=IDS, words=st.lists(st.text("abehs \ufffd", min_size=1, max_size=3), max_size=3), cuts=CUTS)
def test_core_shows_exactly_the_text_before_a_stop_word(
    tokenizer: TokenizerDirectory, ids: list[int], words: list[str], cuts: list[int]
) -> None:
    """Responses of the core add up to the text before the stop word, even inside a token or beside invalid bytes."""
    visible = VisibleIds(tokenizer, words)
    parts = pieces(ids, cuts)
    shown = ""
    for part in parts:
        piece = visible.feed(part, [-1.0] * len(part), finished=part is parts[-1])
        assert len(piece.ids) == len(piece.log_probs)
        shown += whole_text(tokenizer.bytes_of, piece.ids)
        if visible.stopped:
            break
    assert (shown, visible.stopped) == slow_stop(whole_text(tokenizer.bytes_of, ids), words)


@given(text=st.text("ab é😀", max_size=20), words=WORDS, cuts=CUTS)
def test_stream_text_equals_text_before_a_stop_word(
    tokenizer: TokenizerDirectory, text: str, words: list[str], cuts: list[int]
) -> None:
    """The scripted entry shows the same text as the definition and says why it ended."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    stream = StreamText(tokenizer.bytes_of, words, {2}, len(ids))
    shown = "".join(stream.feed(part) for part in pieces(ids, cuts)) + stream.finish()
    expected, stopped = slow_stop(text, words)
    assert (shown, stream.finish_reason) == (expected, "stop" if stopped else "length")


def test_stop_id_ends_a_text_and_is_not_shown(tokenizer: TokenizerDirectory) -> None:
    """Ids after an end-of-sequence id are not read."""
    ids = tokenizer.encode("Paris", add_special_tokens=False)
    stream = StreamText(tokenizer.bytes_of, [], {2}, 99)
    assert stream.feed([*ids, 2, *ids]) == "Paris"
    assert stream.finish_reason == "stop"


def test_chat_template_equals_its_definition(tokenizer: TokenizerDirectory) -> None:
    """Messages are rendered with the checkpoint's template and the assistant's turn is opened."""
    prompt = tokenizer.render([{"role": "user", "content": "Hi"}], {})
    assert prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.render([{"role": "user", "content": "Hi"}], {"add_generation_prompt": False}) == prompt[:-22]


def test_missing_chat_template_is_an_error(tokenizer: TokenizerDirectory, tmp_path: Path) -> None:
    """A base model without template asks for text instead."""
    (tmp_path / "tokenizer.json").write_text(tokenizer.tokenizer.to_str())
    with pytest.raises(ChatTemplateError, match="text_input"):
        TokenizerDirectory(tmp_path).render([{"role": "user", "content": "Hi"}], {})


def test_chat_template_cannot_run_code(tokenizer: TokenizerDirectory, tmp_path: Path) -> None:
    """A template from a checkpoint is sandboxed."""
    (tmp_path / "tokenizer.json").write_text(tokenizer.tokenizer.to_str())
    (tmp_path / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}")
    with pytest.raises(ChatTemplateError, match="unsafe"):
        TokenizerDirectory(tmp_path).render([{"role": "user", "content": "Hi"}], {})
