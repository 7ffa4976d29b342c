"""Automatic mixed precision through the real command line, on a tiny random Llama: scored once, chosen often."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tests.support.checkpoints import tiny_llama
from tests.support.commands import trtpipe

pytestmark = pytest.mark.heavy

CONFIG = """\
name: mixed
source: {path: checkpoint}
quantization:
  format: auto
  group_size: 64
  auto: {effective_bits: 6, candidates: [int4_awq, int8_wo], num_score_samples: 4}
calibration: {num_samples: 8, max_seq_len: 64}
verify: {num_tokens: 256}
engine: {target: openvino, max_batch_size: 4, max_num_tokens: 128, max_seq_len: 128}
serving: {default_max_tokens: 16}
"""
BITS = {"int4_awq": 4, "int8_wo": 8, "16bit": 16}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny checkpoint and a config of format auto."""
    directory = tmp_path_factory.mktemp("mixed")
    tiny_llama(directory / "checkpoint")
    (directory / "mixed.yaml").write_text(CONFIG)
    return directory


def test_the_command_shows_scores_choice_reasons_and_curve(project: Path) -> None:
    """As a table, as one document, and as a drawing."""
    said = trtpipe("sensitivity", "mixed.yaml", "--budgets", "4.5,6,8", "--plot", "layers.svg", cwd=project).stdout
    assert said.count("model.layers.") == 8
    assert "the narrowest candidate, for " in said
    assert "and save 0.00781 MiB" in said
    assert ET.parse(project / "layers.svg").getroot().get("aria-label") == "mixed at 6 effective bits"  # noqa: S314
    found = trtpipe("sensitivity", "mixed.yaml", "--budgets", "4,5,6,8,12", "--json", cwd=project)
    assert "score: running" not in found.stderr
    curve = found.document["curve"]
    assert [point["asked_effective_bits"] for point in curve] == [4, 5, 6, 8, 12]
    assert all(point["effective_bits"] <= point["asked_effective_bits"] for point in curve)
    bits, losses = ([point[name] for point in curve] for name in ("effective_bits", "estimated_loss_nats"))
    assert bits == sorted(bits)
    assert losses == sorted(losses, reverse=True)
    choice = found.document["choice"]
    spent = sum(BITS[group["format"]] * group["weights"] for group in choice["groups"])
    assert choice["effective_bits"] == spent / sum(group["weights"] for group in choice["groups"])


def test_a_second_budget_reuses_the_scores(project: Path) -> None:
    """`plan` says so: score is a hit, and only the choice differs."""
    trtpipe("sensitivity", "mixed.yaml", cwd=project)
    planned = trtpipe("plan", "mixed.yaml", "--json", "--set", "quantization.auto.effective_bits=5", cwd=project)
    stages = {stage["name"]: stage["status"] for stage in planned.document["stages"]}
    assert stages["score"] == "hit"
    assert stages["choose"] == "miss"
    assert list(stages)[:2] == ["score", "choose"]


def test_a_config_of_one_format_has_nothing_to_choose(project: Path) -> None:
    """The error says what to write."""
    refused = trtpipe("sensitivity", "mixed.yaml", "--set", "quantization.format=int8_wo", cwd=project, code=3)
    assert "quantization.format is int8_wo, so nothing is chosen" in refused.stderr


def test_a_build_proves_the_mixed_checkpoint_and_the_repository_tells_the_choice(project: Path) -> None:
    """Every stage, with formats as they were chosen, in the checkpoint and in the report."""
    document = trtpipe("build", "mixed.yaml", "--json", cwd=project).document
    recorded = json.loads((project / "build" / "mixed" / "choice.json").read_text())
    chosen = {layer["name"]: layer["format"] for layer in recorded["formats"]}
    checkpoint = Path(document["stages"]["quantize"]["path"])
    assert json.loads((checkpoint / "quantization.json").read_text())["formats"] == chosen
    assert set(chosen.values()) == {"int4_awq", "int8_wo"}
    assert document["choice"]["effective_bits"] == recorded["effective_bits"] <= 6
    assert all(group["reason"] for group in recorded["groups"])
    trtpipe("check", "build/mixed", cwd=project)


def test_a_lower_budget_builds_a_smaller_checkpoint_from_the_same_scores(project: Path) -> None:
    """Scores are a hit; what was chosen and what follows is made."""
    sizes = []
    for bits in ("6", "4.5"):
        budget = ("--set", f"quantization.auto.effective_bits={bits}")
        stages = trtpipe("build", "mixed.yaml", "--until", "verify", "--json", *budget, cwd=project).document["stages"]
        weights = Path(stages["quantize"]["path"]).rglob("hf/*.safetensors")
        sizes.append(sum(path.stat().st_size for path in weights))
        assert stages["score"]["hit"]
    assert not stages["choose"]["hit"]
    assert sizes[1] < sizes[0]
