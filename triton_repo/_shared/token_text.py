"""From token ids to text, piece by piece, without ever splitting a character.

Each token stands for bytes (`TokenBytes`); text is what those bytes mean as UTF-8 (`TextDecoder`). Because bytes
concatenate, the text of a stream does not depend on how its ids were cut into chunks: the sum of all chunks equals
the text decoded at once. Bytes of an unfinished character wait for the next id.

Rule for bytes that are not UTF-8: each maximal invalid part becomes one U+FFFD (Unicode 15, section 3.9, "U+FFFD
Substitution of Maximal Subparts"), in mid-text as soon as it is known to be invalid, at the end by `finish`. This
equals `Tokenizer.decode` for byte-level tokenizers; a byte-fallback tokenizer there writes one U+FFFD for every byte
of a run of byte tokens that is invalid anywhere, which a stream cannot know in advance.

Rule for leading spaces: a SentencePiece-like tokenizer writes the space *before* a word into its token, and its
decoder drops the very first one of a text. Generated text continues a prompt, so nothing is dropped there: prompt plus
continuation reads right. Only text decoded from its beginning (`at_start`) loses that space.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping
from typing import Any, Protocol


class Vocabulary(Protocol):
    """The part of `tokenizers.Tokenizer` that detokenization needs."""

    def id_to_token(self, id: int) -> str | None: ...  # noqa: A002  (the library's name)

    def get_added_tokens_decoder(self) -> Mapping[int, Any]: ...


class UnsupportedDecoderError(ValueError):
    """The tokenizer's decoder is of a kind whose tokens do not stand for bytes."""


def _byte_level_alphabet() -> dict[str, int]:
    """Characters that byte-level BPE writes for bytes (GPT-2): printable ones stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_LEVEL = _byte_level_alphabet()
_BYTE_TOKEN_LENGTH = len("<0xFF>")


class TokenBytes:
    """The bytes of each token id, read from tokenizer.json's own `decoder` description.

    Args:
        vocabulary: the loaded tokenizer.
        decoder: the `decoder` object of tokenizer.json.
        skip_special_tokens: special tokens stand for nothing instead of for their name.

    Raises:
        UnsupportedDecoderError: the decoder is not made of ByteLevel, Metaspace, Replace, ByteFallback, Fuse and Strip.
    """

    def __init__(
        self, vocabulary: Vocabulary, decoder: Mapping[str, Any] | None, *, skip_special_tokens: bool = True
    ) -> None:
        self._vocabulary = vocabulary
        self._known: dict[int, bytes] = {}
        self._byte_level = False
        self._byte_fallback = False
        self._replacements: list[tuple[str, str]] = []
        self.strip_at_start = 0
        for step in _steps(decoder):
            self._add(step)
        if skip_special_tokens:
            added = vocabulary.get_added_tokens_decoder()
            self._known = {number: b"" for number, token in added.items() if token.special}

    def _add(self, step: Mapping[str, Any]) -> None:
        kind = step["type"]
        if kind == "ByteLevel":
            self._byte_level = True
        elif kind == "ByteFallback":
            self._byte_fallback = True
        elif kind == "Replace" and "String" in step["pattern"]:
            self._replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "Metaspace":
            self._replacements.append((step["replacement"], " "))
            # Metaspace drops every marker of the first token, Strip a stated number.
            self.strip_at_start = 0 if step.get("prepend_scheme", "always") == "never" else 1 << 16
        elif kind == "Strip" and step["content"] == " " and step["stop"] == 0:
            self.strip_at_start = int(step["start"])
        elif kind != "Fuse":
            raise UnsupportedDecoderError(
                f"tokenizer.json: decoder '{kind}' has no byte-exact streaming; supported are ByteLevel, Metaspace, "
                "and sequences of Replace, ByteFallback, Fuse and Strip"
            )

    def __getitem__(self, token_id: int) -> bytes:
        """Bytes of one token; none for an id without a token (rows of the embedding that only pad it)."""
        known = self._known.get(token_id)
        if known is None:
            token = self._vocabulary.id_to_token(token_id)
            known = self._known[token_id] = b"" if token is None else self._bytes_of(token)
        return known

    def _bytes_of(self, token: str) -> bytes:
        if self._byte_level and all(character in _BYTE_LEVEL for character in token):
            return bytes(_BYTE_LEVEL[character] for character in token)
        for old, new in self._replacements:
            token = token.replace(old, new)
        if self._byte_fallback and len(token) == _BYTE_TOKEN_LENGTH and token.startswith("<0x") and token[-1] == ">":
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        return token.encode("utf-8")


def _steps(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return [{"type": "none"}]
    if decoder["type"] == "Sequence":
        return [step for part in decoder["decoders"] for step in _steps(part)]
    return [decoder]


class TextDecoder:
    """Decodes one stream of ids.

    Args:
        table: bytes of each id.
        at_start: the stream begins a text instead of continuing a prompt (see the module's rule for spaces).
    """

    def __init__(self, table: TokenBytes, *, at_start: bool = False) -> None:
        self._table = table
        self._strip = table.strip_at_start if at_start else 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, ids: Iterable[int]) -> str:
        """Text that is certain after these ids; may be empty."""
        data = b"".join([self._table[token_id] for token_id in ids]) if not self._strip else self._first(ids)
        return self._utf8.decode(data)

    def _first(self, ids: Iterable[int]) -> bytes:
        data = b""
        for token_id in ids:
            piece = self._table[token_id]
            if piece and self._strip:
                spaces = len(piece) - len(piece.lstrip(b" "))
                piece = piece[min(spaces, self._strip) :]
                self._strip = 0
            data += piece
        return data

    @property
    def is_whole(self) -> bool:
        """No unfinished character waits for its remaining bytes."""
        return not self._utf8.getstate()[0]

    def finish(self) -> str:
        """Text of what is left: U+FFFD if the stream ended inside a character."""
        return self._utf8.decode(b"", final=True)
