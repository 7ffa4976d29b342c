"""A Hugging Face tokenizer from the metadata of a GGUF file, and from nothing else.

The ids, merges, scores, special tokens and chat template are those that the file declares;
general-purpose loaders guess them from the architecture and get them wrong. Two kinds exist:
'gpt2' (byte-level BPE; `tokenizer.ggml.pre` names the pre-tokenizer) and 'llama' (SentencePiece BPE
with scores and byte fallback). Pre-tokenizer patterns follow llama.cpp's src/llama-vocab.cpp, which
cites each model's own tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from pipeline.checkpoints.gguf_file import GGUFFile
from pipeline.errors import BadGGUF

JSON = dict[str, object]

# Token types of the GGUF specification (tokenizer.ggml.token_type).
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5

_GPT2_PATTERN: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CASED_WORD: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER_WORD: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _llama3_pattern(digits: str) -> str:
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_TEKKEN_PATTERN: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_CASED_WORD}*{_LOWER_WORD}+|[^\r\n\p{{L}}\p{{N}}]?{_CASED_WORD}+{_LOWER_WORD}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, kw_only=True)
class _PreTokenizer:
    """Patterns that split the text one after the other, and what goes with them."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    normalizer: str | None = None


_DIGITS_THEN_GPT2: Final = _PreTokenizer(patterns=(r"\p{N}", _GPT2_PATTERN))
_GPT2: Final = _PreTokenizer(patterns=(_GPT2_PATTERN,))
_LLAMA3: Final = _PreTokenizer(patterns=(_llama3_pattern(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
# The published Qwen2 tokenizer composes characters (NFC) first; llama.cpp leaves that to the caller.
_QWEN2: Final = _PreTokenizer(patterns=(_llama3_pattern(r"\p{N}"),), normalizer="NFC")
_TEKKEN: Final = _PreTokenizer(patterns=(_TEKKEN_PATTERN,), ignore_merges=True, add_bos=True)
# What llama.cpp runs for files that name no pre-tokenizer.
_DEFAULT: Final = _PreTokenizer(patterns=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2_PATTERN, r"\p{N}+", r"[0-9][0-9][0-9]"))

_PRE_TOKENIZERS: Final[Mapping[str, _PreTokenizer]] = MappingProxyType(
    {
        "default": _DEFAULT,
        "smollm": _DIGITS_THEN_GPT2,
        "starcoder": _DIGITS_THEN_GPT2,
        "refact": _DIGITS_THEN_GPT2,
        "command-r": _DIGITS_THEN_GPT2,
        "codeshell": _DIGITS_THEN_GPT2,
        "gpt-2": _GPT2,
        "phi-2": _GPT2,
        "mpt": _GPT2,
        "olmo": _GPT2,
        "llama-bpe": _LLAMA3,
        "llama3": _LLAMA3,
        "llama-v3": _LLAMA3,
        "qwen2": _QWEN2,
        "deepseek-r1-qwen": _QWEN2,
        "stablelm2": _PreTokenizer(patterns=(_llama3_pattern(r"\p{N}"),)),
        "tekken": _TEKKEN,
    }
)

# Tokens that end a turn in a chat template while the file declares only the base model's eos.
_END_OF_TURN: Final = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|end_of_turn|>")


@dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """Contents of tokenizer.json and tokenizer_config.json, and the ids that config.json needs.

    `eos` lists every id that ends a generation, the declared one first.
    """

    tokenizer: JSON
    tokenizer_config: JSON
    bos: int | None
    eos: tuple[int, ...]
    pad: int | None


def build_tokenizer(file: GGUFFile, vocab_size: int, context_length: int) -> TokenizerFiles:
    """Build the tokenizer that the file declares.

    Args:
        file: parsed GGUF file.
        vocab_size: rows of the embedding; every id is below it.
        context_length: written as model_max_length.

    Raises:
        BadGGUF: a tokenizer kind or pre-tokenizer that is not supported, or ids outside the vocabulary.
    """
    vocabulary = _Vocabulary.read(file, vocab_size)
    model = file.text("tokenizer.ggml.model")
    if model == "gpt2":
        tokenizer, add_bos = _byte_level_bpe(file, vocabulary)
    elif model == "llama":
        tokenizer, add_bos = _sentencepiece_bpe(file, vocabulary)
    else:
        raise BadGGUF(
            f"{file.path}: tokenizer.ggml.model '{model}' is not supported. Supported: gpt2, llama.",
            hint="Use the original Hugging Face checkpoint with source.path or source.hub.",
        )
    add_bos = file.flag("tokenizer.ggml.add_bos_token", default=add_bos)
    add_eos = file.flag("tokenizer.ggml.add_eos_token", default=False)
    special = {role: vocabulary.special(file, role) for role in ("bos", "eos", "unknown", "padding", "eot", "eom")}
    template = file.text("tokenizer.chat_template") if "tokenizer.chat_template" in file.metadata else None
    frame = ([special["bos"]] if add_bos else [], [special["eos"]] if add_eos else [])
    tokenizer["post_processor"] = _post_processor(file, vocabulary, frame)
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    config: JSON = {names[role]: vocabulary.tokens[special[role] or 0] for role in names if special[role] is not None}
    config |= {
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        # Guard: without it the generic class returns token_type_ids, which no decoder takes.
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": context_length,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    if template is not None:
        config["chat_template"] = template
    return TokenizerFiles(
        tokenizer=tokenizer,
        tokenizer_config=config,
        bos=special["bos"],
        eos=_stop_ids(vocabulary, special, template),
        pad=special["padding"],
    )


@dataclass(frozen=True, kw_only=True)
class _Vocabulary:
    """Tokens by id with their types; `added` are matched in raw text before anything else."""

    tokens: tuple[str, ...]
    types: tuple[int, ...]
    ids: Mapping[str, int]

    @staticmethod
    def read(file: GGUFFile, vocab_size: int) -> _Vocabulary:
        tokens = file.texts("tokenizer.ggml.tokens")
        if len(tokens) > vocab_size:
            raise BadGGUF(f"{file.path}: the tokenizer has {len(tokens)} tokens and the embedding {vocab_size} rows.")
        types: tuple[int, ...] = (_NORMAL,) * len(tokens)
        if "tokenizer.ggml.token_type" in file.metadata:
            types = tuple(int(kind) for kind in file.numbers("tokenizer.ggml.token_type"))
        if len(types) != len(tokens):
            raise BadGGUF(f"{file.path}: tokenizer.ggml.token_type has {len(types)} entries, expected {len(tokens)}.")
        # Guard: converters fill the embedding's spare rows with '[PAD<id>]'; as text they mean nothing.
        ids = {
            token: index
            for index, token in enumerate(tokens)
            if not (types[index] == _UNUSED and token == f"[PAD{index}]")
        }
        for index, token in enumerate(tokens):
            if ids.get(token, index) != index:
                raise BadGGUF(f"{file.path}: token {token!r} has two ids, {index} and {ids[token]}.")
        return _Vocabulary(tokens=tokens, types=types, ids=ids)

    def special(self, file: GGUFFile, role: str) -> int | None:
        key = f"tokenizer.ggml.{role}_token_id"
        if key not in file.metadata:
            return None
        index = file.integer(key)
        if not 0 <= index < len(self.tokens):
            raise BadGGUF(f"{file.path}: {key} is {index} and the vocabulary has {len(self.tokens)} tokens.")
        return index

    def added_tokens(self, unknown_is_added: bool) -> list[JSON]:
        kinds = {_CONTROL, _USER_DEFINED} | ({_UNKNOWN} if unknown_is_added else set())
        return [
            {
                "id": index,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": self.types[index] != _USER_DEFINED,
            }
            for index, token in enumerate(self.tokens)
            if self.types[index] in kinds and token
        ]


def _stop_ids(vocabulary: _Vocabulary, special: Mapping[str, int | None], template: str | None) -> tuple[int, ...]:
    """Return the declared eos, eot and eom, or else the end-of-turn token that the chat template writes."""
    stops = [special[role] for role in ("eos", "eot", "eom")]
    if special["eot"] is None and template is not None:
        stops += [vocabulary.ids.get(token) for token in _END_OF_TURN if token in template]
    return tuple(dict.fromkeys(index for index in stops if index is not None))


def _byte_level_bpe(file: GGUFFile, vocabulary: _Vocabulary) -> tuple[JSON, bool]:
    name = file.text("tokenizer.ggml.pre") if "tokenizer.ggml.pre" in file.metadata else "default"
    pre = _PRE_TOKENIZERS.get(name)
    if pre is None:
        known = ", ".join(sorted(_PRE_TOKENIZERS))
        raise BadGGUF(
            f"{file.path}: pre-tokenizer '{name}' (tokenizer.ggml.pre) is not supported. Supported: {known}.",
            hint="Use the original Hugging Face checkpoint with source.path or source.hub.",
        )
    splits: list[JSON] = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in pre.patterns
    ]
    byte_level: JSON = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    merges = [_merge(file, vocabulary, merge) for merge in file.texts("tokenizer.ggml.merges")]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added_tokens(unknown_is_added=True),
        "normalizer": None if pre.normalizer is None else {"type": pre.normalizer},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(vocabulary, merges, ignore_merges=pre.ignore_merges),
    }, pre.add_bos


def _merge(file: GGUFFile, vocabulary: _Vocabulary, merge: str) -> list[str]:
    """Split 'left right' (byte-level pieces hold no space) and check that both and their union are tokens."""
    left, _, right = merge.partition(" ")
    unknown = [piece for piece in (left, right, left + right) if not piece or piece not in vocabulary.ids]
    if unknown:
        raise BadGGUF(f"{file.path}: tokenizer.ggml.merges has '{merge}', whose piece '{unknown[0]}' is no token.")
    return [left, right]


def _sentencepiece_bpe(file: GGUFFile, vocabulary: _Vocabulary) -> tuple[JSON, bool]:
    """Express scores as merges: the pair that makes the token of the highest score merges first."""
    scores = file.numbers("tokenizer.ggml.scores")
    if len(scores) != len(vocabulary.tokens):
        raise BadGGUF(
            f"{file.path}: tokenizer.ggml.scores has {len(scores)} entries, expected {len(vocabulary.tokens)}."
        )
    ids = vocabulary.ids
    ranked: list[tuple[float, int, str, str]] = []
    for index, token in enumerate(vocabulary.tokens):
        if vocabulary.types[index] in {_NORMAL, _USER_DEFINED}:
            cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
            ranked += [(-scores[index], index, left, right) for left, right in cuts if left in ids and right in ids]
    ranked.sort()
    unknown = vocabulary.special(file, "unknown")
    unknown_token = None if unknown is None else vocabulary.tokens[unknown]
    model = _bpe(vocabulary, [[left, right] for _, _, left, right in ranked], ignore_merges=False)
    model |= {"byte_fallback": True, "fuse_unk": True, "unk_token": unknown_token}
    prefix = file.flag("tokenizer.ggml.add_space_prefix", default=True)
    steps: list[JSON] = [{"type": "Prepend", "prepend": "▁"}] if prefix else []
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": "▁"})
    decoders: list[JSON] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added_tokens(unknown_is_added=True),
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model,
    }, True


