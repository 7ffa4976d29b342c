"""Migration of what is broken, or is no engine repository, and what stays as it was."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pipeline.config.load import load
from pipeline.errors import ConfigError, HostError
from pipeline.triton.migrate import REPOSITORY, Migration, migrate
from tests.support.old_repositories import OLD, edited

pytestmark = pytest.mark.fast


@pytest.fixture
def ours(tmp_path: Path) -> Migration:
    """Migration of a repository as trtpipe emits it: FP8 on two H100."""
    return migrate(OLD / "ours", tmp_path / "new")


def test_missing_engine_is_reported_and_the_rest_goes_over(tmp_path: Path) -> None:
    """Without config.json of the engine the parameters still go over, and format and limits are said to be unknown."""
    copy = edited(tmp_path, "/models/tensorrt_llm/1/engine", "/elsewhere/llama")
    shutil.rmtree(copy / "tensorrt_llm" / "1" / "engine")
    migration = migrate(copy, tmp_path / "new")
    config = load(migration.config).config
    assert (config.engine.max_batch_size, config.quantization.format) == (64, "bf16")
    assert config.engine.kv_cache.free_gpu_memory_fraction == 0.85
    (problem,) = [problem for problem in migration.problems if problem.where == "tensorrt_llm gpt_model_path"]
    assert "'/elsewhere/llama' is not here" in problem.message
    assert "--engine-dir" in problem.hint


@pytest.mark.parametrize("content", ["", "version https://git-lfs.github.com/spec/v1", '{"builder_config": {}}', "[]"])
def test_engine_config_that_is_none_is_reported(tmp_path: Path, content: str) -> None:
    """An empty file, a pointer or another layout is a problem, not a crash."""
    copy = edited(tmp_path, "0.85", "0.8")
    (copy / "tensorrt_llm" / "1" / "engine" / "config.json").write_text(content)
    migration = migrate(copy, tmp_path / "new")
    assert any("is no config.json of trtllm-build" in problem.message for problem in migration.problems)


def test_engine_directory_that_is_none_is_refused(tmp_path: Path) -> None:
    """A wrong --engine-dir is an error, since the user named it."""
    with pytest.raises(ConfigError, match=r"has no config\.json, so it is no engine"):
        migrate(OLD / "ours", tmp_path / "new", engine_dir=tmp_path)
    assert not (tmp_path / "new").exists()


def test_repository_without_an_engine_model_is_refused(tmp_path: Path) -> None:
    """Helper models alone are nothing to migrate; what could not be parsed is named."""
    copy = edited(tmp_path, 'name: "tensorrt_llm"', 'name: tensorrt_llm"')
    with pytest.raises(ConfigError, match="no model with a TensorRT-LLM engine") as caught:
        migrate(copy, tmp_path / "new")
    assert any("tensorrt_llm/config.pbtxt" in problem.where for problem in caught.value.problems)


def test_directory_without_models_is_refused(tmp_path: Path) -> None:
    """A directory that is no repository is said to be none."""
    with pytest.raises(ConfigError, match="holds no model"):
        migrate(tmp_path, tmp_path / "new")


def test_migrated_repository_is_not_migrated_again(ours: Migration, tmp_path: Path) -> None:
    """The new lane's repository is recognised."""
    with pytest.raises(ConfigError, match="of the LLM API already"):
        migrate(ours.repository, tmp_path / "again")


def test_openvino_repository_is_refused(tmp_path: Path) -> None:
    """A repository of the CPU target has no engine to migrate."""
    copy = edited(tmp_path, 'backend: "tensorrtllm"', 'backend: "python"')
    (copy / "tensorrt_llm" / "1" / "engine" / "openvino_model.xml").touch()
    with pytest.raises(ConfigError, match="serves an OpenVINO model"):
        migrate(copy, tmp_path / "new")


def test_values_that_make_no_config_leave_nothing_behind(tmp_path: Path) -> None:
    """A name that the config does not take is refused, and no file was written."""
    with pytest.raises(ConfigError, match="make no valid config") as caught:
        migrate(OLD / "ours", tmp_path / "new", name="Llama!")
    assert [problem.where for problem in caught.value.problems] == ["name"]
    assert list(tmp_path.iterdir()) == []


def test_second_run_replaces_the_first_with_equal_bytes(ours: Migration) -> None:
    """The same repository gives the same files."""
    before = {path: path.read_bytes() for path in ours.out.rglob("*") if path.is_file()}
    again = migrate(OLD / "ours", ours.out)
    assert {path: path.read_bytes() for path in again.out.rglob("*") if path.is_file()} == before
    assert len(before) == 5


def test_directory_of_somebody_else_is_not_replaced(tmp_path: Path) -> None:
    """What trtpipe did not write stays, and no staging directory is left."""
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "notes.txt").write_text("mine")
    with pytest.raises(HostError, match="was not written by trtpipe"):
        migrate(OLD / "ours", tmp_path / "new")
    assert [path.name for path in tmp_path.rglob("*")] == ["new", "notes.txt"]


def test_old_repository_is_only_read(ours: Migration) -> None:
    """Nothing was written beside what was migrated."""
    assert ours.lost == ()
    assert not (OLD / "ours" / REPOSITORY).exists()
    assert json.loads((OLD / "ours" / "tensorrt_llm" / "1" / "engine.json").read_text())["target"] == "tensorrt_llm"
