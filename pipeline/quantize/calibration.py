"""From text to the exact token rows that observers see, and the record of them.

Text is a JSONL file (one object a line with `text`, `prompt` or `messages`), a plain text file (one
document a paragraph) or the sample shipped in data/. Documents are shuffled by the seed, tokenized with
the source's own tokenizer.json, cut into pieces that fit a row, and packed into rows of exactly
`max_seq_len` with the end-of-sequence token after each piece: rows of one length need no padding, and
padding would enter the observed ranges. Every document gives its first piece before any gives its
second, so that few rows still see many kinds of text.

A user's text that is too small for `num_samples` rows is an error that says how many it gives. The
shipped sample gives what it has. Text is never repeated: a repeated row teaches an observer nothing.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import BadTokenizer, ConfigError, Problem, Unreadable

SHIPPED_CALIBRATION = Path(__file__).parent / "data" / "calibration.jsonl"
SHIPPED_HELD = Path(__file__).parent / "data" / "held.jsonl"

MIN_DOCUMENT_TOKENS = 8
_LISTED_PROBLEMS = 20

Message = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Document:
    """One piece of text: either `text`, or a conversation that the chat template renders."""

    text: str = ""
    messages: tuple[Message, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TokenRows:
    """Rows of token ids and where they came from.

    `rows` all have the same length. `record` is what calibration.json holds: source, seed, counts,
    lengths in tokens, and `ids_sha256`, the digest of exactly these rows.
    """

    rows: tuple[tuple[int, ...], ...]
    record: Mapping[str, Any]


def read_documents(path: Path) -> list[Document]:
    """Read a JSONL or plain text file.

    Raises:
        ConfigError: the file is missing, empty, or rows are malformed; lists them by file:line.
        Unreadable: the file exists and cannot be read, or is not UTF-8.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"calibration text {path} does not exist", hint="Check calibration.dataset.") from error
    except UnicodeDecodeError as error:
        raise Unreadable(f"{path} is not UTF-8 (byte {error.start})", hint="Convert it to UTF-8.") from error
    except OSError as error:
        raise Unreadable(f"cannot read {path}: {error.strerror}") from error
    if path.suffix in {".jsonl", ".json", ".ndjson"}:
        documents = _parse_jsonl(text, path)
    else:
        paragraphs = (paragraph.strip() for paragraph in text.replace("\r\n", "\n").split("\n\n"))
        documents = [Document(text=paragraph) for paragraph in paragraphs if paragraph]
    if not documents:
        raise ConfigError(f"{path} holds no text", hint="Give JSONL rows with text, prompt or messages.")
    return documents


def _parse_jsonl(text: str, path: Path) -> list[Document]:
    documents: list[Document] = []
    problems: list[Problem] = []
    # split("\n"), not splitlines(): JSON strings may hold U+2028 and friends unescaped.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        parsed = parse_row(line)
        if isinstance(parsed, Document):
            documents.append(parsed)
        else:
            problems.append(Problem(where=f"{path}:{number}", message=parsed))
    if problems:
        shown = problems[:_LISTED_PROBLEMS]
        if len(problems) > len(shown):
            shown.append(Problem(where=str(path), message=f"and {len(problems) - len(shown)} more."))
        raise ConfigError(
            f"{len(problems)} malformed rows in {path}",
            problems=shown,
            hint='A row is {"text": "…"}, {"prompt": "…"} or {"messages": [{"role": "…", "content": "…"}]}.',
        )
    return documents