def _bpe(vocabulary: _Vocabulary, merges: Sequence[list[str]], *, ignore_merges: bool) -> JSON:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": ignore_merges,
        "vocab": dict(vocabulary.ids),
        "merges": list(merges),
    }


def _post_processor(
    file: GGUFFile, vocabulary: _Vocabulary, frame: tuple[list[int | None], list[int | None]]
) -> JSON | None:
    """Return the template that puts bos before and eos after a text, as the file asks."""
    before, after = frame
    if not before and not after:
        return None
    ids = [index for index in (*before, *after) if index is not None]
    if len(ids) != len(before) + len(after):
        raise BadGGUF(f"{file.path}: tokenizer.ggml asks for a bos or eos around texts and declares no such id.")
    tokens = {vocabulary.tokens[index]: index for index in ids}

    def piece(index: int | None, kind: int) -> JSON:
        return {"SpecialToken": {"id": vocabulary.tokens[index or 0], "type_id": kind}}

    def template(*sequences: str) -> list[JSON]:
        pieces: list[JSON] = []
        for kind, sequence in enumerate(sequences):
            pieces += [piece(index, kind) for index in before]
            pieces.append({"Sequence": {"id": sequence, "type_id": kind}})
            pieces += [piece(index, kind) for index in after]
        return pieces

    return {
        "type": "TemplateProcessing",
        "single": template("A"),
        "pair": template("A", "B"),
        "special_tokens": {token: {"id": token, "ids": [tokens[token]], "tokens": [token]} for token in sorted(tokens)},
    }
