"""Templates, their checks, and the emitted repository."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.deployment import ServingConfig
from pipeline.errors import ConfigError, IntegrityError
from pipeline.triton.model_config import find_problems, parse, render, set_parameter
from pipeline.triton.repository import MODELS, emit, templates
from tests.support.checkpoints import tiny_tokenizer
from tests.support.triton_repo import write_engine_json

pytestmark = pytest.mark.fast


def template_configs() -> dict[str, Any]:
    """The five templates, parsed."""
    return {model: parse((templates() / model / "config.pbtxt").read_text(), model) for model in MODELS}


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """An engine directory with a file in the place of the compiled graph."""
    directory = tmp_path / "engine"
    directory.mkdir()
    (directory / "openvino_model.bin").write_bytes(b"weights")
    tiny_tokenizer(directory / "tokenizer")
    write_engine_json(directory, max_batch_size=7)
    return directory


@pytest.mark.parametrize("model", MODELS)
def test_printed_template_parses_back(model: str) -> None:
    """parse(render(config)) is config."""
    config = template_configs()[model]
    assert parse(render(config), model) == config


def test_templates_fit_together() -> None:
    """The shipped templates have no finding."""
    assert find_problems(template_configs()) == []


def _rename_tensor(configs: dict[str, Any]) -> None:
    configs["ensemble"].ensemble_scheduling.step[1].input_map["input_ids"] = "_NOWHERE"


def _change_type(configs: dict[str, Any]) -> None:
    configs["postprocessing"].input[0].data_type = configs["postprocessing"].output[0].data_type


def _change_rank(configs: dict[str, Any]) -> None:
    configs["postprocessing"].input[0].dims.append(-1)


def _drop_required(configs: dict[str, Any]) -> None:
    del configs["ensemble"].ensemble_scheduling.step[1].input_map["input_lengths"]


def _leave_unread(configs: dict[str, Any]) -> None:
    del configs["ensemble"].ensemble_scheduling.step[1].input_map["stop_words_list"]


def _feed_required_from_optional(configs: dict[str, Any]) -> None:
    next(t for t in configs["ensemble"].input if t.name == "text_input").optional = True


def _differ_in_batch(configs: dict[str, Any]) -> None:
    configs["postprocessing"].max_batch_size += 1


def _differ_in_decoupling(configs: dict[str, Any]) -> None:
    configs["tensorrt_llm_bls"].model_transaction_policy.decoupled = False


def _leave_placeholder(configs: dict[str, Any]) -> None:
    configs["preprocessing"].parameters["tokenizer_dir"].string_value = "${tokenizer_dir}"


def _drop_model(configs: dict[str, Any]) -> None:
    del configs["postprocessing"]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_rename_tensor, "nothing produces tensor '_NOWHERE'"),
        (_change_type, "written as TYPE_INT32 and read as TYPE_STRING"),
        (_change_rank, "written as [-1, -1] and read as [-1, -1, -1]"),
        (_drop_required, "needs 'input_lengths'"),
        (_leave_unread, "'_STOP_WORDS_IDS' is produced or accepted and nothing reads it"),
        (_feed_required_from_optional, "'text_input' is optional"),
        (_differ_in_batch, "max_batch_size must be equal"),
        (_differ_in_decoupling, "decoupled flag must be equal"),
        (_leave_placeholder, "placeholder"),
        (_drop_model, "'postprocessing' is not a model"),
    ],
)
def test_broken_repository_is_found(damage: Callable[[dict[str, Any]], None], words: str) -> None:
    """Each way to break the models' agreement is named."""
    configs = template_configs()
    damage(configs)
    assert any(words in str(problem) for problem in find_problems(configs))


def test_malformed_template_names_line_and_column() -> None:
    """A syntax error is reported with its place."""
    with pytest.raises(ConfigError, match=r"config\.pbtxt:2:"):
        parse('name: "a"\nmax_batch_size: ${size}', "config.pbtxt")


def test_unknown_parameter_is_refused() -> None:
    """A parameter that no model reads is a mistake."""
    with pytest.raises(ConfigError, match="tokeniser_dir"):
        set_parameter(template_configs()["preprocessing"], "tokeniser_dir", "x")


def test_emitted_repository_carries_engine_limits(engine: Path, tmp_path: Path) -> None:
    """max_batch_size, queue size and stop ids come from the engine and the serving config."""
    out = tmp_path / "repository"
    emit(engine, ServingConfig(max_queue_size=5, bls_instance_count=2), name="tiny", out=out)
    configs = {model: parse((out / model / "config.pbtxt").read_text(), model) for model in MODELS}
    assert {config.max_batch_size for config in configs.values()} == {7}
    assert configs["tensorrt_llm"].parameters["max_queue_size"].string_value == "5"
    assert configs["tensorrt_llm_bls"].parameters["eos_token_ids"].string_value == "2,0"
    assert configs["tensorrt_llm_bls"].instance_group[0].count == 2


def test_emitted_repository_is_self_contained(engine: Path, tmp_path: Path) -> None:
    """Engine, tokenizer and shared code lie inside; no path of this machine, no pipeline import, no bytecode."""
    out = tmp_path / "repository"
    emit(engine, ServingConfig(), name="tiny", out=out)
    files = {path.relative_to(out).as_posix(): path for path in out.rglob("*") if path.is_file()}
    assert "tensorrt_llm/1/engine/openvino_model.bin" in files
    assert "preprocessing/1/tokenizer/tokenizer.json" in files
    assert "tensorrt_llm_bls/1/_shared/token_text.py" in files
    text = {name: path.read_text() for name, path in files.items() if name.endswith((".py", ".pbtxt", ".md", ".txt"))}
    foreign = (str(tmp_path), "import pipeline", "from pipeline")
    assert not [name for name, content in text.items() if any(words in content for words in foreign)]
    assert not [name for name in files if name.endswith(".pyc")]


def test_emission_is_deterministic(engine: Path, tmp_path: Path) -> None:
    """Emitting twice writes the same bytes."""
    trees = []
    for name in ("a", "b"):
        emit(engine, ServingConfig(), name="tiny", out=tmp_path / name)
        files = sorted(path for path in (tmp_path / name).rglob("*") if path.is_file())
        trees.append([(path.relative_to(tmp_path / name), path.read_bytes()) for path in files])
    assert trees[0] == trees[1]


def test_requirements_pin_the_engines_packages(engine: Path, tmp_path: Path) -> None:
    """Every package that the models import is pinned, numpy below 2."""
    emit(engine, ServingConfig(), name="tiny", out=tmp_path / "out")
    pins = dict(line.split("==") for line in (tmp_path / "out" / "requirements.txt").read_text().splitlines())
    assert set(pins) == {"jinja2", "numpy", "openvino", "openvino-genai", "tokenizers"}
    assert pins["numpy"].startswith("1.")


def test_engine_without_tokenizer_is_refused(engine: Path, tmp_path: Path) -> None:
    """An engine that cannot answer text is not emitted."""
    (engine / "tokenizer" / "tokenizer.json").unlink()
    with pytest.raises(IntegrityError, match=r"tokenizer\.json"):
        emit(engine, ServingConfig(), name="tiny", out=tmp_path / "out")


def test_several_postprocessing_instances_are_refused(engine: Path, tmp_path: Path) -> None:
    """Instances that could reorder a stream are refused with the reason."""
    with pytest.raises(ConfigError, match="overtake"):
        emit(engine, ServingConfig(postprocessing_instance_count=2), name="tiny", out=tmp_path / "out")
