"""A tokenizer that does not belong to the weights is found before anything is built."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoints.architecture import Architecture, read_architecture
from pipeline.checkpoints.tokenizer import check_tokenizer, render_chat
from pipeline.errors import BadTokenizer, Unreadable
from tests.support.checkpoint_files import write_checkpoint

pytestmark = pytest.mark.fast

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Return a checkpoint whose tokenizer fits."""
    return write_checkpoint(tmp_path / "model", {"model.embed_tokens.weight": [512, 16]})


@pytest.fixture
def architecture(checkpoint: Path) -> Architecture:
    """Return its architecture."""
    return read_architecture(checkpoint)


def change(file: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Edit a JSON file in place."""
    document = json.loads(file.read_text())
    edit(document)
    file.write_text(json.dumps(document))


def test_a_tokenizer_that_fits_passes(checkpoint: Path, architecture: Architecture) -> None:
    """A vocabulary smaller than the padded embedding is normal."""
    check_tokenizer(checkpoint, architecture)


def test_ids_beyond_the_embedding_are_named(checkpoint: Path, architecture: Architecture) -> None:
    """An added token past the last row is shown with its id."""
    count = len(json.loads((checkpoint / "tokenizer.json").read_text())["model"]["vocab"])
    token = {"id": count, "content": "<extra>", "special": True, "normalized": False}
    token |= {"single_word": False, "lstrip": False, "rstrip": False}
    change(checkpoint / "tokenizer.json", lambda it: it["added_tokens"].append(token))
    fits = dataclasses.replace(architecture, vocab_size=count)
    with pytest.raises(
        BadTokenizer, match=rf"1 token ids are beyond the embedding's {count} rows: '<extra>' = {count}"
    ):
        check_tokenizer(checkpoint, fits)


def test_the_tokenizer_of_another_model_is_recognised(checkpoint: Path, architecture: Architecture) -> None:
    """Far more tokens than rows means the wrong files, not a few added tokens."""
    with pytest.raises(BadTokenizer, match="the tokenizer of another model"):
        check_tokenizer(checkpoint, dataclasses.replace(architecture, vocab_size=100))


def test_special_tokens_must_be_in_the_vocabulary(checkpoint: Path, architecture: Architecture) -> None:
    """Both spellings of a special token are looked up."""

    def edit(document: dict[str, Any]) -> None:
        document["eos_token"] = {"content": "<|eot_id|>", "special": True}
        document |= {"pad_token": "<pad>"}

    change(checkpoint / "tokenizer_config.json", edit)
    with pytest.raises(BadTokenizer) as failure:
        check_tokenizer(checkpoint, architecture)
    assert "eos_token: '<|eot_id|>' is not in the vocabulary" in str(failure.value)
    assert "pad_token: '<pad>' is not in the vocabulary" in str(failure.value)


@pytest.mark.parametrize(
    ("ids", "words"), [((), "no stop id"), ((2, 511), "eos_token_id 511: the vocabulary has no such id")]
)
def test_stop_ids_must_exist(checkpoint: Path, architecture: Architecture, ids: tuple[int, ...], words: str) -> None:
    """No stop id, or one that is no token, would never end an answer."""
    with pytest.raises(BadTokenizer, match=words):
        check_tokenizer(checkpoint, dataclasses.replace(architecture, eos_token_ids=ids))


def test_a_negative_pad_id_means_that_there_is_none(checkpoint: Path, architecture: Architecture) -> None:
    """Some configs write -1."""
    check_tokenizer(checkpoint, dataclasses.replace(architecture, pad_token_id=-1))


def test_every_finding_is_reported_at_once(checkpoint: Path, architecture: Architecture) -> None:
    """One run shows all that is wrong."""
    wrong = dataclasses.replace(architecture, vocab_size=100, eos_token_ids=(511,), bos_token_id=510)
    with pytest.raises(BadTokenizer) as failure:
        check_tokenizer(checkpoint, wrong)
    assert len(failure.value.problems) == 3


def test_a_missing_tokenizer_json_says_how_to_make_one(checkpoint: Path, architecture: Architecture) -> None:
    """A slow tokenizer alone is not served."""
    (checkpoint / "tokenizer.json").rename(checkpoint / "vocab.json")
    with pytest.raises(BadTokenizer, match=r"use_fast=True\)\.save_pretrained"):
        check_tokenizer(checkpoint, architecture)


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("{", Unreadable, "tokenizer.json: not JSON"),
        ("{}", BadTokenizer, "tokenizer.json: not a tokenizer"),
        ('{"model": {"type": "BPE", "vocab": {"a": "b"}}}', BadTokenizer, "not a tokenizer"),
    ],
)
def test_a_broken_tokenizer_json_is_named(
    checkpoint: Path, architecture: Architecture, text: str, error: type[Exception], words: str
) -> None:
    """No JSON, and JSON that is no tokenizer."""
    (checkpoint / "tokenizer.json").write_text(text)
    with pytest.raises(error, match=words):
        check_tokenizer(checkpoint, architecture)


def test_a_chat_template_that_does_not_parse_is_found(checkpoint: Path, architecture: Architecture) -> None:
    """The line is named, before anything is built."""
    (checkpoint / "chat_template.jinja").write_text("{% for m in messages %}\n{{ m.content }\n{% endfor %}")
    with pytest.raises(BadTokenizer, match="chat template does not parse line 2"):
        check_tokenizer(checkpoint, architecture)


def test_a_chat_is_rendered_with_the_opening_of_the_answer(checkpoint: Path) -> None:
    """The template of tokenizer_config.json is applied, special tokens included."""
    assert render_chat(checkpoint, MESSAGES) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert render_chat(checkpoint, MESSAGES, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ bos_token }}{{ messages[0]['content'] }}", "<|im_start|>hi"),
        ("{% if enable_thinking %}think{% endif %}", "think"),
        ("{{ tools is none }}", "True"),
        ("{{ {'k': 'é<>'} | tojson }}", '{"k": "é<>"}'),
        ("{{ strftime_now('%Y-%m-%d') }}", "2024-07-26"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "hi"),
        ("{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}", "1"),
    ],
)
def test_templates_find_what_transformers_gives_them(checkpoint: Path, template: str, text: str) -> None:
    """Variables, filters and tags of transformers' environment exist; the date is fixed."""
    (checkpoint / "chat_template.jinja").write_text(template)
    assert render_chat(checkpoint, MESSAGES, enable_thinking=True) == text


def test_a_named_default_template_is_used(checkpoint: Path) -> None:
    """tokenizer_config.json may hold a list of named templates."""
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    change(checkpoint / "tokenizer_config.json", lambda it: it.update(chat_template=named))
    assert render_chat(checkpoint, MESSAGES) == "yes"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content.undefined.deeper }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_that_refuses_or_escapes_fails_clearly(checkpoint: Path, template: str) -> None:
    """Refusals, unknown variables and attempts to leave the sandbox are the same error."""
    (checkpoint / "chat_template.jinja").write_text(template)
    with pytest.raises(BadTokenizer, match="the chat template fails"):
        render_chat(checkpoint, MESSAGES)


def test_a_base_model_has_no_chat(checkpoint: Path, architecture: Architecture) -> None:
    """Without a template the tokenizer is fine, and chat is refused by name."""
    change(checkpoint / "tokenizer_config.json", lambda it: it.pop("chat_template"))
    check_tokenizer(checkpoint, architecture)
    with pytest.raises(BadTokenizer, match="has no chat template"):
        render_chat(checkpoint, MESSAGES)
