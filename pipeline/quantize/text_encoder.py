"""Text and conversations to token ids, as a checkpoint's own files say; no model library is loaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.errors import BadTokenizer, ConfigError
from pipeline.quantize.documents import Document, Message


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

    @property
    def vocab_size(self) -> int:
        """Tokens that the tokenizer knows, added ones too."""
        size: int = self._tokenizer.get_vocab_size()
        return size

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
