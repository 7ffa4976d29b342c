"""From text to the exact token rows that observers see, and the record of them.

Documents of a set are shuffled by the seed, tokenized with the source's own tokenizer.json, cut into pieces
that fit a row, and packed into rows of exactly `max_seq_len` with the end-of-sequence token after each
piece: rows of one length need no padding, and padding would enter the observed ranges. Every document gives
its first piece before any gives its second, so that few rows still see many kinds of text.

Several sets share the rows in proportion to their weights and are spread evenly over them. A document that
an earlier set has is dropped from the later one. A set that is too small for its rows is an error that says
how many it gives; the shipped sample gives what it has. Text is never repeated: a repeated row teaches an
observer nothing.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config.schema import CalibrationConfig
from pipeline.errors import ConfigError, Problem
from pipeline.quantize.documents import SHIPPED_CALIBRATION, Document, identity, read_documents
from pipeline.quantize.text_encoder import TextEncoder

MIN_DOCUMENT_TOKENS = 8

_MANY = 0.1  # of all documents: what is worth a word to the user
# Distinct tokens per token, natural text of 32,000 tokens has ten times as many; but at most so much of the vocabulary.
_FEW_DISTINCT, _OF_VOCABULARY = 0.01, 0.1
_SHORT = 0.25  # of a row: the model never sees how it behaves far from the start of a text


@dataclass(frozen=True, kw_only=True)
class TextSet:
    """A file of documents.

    Attributes:
        path: the file.
        name: how it is called in records.
        weight: its share of the rows, relative to the other sets'.
        key: the config's key that names it, for messages.
        complete: a set that gives less than its share of the rows is an error.
    """

    path: Path
    name: str
    weight: float = 1.0
    key: str = "calibration.dataset"
    complete: bool = True


@dataclass(frozen=True, kw_only=True)
class TokenRows:
    """Rows of token ids and where they came from.

    `rows` all have the same length. `record` is what calibration.json holds: seed, counts, lengths in tokens, the
    same per set with its name and digest, and `ids_sha256`, the digest of exactly these rows.
    """

    rows: tuple[tuple[int, ...], ...]
    record: Mapping[str, Any]

    @property
    def origin(self) -> str:
        """Names of the sets, in words."""
        return " and ".join(one["name"] for one in self.record["sets"])


def text_sets(calibration: CalibrationConfig) -> tuple[TextSet, ...]:
    """The files that a config names, or the shipped sample; sets of the hub must have been located."""
    if calibration.dataset is not None:
        return (TextSet(path=calibration.dataset, name=calibration.dataset.name),)
    sets = []
    for number, one in enumerate(calibration.datasets, start=1):
        if one.path is None:
            raise TypeError(f"{one.hub} was not located before it is read")
        name = one.path.name if one.hub is None else f"{one.hub}/{one.file}"
        key = f"calibration.datasets item {number}"
        sets.append(TextSet(path=one.path, name=name, weight=one.weight, key=key))
    return tuple(sets) or (TextSet(path=SHIPPED_CALIBRATION, name="shipped", complete=False),)


def draw_rows(
    documents: Sequence[Document],
    encoder: TextEncoder,
    *,
    num_samples: int,
    max_seq_len: int,
    seed: int,
    seen: set[str] | None = None,
) -> TokenRows:
    """Shuffle, tokenize, clean and pack `documents` into at most `num_samples` rows of `max_seq_len` ids.

    Exact duplicates and documents of fewer than 8 tokens are dropped and counted. When the text gives
    less than one full row, that one shorter row is returned.

    Args:
        documents: what was read.
        encoder: of the source checkpoint.
        num_samples: rows wanted.
        max_seq_len: tokens of a row.
        seed: of the shuffle.
        seen: identities of documents that another set has; they are dropped and counted, and this one's are added.

    Raises:
        ConfigError: nothing is left.
    """
    by_identity = {identity(document): document for document in documents}
    elsewhere = by_identity.keys() & (seen or set())
    unique = [name for name in by_identity if name not in elsewhere]
    if seen is not None:
        seen.update(unique)
    random.Random(seed).shuffle(unique)  # noqa: S311 - sampling, not secrecy
    packed = _pack((by_identity[name] for name in unique), encoder, num_samples * max_seq_len, max_seq_len)
    lengths, stream = sorted(packed.document_lengths), packed.stream
    if not lengths:
        raise ConfigError(
            f"every document of the text is shorter than {MIN_DOCUMENT_TOKENS} tokens"
            + (" or is in another set" if elsewhere else ""),
            hint="Give longer text.",
        )
    full = min(num_samples, len(stream) // max_seq_len)
    rows = tuple(tuple(stream[n * max_seq_len : (n + 1) * max_seq_len]) for n in range(full)) or (tuple(stream),)
    record = _counted(rows) | {
        "requested_sequences": num_samples,
        "documents": len(documents),
        "documents_used": len(lengths),
        "conversations": sum(bool(document.messages) for document in documents),
        "duplicates_dropped": len(documents) - len(by_identity),
        "duplicates_of_other_sets_dropped": len(elsewhere),
        "near_empty_dropped": packed.near_empty,
        "longer_than_a_row": sum(length > max_seq_len for length in lengths),
        "document_tokens": {
            "min": lengths[0],
            "mean": round(sum(lengths) / len(lengths), 2),
            "p50": lengths[len(lengths) // 2],
            "p90": lengths[len(lengths) * 9 // 10],
            "max": lengths[-1],
        },
    }
    return TokenRows(rows=rows, record=record)


def _counted(rows: Sequence[Sequence[int]]) -> dict[str, Any]:
    return {
        "sequences": len(rows),
        "tokens": sum(len(row) for row in rows),
        "distinct_tokens": len({token for row in rows for token in row}),
    }


@dataclass(frozen=True, kw_only=True)
class _Packed:
    stream: list[int]
    document_lengths: list[int]
    near_empty: int


def _pack(documents: Iterable[Document], encoder: TextEncoder, wanted: int, row: int) -> _Packed:
    """Concatenate pieces of documents, first pieces first, until `wanted` tokens are there or the text ends."""
    separator = [] if encoder.eos_token_id is None else [encoder.eos_token_id]
    piece = row - len(separator)
    stream: list[int] = []
    rest: list[list[int]] = []
    lengths: list[int] = []
    near_empty = 0
    for document in documents:
        if len(stream) >= wanted:
            break
        ids = encoder.encode(document)
        if len(ids) < MIN_DOCUMENT_TOKENS:
            near_empty += 1
            continue
        lengths.append(len(ids))
        if ids[-1:] == separator:
            ids.pop()
        stream += ids[:piece] + separator
        rest.append(ids[piece:])
    while len(stream) < wanted and any(rest):
        for ids in filter(None, rest):
            stream += ids[:piece] + separator
        rest = [ids[piece:] for ids in rest]
    return _Packed(stream=stream, document_lengths=lengths, near_empty=near_empty)


def digest_rows(rows: Sequence[Sequence[int]]) -> str:
    """Digest the canonical JSON of the rows, so that the boundaries between rows count too."""
    encoded = json.dumps([list(row) for row in rows], separators=(",", ":")).encode()
    return f"sha256:{hashlib.sha256(encoded).hexdigest()}"


def sample(
    sets: Sequence[TextSet], tokenizer_directory: Path, *, num_samples: int, max_seq_len: int, seed: int = 0
) -> TokenRows:
    """Draw token rows from text sets in proportion to their weights.

    Raises:
        ConfigError: malformed or too little text.
        Unreadable: a file cannot be read.
        BadTokenizer: the source's tokenizer cannot be loaded.
    """
    encoder = TextEncoder(tokenizer_directory)
    shares = _shares([one.weight for one in sets], num_samples)
    seen: set[str] = set()
    drawn = [
        _draw_set(one, encoder, seen, num_samples=share, max_seq_len=max_seq_len, seed=seed)
        for one, share in zip(sets, shares, strict=True)
        if share
    ]
    _require_enough([one for one, share in zip(sets, shares, strict=True) if share], drawn, num_samples, max_seq_len)
    # Row n of a set of m lies at (n + 1/2) / m of the whole, so that every batch sees every set.
    placed = [
        ((n + 0.5) / len(one.rows), which, row) for which, one in enumerate(drawn) for n, row in enumerate(one.rows)
    ]
    rows = tuple(row for _, _, row in sorted(placed, key=lambda place: place[:2]))
    record = _counted(rows) | {
        "seed": seed,
        "requested_sequences": num_samples,
        "max_seq_len": max_seq_len,
        "vocabulary": encoder.vocab_size,
        "sets": [dict(one.record) for one in drawn],
        "ids_sha256": digest_rows(rows),
    }
    return TokenRows(rows=rows, record=record)


def _shares(weights: Sequence[float], total: int) -> list[int]:
    """Cut `total` rows in proportion to the weights; rows left over go to the largest remainders."""
    exact = [total * weight / sum(weights) for weight in weights]
    shares = [int(share) for share in exact]
    order = sorted(range(len(weights)), key=lambda which: (shares[which] - exact[which], which))
    for which in order[: total - sum(shares)]:
        shares[which] += 1
    return shares


def _draw_set(
    one: TextSet, encoder: TextEncoder, seen: set[str], *, num_samples: int, max_seq_len: int, seed: int
) -> TokenRows:
    documents = read_documents(one.path, key=one.key)
    drawn = draw_rows(documents, encoder, num_samples=num_samples, max_seq_len=max_seq_len, seed=seed, seen=seen)
    source = {
        "name": one.name,
        "sha256": f"sha256:{hashlib.sha256(one.path.read_bytes()).hexdigest()}",
        "weight": one.weight,
    }
    return TokenRows(rows=drawn.rows, record={**source, **drawn.record})


def _require_enough(sets: Sequence[TextSet], drawn: Sequence[TokenRows], num_samples: int, max_seq_len: int) -> None:
    """Refuse sets that give fewer rows than their share, and rows of several lengths."""
    full = [len(one.rows) if len(one.rows[0]) == max_seq_len else 0 for one in drawn]
    asked = [one.record["requested_sequences"] for one in drawn]
    problems = [
        Problem(
            where=one.key,
            message=f"{one.path} gives {found} sequences of {max_seq_len} tokens; its share is {share}.",
            hint="Add text, or lower its weight." if len(sets) > 1 else "",
        )
        for one, found, share in zip(sets, full, asked, strict=True)
        if one.complete and found < share
    ]
    if not problems:
        return
    works = min(num_samples * found // share for found, share in zip(full, asked, strict=True))
    tokens = min(one.record["tokens"] for one in drawn)
    raise ConfigError(
        f"the calibration text is too small: calibration.num_samples asks for {num_samples} sequences"
        + (f" and the text gives {full[0]}" if len(sets) == 1 else ""),
        problems=problems,
        hint=f"Add text, or set calibration.num_samples to {works}."
        if works
        else f"Add text, or lower calibration.max_seq_len (the smallest set has {tokens} tokens).",
    )


def warnings(record: Mapping[str, Any]) -> list[str]:
    """What a record tells about text that calibrates badly, in words for a user."""
    words = []
    for one in record["sets"]:
        name, documents = one["name"], one["documents"]
        repeated = one["duplicates_dropped"] + one["duplicates_of_other_sets_dropped"]
        if repeated > _MANY * documents:
            words.append(f"{name}: {repeated} of {documents} documents repeat another one and were dropped")
        if one["near_empty_dropped"] > _MANY * documents:
            words.append(
                f"{name}: {one['near_empty_dropped']} of {documents} documents have fewer than {MIN_DOCUMENT_TOKENS} "
                "tokens and were dropped"
            )
        if one["document_tokens"]["p90"] < _SHORT * record["max_seq_len"]:
            words.append(
                f"{name}: nine of ten documents have fewer than {one['document_tokens']['p90'] + 1} tokens, and a "
                f"sequence is {record['max_seq_len']}: it is packed from many short ones"
            )
    if record["distinct_tokens"] < min(_FEW_DISTINCT * record["tokens"], _OF_VOCABULARY * record["vocabulary"]):
        words.append(
            f"only {record['distinct_tokens']} distinct tokens in {record['tokens']}: the text says the same "
            "over and over, and ranges for anything else are guesses"
        )
    if record["sequences"] < record["requested_sequences"]:
        words.append(f"{record['sequences']} of {record['requested_sequences']} sequences: the text has no more")
    return words
