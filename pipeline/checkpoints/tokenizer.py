"""Check that a tokenizer and the weights belong together, before hours are spent on them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from pipeline.checkpoints.architecture import Architecture
from pipeline.checkpoints.chat_template import check_chat_template, render_chat, special_tokens
from pipeline.checkpoints.json_file import read_json, read_optional_json
from pipeline.errors import BadTokenizer, HostError, Problem

__all__ = ["check_tokenizer", "convert_tokenizer", "render_chat"]

# More ids beyond the embedding than anyone adds by hand: the tokenizer is another model's.
_FOREIGN: Final = 64


def check_tokenizer(directory: Path, architecture: Architecture) -> None:
    """Judge the tokenizer of a checkpoint against its architecture.

    Every token id is below the embedding's rows, special tokens and stop ids are in the vocabulary,
    and the chat template parses. A vocabulary smaller than the embedding is normal: rows are padded.

    Raises:
        BadTokenizer: lists every finding.
        Unreadable: a file is not JSON.
    """
    tokenizer = _load(directory)
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    problems = [
        *_ids_outside(vocabulary, architecture.vocab_size),
        *_missing_special_tokens(directory, vocabulary),
        *_bad_stop_ids(architecture, set(vocabulary.values())),
    ]
    if problems:
        raise BadTokenizer(f"{directory}: tokenizer and weights do not belong together.", problems=problems)
    check_chat_template(directory)


def convert_tokenizer(directory: Path, out: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json into `out` for a checkpoint that has only a slow tokenizer.

    Raises:
        HostError: transformers, or a library that its converter needs, is not installed.
        BadTokenizer: the conversion fails.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise HostError("converting a tokenizer needs transformers.", hint="pip install 'trtpipe[quantize]'") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), use_fast=True, trust_remote_code=False)
    except ImportError as error:
        raise HostError(f"converting the tokenizer of {directory} needs more packages ({error}).") from error
    except (ValueError, OSError, KeyError, AttributeError, TypeError) as error:
        raise BadTokenizer(f"{directory}: the tokenizer cannot be converted ({error}).") from error
    if not tokenizer.is_fast:
        raise BadTokenizer(f"{directory}: transformers has no fast form of {type(tokenizer).__name__}.")
    tokenizer.save_pretrained(str(out))


def _load(directory: Path) -> Tokenizer:
    file = directory / "tokenizer.json"
    if not file.exists():
        raise BadTokenizer(
            f"{directory}: tokenizer.json is missing.",
            hint="Make one: AutoTokenizer.from_pretrained(DIR, use_fast=True).save_pretrained(DIR).",
        )
    read_json(file)
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:
        raise BadTokenizer(f"{file}: not a tokenizer ({error}).") from error


def _ids_outside(vocabulary: dict[str, int], rows: int) -> Iterable[Problem]:
    outside = sorted((index, token) for token, index in vocabulary.items() if index >= rows)
    if len(outside) > _FOREIGN:
        yield Problem(
            where="tokenizer.json",
            message=f"{len(vocabulary)} tokens and the embedding has {rows} rows: the tokenizer of another model.",
            hint="Copy the tokenizer files that were published with these weights.",
        )
    elif outside:
        named = ", ".join(f"{token!r} = {index}" for index, token in outside[:5])
        yield Problem(
            where="tokenizer.json",
            message=f"{len(outside)} token ids are beyond the embedding's {rows} rows: {named}.",
            hint="Remove them, or resize the embedding before the build.",
        )


def _missing_special_tokens(directory: Path, vocabulary: dict[str, int]) -> Iterable[Problem]:
    config = read_optional_json(directory / "tokenizer_config.json")
    for role, token in special_tokens(config).items():
        if token not in vocabulary:
            yield Problem(where=f"tokenizer_config.json {role}", message=f"{token!r} is not in the vocabulary.")


def _bad_stop_ids(architecture: Architecture, known: set[int]) -> Iterable[Problem]:
    if not architecture.eos_token_ids:
        yield Problem(
            where="generation_config.json eos_token_id",
            message="no stop id: generation would never end.",
            hint="Set eos_token_id to the id that ends an answer.",
        )
    optional = {"bos_token_id": architecture.bos_token_id, "pad_token_id": architecture.pad_token_id}
    # Guard: -1 is how some configs say that there is no such token.
    roles = [(role, index) for role, index in optional.items() if index is not None and index >= 0]
    roles += [("eos_token_id", index) for index in architecture.eos_token_ids]
    for role, index in roles:
        if index not in known:
            yield Problem(where=f"{role} {index}", message="the vocabulary has no such id.")
