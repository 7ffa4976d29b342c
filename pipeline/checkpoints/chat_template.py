"""Render a checkpoint's chat template in a sandbox, by the rules of transformers' apply_chat_template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Final

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pipeline.checkpoints.json_file import read_optional_json
from pipeline.errors import BadTokenizer, Unreadable

# Templates that print the date get this one, so that the same messages give the same ids every day.
# It is the date that Llama 3.1's own template falls back to.
_DATE: Final = date(2024, 7, 26)
SPECIAL_ROLES: Final = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def render_chat(
    directory: Path,
    messages: Sequence[Mapping[str, object]],
    *,
    add_generation_prompt: bool = True,
    today: date = _DATE,
    **variables: object,
) -> str:
    """Turn messages into the prompt text that the model was trained on.

    Args:
        directory: checkpoint with tokenizer_config.json, and chat_template.jinja where the template is not in it.
        messages: dictionaries with 'role' and 'content'.
        add_generation_prompt: end with the opening of the assistant's turn.
        today: the date that `strftime_now` prints; fixed unless given.
        variables: further template variables, such as tools or enable_thinking.

    Raises:
        BadTokenizer: the checkpoint has no chat template, or it does not parse or refuses the messages.
    """
    source = read_chat_template(directory)
    if source is None:
        raise BadTokenizer(
            f"{directory}: the checkpoint has no chat template; it is a base model.", hint="Send plain text."
        )
    config = read_optional_json(directory / "tokenizer_config.json")
    try:
        template = _environment(today).from_string(source)
        return template.render(
            **{"tools": None, "documents": None, **special_tokens(config), **variables},
            messages=messages,
            add_generation_prompt=add_generation_prompt,
        )
    except (TemplateError, TypeError, ValueError, LookupError) as error:
        raise BadTokenizer(f"{directory}: the chat template fails on these messages ({error}).") from error


def check_chat_template(directory: Path) -> None:
    """Parse the chat template, if there is one.

    Raises:
        BadTokenizer: it does not parse; names the line.
    """
    source = read_chat_template(directory)
    if source is None:
        return
    try:
        _environment(_DATE).from_string(source)
    except TemplateError as error:
        line = getattr(error, "lineno", None)
        at = f" line {line}" if line else ""
        raise BadTokenizer(f"{directory}: the chat template does not parse{at} ({error}).") from error


def read_chat_template(directory: Path) -> str | None:
    """Return the default chat template from chat_template.jinja, tokenizer_config.json or chat_template.json."""
    file = directory / "chat_template.jinja"
    if file.exists():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise Unreadable(f"{file}: cannot be read ({error}).") from error
    for name in ("tokenizer_config.json", "chat_template.json"):
        match read_optional_json(directory / name).get("chat_template"):
            case str(source):
                return source
            case list(named):
                by_name = {each.get("name"): each.get("template") for each in named if isinstance(each, dict)}
                if isinstance(by_name.get("default"), str):
                    return str(by_name["default"])
            case _:
                pass
    return None


def special_tokens(config: Mapping[str, object]) -> dict[str, str]:
    """Return role -> token text from tokenizer_config.json, whose values are strings or AddedToken objects."""
    tokens: dict[str, str] = {}
    for role in SPECIAL_ROLES:
        value = config.get(role)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[role] = text
    return tokens


class _Generation(Extension):
    """Accept {% generation %} … {% endgeneration %}, which marks the assistant's words and prints them."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares a mutable set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(today: date) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation], autoescape=False
    )

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: object, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = today.strftime
    return environment
