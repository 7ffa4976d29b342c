"""A tokenizer directory as Hugging Face writes it: ids for text, text for ids, the chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from _shared.token_text import TokenBytes

_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


class ChatTemplateError(ValueError):
    """The chat template is missing, broken, or refused the messages."""


class TokenizerDirectory:
    """tokenizer.json, tokenizer_config.json and the chat template of one directory.

    Args:
        path: the directory.

    Raises:
        FileNotFoundError: tokenizer.json is missing.
        _shared.token_text.UnsupportedDecoderError: its tokens do not stand for bytes.
    """

    def __init__(self, path: Path, *, skip_special_tokens: bool = True) -> None:
        text = (path / "tokenizer.json").read_text(encoding="utf-8")
        self.tokenizer = Tokenizer.from_str(text)
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.bytes_of = TokenBytes(
            self.tokenizer, json.loads(text).get("decoder"), skip_special_tokens=skip_special_tokens
        )
        self.config = _read_json(path / "tokenizer_config.json")
        self._template_file = path / "chat_template.jinja"

    def token_id(self, name: str) -> int | None:
        """Id of a special token by its Hugging Face name, such as `pad_token`."""
        token = _content(self.config.get(name))
        return None if token is None else self.tokenizer.token_to_id(token)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`; special tokens written in it count as such, as in transformers."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    @cached_property
    def _template(self) -> Any:
        source: str | None
        if self._template_file.is_file():
            source = self._template_file.read_text(encoding="utf-8")
        else:
            source = _default_template(self.config.get("chat_template"))
        if not source:
            raise ChatTemplateError("this model has no chat template; send text_input instead of messages")
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        # The three names that transformers gives to chat templates (docs/source/en/chat_templating_writing.md).
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        return environment.from_string(source)

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        """The prompt for `messages`, ready for the assistant's answer.

        Args:
            messages: objects with `role` and `content`, as in the OpenAI API.
            options: further variables of the template, such as `tools`, `enable_thinking` or
                `add_generation_prompt` (true unless given).

        Raises:
            ChatTemplateError: no template, or it failed on these messages.
        """
        from jinja2 import TemplateError

        special = {name: _content(self.config.get(name)) for name in _SPECIAL_TOKENS}
        variables: dict[str, Any] = {name: token for name, token in special.items() if token is not None}
        variables |= {"add_generation_prompt": True, **options, "messages": messages}
        try:
            prompt: str = self._template.render(**variables)
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise ChatTemplateError(f"the chat template refused the messages: {error}") from error
        return prompt


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _content(token: Any) -> str | None:
    """A special token is a string, or an object with its `content`."""
    return token.get("content") if isinstance(token, dict) else token


def _default_template(entry: Any) -> str | None:
    """`chat_template` is a template, or a list of named ones of which `default` is for chats."""
    if isinstance(entry, list):
        return next((item["template"] for item in entry if item["name"] == "default"), None)
    return entry if isinstance(entry, str) else None


def _refuse(message: str) -> None:
    raise ChatTemplateError(message)


def _now(pattern: str) -> str:
    from datetime import datetime

    return datetime.now().strftime(pattern)  # noqa: DTZ005  (templates mean the server's local date)
