"""The fallback list: each step is a whole config, checked at its own lines, and shown again as written."""

from __future__ import annotations

from pathlib import Path

import jsonschema
import pytest
import yaml

from pipeline.config.load import json_schema, load, render
from pipeline.errors import ConfigError

pytestmark = pytest.mark.fast

BASE = "name: a\nsource: {path: m}\nquantization: {format: int4_awq}\nfallback:\n"
STEPS = """\
  - quantization: {exclude: [lm_head, '*.down_proj']}
  - quantization: {format: fp8}
    engine: {num_threads: 3}
"""


def write(directory: Path, text: str, name: str = "x.yaml") -> Path:
    """Write a config."""
    path = directory / name
    path.write_text(text)
    return path


def test_each_step_is_laid_over_the_config(tmp_path: Path) -> None:
    """What a step does not name stays; steps do not build on each other."""
    loaded = load(write(tmp_path, BASE + STEPS))
    first, second = loaded.fallback
    assert first.config.quantization.format == "int4_awq"
    assert first.config.quantization.exclude == ("lm_head", "*.down_proj")
    assert second.config.quantization.exclude == ("lm_head",)
    assert loaded.changes(second) == {"quantization.format": "fp8", "engine.num_threads": 3}
    assert second.provenance["engine.num_threads"].endswith("x.yaml:7")


def test_a_config_with_steps_is_shown_so_that_it_loads_again(tmp_path: Path) -> None:
    """Render then load gives the same steps."""
    loaded = load(write(tmp_path, BASE + STEPS))
    again = load(write(tmp_path, render(loaded), "y.yaml"))
    assert [step.config for step in again.fallback] == [step.config for step in loaded.fallback]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ("  - quantization: {format: fp88}\n", "5 quantization.format: 'fp88' is not a format. Did you mean 'fp8'?"),
        ("  - quantization:\n      fromat: fp8\n", "6 quantization.fromat: unknown key 'fromat'."),
        ("  - {}\n", "5 fallback: this step builds what an earlier one or the config itself builds."),
        ("  - name: b\n", "5 fallback: a step cannot change 'name'."),
        ("  - quality: {max_kl: 1}\n", "5 fallback: a step cannot change 'quality'."),
        ("  - fp8\n", "5: a config is a mapping of keys, not 'fp8'."),
        ("  quantization: {format: fp8}\n", "4 fallback: 'fallback' takes a list of steps."),
        ("  - quantization: {format: fp16}\n", "engine.dtype: format fp16 is float16, and engine.dtype is bfloat16."),
    ],
)
def test_a_mistake_in_a_step_is_named_at_its_line(tmp_path: Path, steps: str, expected: str) -> None:
    """Spelling, types and laws between keys, as in the config itself."""
    path = write(tmp_path, BASE + steps)
    with pytest.raises(ConfigError) as caught:
        load(path)
    (problem,) = caught.value.problems
    assert expected in str(problem).removeprefix(f"{path}:")


def test_a_list_replaces_that_of_an_extended_file(tmp_path: Path) -> None:
    """Lists are never merged."""
    write(tmp_path, BASE + STEPS)
    child = write(tmp_path, "extends: x.yaml\nfallback:\n  - quantization: {format: bf16}\n", "y.yaml")
    assert [step.config.quantization.format for step in load(child).fallback] == ["bf16"]
    heir = write(tmp_path, "extends: x.yaml\nname: c\n", "z.yaml")
    assert len(load(heir).fallback) == 2


def test_the_schema_knows_the_steps() -> None:
    """An editor accepts a partial config in a step, and no unknown key."""
    validator = jsonschema.Draft202012Validator(json_schema())
    assert validator.is_valid(yaml.safe_load(BASE + STEPS))
    assert not validator.is_valid(yaml.safe_load(BASE + "  - {fromat: fp8}\n"))


def test_paths_of_tasks_start_at_the_file(tmp_path: Path) -> None:
    """Each item of a list of paths becomes absolute."""
    loaded = load(write(tmp_path, "name: a\nsource: {path: m}\nquality: {tasks: [a.jsonl, b/c.jsonl]}\n"))
    assert loaded.config.quality.tasks == (tmp_path / "a.jsonl", tmp_path / "b/c.jsonl")


@pytest.mark.parametrize(
    ("quality", "expected"),
    [
        ("{min_task_score: 0.5}", "3 quality.min_task_score: 0.5 limits the user's tasks, and no task is named."),
        ("{tasks: [a/x.jsonl, b/x.jsonl]}", "3 quality.tasks: two tasks are named 'x.jsonl'"),
    ],
)
def test_limits_and_tasks_belong_together(tmp_path: Path, quality: str, expected: str) -> None:
    """A limit on nothing and two results of one name are refused."""
    path = write(tmp_path, f"name: a\nsource: {{path: m}}\nquality: {quality}\n")
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert expected in str(caught.value.problems[0])