def parse_row(line: str) -> Document | str:
    """Return the document, or what is wrong with the row."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        return f"not JSON: {error.msg} at column {error.colno}."
    if not isinstance(row, dict):
        return f"a row must be an object, not {type(row).__name__}."
    found = [key for key in ("text", "prompt", "messages") if key in row]
    if len(found) != 1:
        return f"a row needs exactly one of text, prompt, messages; this one has {found or sorted(row)}."
    value = row[found[0]]
    if found[0] != "messages":
        return Document(text=value) if isinstance(value, str) else f"{found[0]} must be a string."
    well_formed = (
        isinstance(value, list)
        and value
        and all(
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
            for message in value
        )
    )
    if not well_formed:
        return "messages must be a non-empty list of objects with string role and content."
    return Document(messages=tuple({"role": m["role"], "content": m["content"]} for m in value))


class TextEncoder:
    """Text and conversations to token ids, as the source checkpoint's own files say.

    Args:
        directory: holds tokenizer.json, tokenizer_config.json and perhaps chat_template.jinja.
    """

    def __init__(self, directory: Path) -> None:
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        except Exception as error:  # tokenizers raises nothing narrower
            raise BadTokenizer(f"cannot load {directory / 'tokenizer.json'}: {error}") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        config_file = directory / "tokenizer_config.json"
        self._config: dict[str, Any] = json.loads(config_file.read_text("utf-8")) if config_file.is_file() else {}
        template_file = directory / "chat_template.jinja"
        self._template = template_file.read_text("utf-8") if template_file.is_file() else self._configured_template()
        self.eos_token_id = self._special_id("eos_token")

    def _configured_template(self) -> str | None:
        template = self._config.get("chat_template")
        if isinstance(template, list):  # several named templates; the plain one is called default
            template = next((item["template"] for item in template if item.get("name") == "default"), None)
        return template

    def _special_token(self, key: str) -> str | None:
        token = self._config.get(key)
        content: str | None = token.get("content") if isinstance(token, dict) else token
        return content

    def _special_id(self, key: str) -> int | None:
        token = self._special_token(key)
        found: int | None = self._tokenizer.token_to_id(token) if token else None
        return found

    def encode(self, document: Document) -> list[int]:
        """Tokenize one document.

        Special tokens are added to plain text as tokenizer.json's post-processor does; an explicit
        add_bos_token or add_eos_token in tokenizer_config.json wins. A chat template writes its own.

        Raises:
            ConfigError: a conversation, and the checkpoint has no chat template.
        """
        if document.messages:
            rendered = self.render(document.messages)
            return list(self._tokenizer.encode(rendered, add_special_tokens=False).ids)
        add_bos = self._config.get("add_bos_token")
        ids = list(self._tokenizer.encode(document.text, add_special_tokens=add_bos is not False).ids)
        bos = self._special_id("bos_token")
        if add_bos and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        if self._config.get("add_eos_token") and self.eos_token_id is not None and ids[-1:] != [self.eos_token_id]:
            ids.append(self.eos_token_id)
        return ids

    def encode_question(self, document: Document) -> list[int]:
        """Tokenize what an answer follows: plain text as it is, a conversation up to the assistant's turn."""
        if not document.messages:
            return self.encode(document)
        rendered = self.render(document.messages, add_generation_prompt=True)
        return list(self._tokenizer.encode(rendered, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Token ids to text, without special tokens."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """Apply the chat template, as Hugging Face does (trimmed blocks, sandboxed)."""
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        if self._template is None:
            raise ConfigError(
                "the calibration text holds messages, and this checkpoint has no chat template",
                hint="Give rows with text instead, or add chat_template.jinja to the source.",
            )
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value, **kwargs: json.dumps(value, ensure_ascii=False, **kwargs)
        environment.globals["raise_exception"] = _raise_template_error
        # A date in a template would make the ids depend on the day: always the same one.
        environment.globals["strftime_now"] = lambda _format: "01 Jan 2025"
        tokens = {key: self._special_token(key) or "" for key in ("bos_token", "eos_token", "pad_token", "unk_token")}
        try:
            return environment.from_string(self._template).render(
                messages=[dict(message) for message in messages], add_generation_prompt=add_generation_prompt, **tokens
            )
        except TemplateError as error:
            raise BadTokenizer(f"the chat template fails on a calibration conversation: {error}") from error


def _raise_template_error(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def draw_rows(
    documents: Sequence[Document], encoder: TextEncoder, *, num_samples: int, max_seq_len: int, seed: int
) -> TokenRows:
    """Shuffle, tokenize, clean and pack `documents` into at most `num_samples` rows of `max_seq_len` ids.

    Exact duplicates and documents of fewer than 8 tokens are dropped and counted. When the text gives
    less than one full row, that one shorter row is returned.

    Raises:
        ConfigError: nothing is left.
    """
    by_identity = {_identity(document): document for document in documents}
    unique = list(by_identity)
    random.Random(seed).shuffle(unique)  # noqa: S311 - sampling, not secrecy
    packed = _pack((by_identity[identity] for identity in unique), encoder, num_samples * max_seq_len, max_seq_len)
    lengths, stream = packed.document_lengths, packed.stream
    if not lengths:
        raise ConfigError(
            f"every document of the text is shorter than {MIN_DOCUMENT_TOKENS} tokens",
            hint="Give longer text.",
        )
    full = min(num_samples, len(stream) // max_seq_len)
    rows = tuple(tuple(stream[n * max_seq_len : (n + 1) * max_seq_len]) for n in range(full)) or (tuple(stream),)
    record = {
        "seed": seed,
        "requested_sequences": num_samples,
        "max_seq_len": max_seq_len,
        "sequences": len(rows),
        "tokens": sum(len(row) for row in rows),
        "distinct_tokens": len({token for row in rows for token in row}),
        "documents": len(documents),
        "documents_used": len(lengths),
        "duplicates_dropped": len(documents) - len(unique),
        "near_empty_dropped": packed.near_empty,
        "document_tokens": {
            "min": min(lengths),
            "mean": round(sum(lengths) / len(lengths), 2),
            "max": max(lengths),
        },
        "ids_sha256": digest_rows(rows),
    }
    return TokenRows(rows=rows, record=record)


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


def _identity(document: Document) -> str:
    return json.dumps([document.text.strip(), [dict(message) for message in document.messages]], sort_keys=True)


def digest_rows(rows: Sequence[Sequence[int]]) -> str:
    """Digest the canonical JSON of the rows, so that the boundaries between rows count too."""
    encoded = json.dumps([list(row) for row in rows], separators=(",", ":")).encode()
    return f"sha256:{hashlib.sha256(encoded).hexdigest()}"


def sample(
    dataset: Path | None,
    tokenizer_directory: Path,
    *,
    num_samples: int,
    max_seq_len: int,
    seed: int = 0,
    shipped: Path = SHIPPED_CALIBRATION,
) -> TokenRows:
    """Draw token rows from the user's text, or from the shipped one when `dataset` is None.

    Raises:
        ConfigError: malformed or too little text.
        Unreadable: the file cannot be read.
        BadTokenizer: the source's tokenizer cannot be loaded.
    """
    path = shipped if dataset is None else dataset
    encoder = TextEncoder(tokenizer_directory)
    drawn = draw_rows(read_documents(path), encoder, num_samples=num_samples, max_seq_len=max_seq_len, seed=seed)
    found = len(drawn.rows) if len(drawn.rows[0]) == max_seq_len else 0
    if dataset is not None and found < num_samples:
        raise ConfigError(
            f"calibration.dataset {path} gives {found} sequences of {max_seq_len} tokens; "
            f"calibration.num_samples asks for {num_samples}",
            hint=f"Add text, or set calibration.num_samples to {found}."
            if found
            else f"Add text, or lower calibration.max_seq_len (the text has {drawn.record['tokens']} tokens).",
        )
    source = {
        "name": "shipped" if dataset is None else path.name,
        "sha256": f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}",
    }
    return TokenRows(rows=drawn.rows, record={"source": source, **drawn.record})
