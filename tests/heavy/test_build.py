"""The whole build as a user runs it, on a tiny random Llama: what is reused, what is redone, what is refused."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.checkpoints import tiny_llama
from tests.support.commands import argv, environment, trtpipe, write_config

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny checkpoint, a config and one finished build."""
    directory = tmp_path_factory.mktemp("project")
    config = write_config(directory, tiny_llama(directory / "checkpoint"))
    trtpipe("build", config, cwd=directory)
    return directory


def _hits(project: Path, *arguments: str) -> dict[str, bool]:
    document = trtpipe("build", "tiny.yaml", "--json", *arguments, cwd=project).document
    return {name: stage["hit"] for name, stage in document["stages"].items()}


def test_build_writes_a_complete_repository(project: Path) -> None:
    """Every model of the public contract is there, with a manifest and provenance."""
    repository = project / "build" / "tiny"
    models = {path.parent.name for path in repository.glob("*/config.pbtxt")}
    assert models == {"preprocessing", "tensorrt_llm", "postprocessing", "ensemble", "tensorrt_llm_bls"}
    manifest = json.loads((repository / "manifest.json").read_text())
    assert {"tensorrt_llm/config.pbtxt", "requirements.txt"} <= set(manifest["files"])
    assert "checkpoint" not in (repository / "tensorrt_llm" / "config.pbtxt").read_text()
    assert not [path for path in repository.rglob("*") if path.is_symlink()]


def test_a_rebuild_that_changes_nothing_reuses_every_stage(project: Path) -> None:
    """All stages hit."""
    assert set(_hits(project).values()) == {True}


def test_a_change_of_serving_only_emits_again(project: Path) -> None:
    """Everything before is reused."""
    hits = _hits(project, "--set", "serving.max_queue_size=7", "--output", "build/other")
    assert hits == {"calibrate": True, "quantize": True, "verify": True, "compile": True, "emit": False}


def test_a_change_of_the_engine_does_not_requantize(project: Path) -> None:
    """Compile starts from the checkpoint of before."""
    hits = _hits(project, "--set", "engine.max_batch_size=2", "--until", "compile")
    assert hits == {"calibrate": True, "quantize": True, "verify": True, "compile": False}


def test_another_target_does_not_read_the_text_again(project: Path) -> None:
    """What calibration finds depends neither on the layout nor on the 16-bit type."""
    target = ("--set", "engine.target=tensorrt_llm", "--set", "engine.gpu=H100", "--set", "engine.dtype=float16")
    hits = _hits(project, *target, "--set", "engine.max_seq_len=128", "--until", "quantize")
    assert hits == {"calibrate": True, "quantize": False}


def test_an_unused_knob_does_not_requantize(project: Path) -> None:
    """SmoothQuant's alpha means nothing to int4_awq."""
    hits = _hits(project, "--set", "quantization.smoothquant_alpha=0.7", "--until", "quantize")
    assert hits == {"calibrate": True, "quantize": True}


def test_plan_says_why_a_near_miss_missed(project: Path) -> None:
    """The field that differs is named, old and new."""
    document = trtpipe("plan", "tiny.yaml", "--json", "--set", "calibration.seed=5", cwd=project).document
    calibrate, quantize = document["stages"][:2]
    assert calibrate["status"] == "miss"
    assert "calibration.seed" in calibrate["reason"]
    assert quantize["status"] == "unknown"


def test_an_interrupted_build_leaves_nothing_and_says_so(project: Path, tmp_path: Path) -> None:
    """SIGTERM ends with 130, no work directory stays, and the next run builds."""
    config = write_config(tmp_path, project / "checkpoint")
    with subprocess.Popen(
        argv("build", config, "--until", "quantize"), cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True
    ) as process:
        work = tmp_path / ".trtpipe" / "work"
        deadline = time.monotonic() + 60
        while not (work.is_dir() and any(work.iterdir())) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "interrupted" in stderr
    assert not [path for path in work.iterdir() if path.is_dir()]
    again = trtpipe("quantize", config, "--json", cwd=tmp_path).document
    assert not again["stages"]["quantize"]["hit"]


def test_kill_9_during_a_build_is_repaired_by_the_next_one(project: Path, tmp_path: Path) -> None:
    """Whatever moment the kill hits, a rerun succeeds and the store verifies."""
    config = write_config(tmp_path, project / "checkpoint")
    for delay_s in (1.5, 4.0, 6.5):
        with subprocess.Popen(
            argv("build", config), cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            time.sleep(delay_s)
            process.kill()
    trtpipe("build", config, cwd=tmp_path)
    trtpipe("cache", "verify", cwd=tmp_path)
    assert (tmp_path / "build" / "tiny" / "manifest.json").is_file()


def test_two_builds_of_one_config_share_the_work(project: Path, tmp_path: Path) -> None:
    """Started together, each stage runs in exactly one of them."""
    config = write_config(tmp_path, project / "checkpoint")
    processes = [
        subprocess.Popen(
            argv("build", config, "--json", "--until", "verify"),
            cwd=tmp_path,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=200) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    stages = [json.loads(stdout)["stages"] for stdout, _ in outputs]
    for name in ("calibrate", "quantize", "verify"):
        assert sorted(document[name]["hit"] for document in stages) == [False, True]
        assert stages[0][name]["digest"] == stages[1][name]["digest"]


def test_the_checkpoint_is_the_same_bytes_in_another_process_and_place(project: Path, tmp_path: Path) -> None:
    """Quantizing again from a copy elsewhere gives the digest of before."""
    shutil.copytree(project / "checkpoint", tmp_path / "elsewhere")
    config = write_config(tmp_path, tmp_path / "elsewhere")
    again = trtpipe("quantize", config, "--json", cwd=tmp_path).document["stages"]["quantize"]["digest"]
    before = trtpipe("quantize", "tiny.yaml", "--json", cwd=project).document["stages"]["quantize"]["digest"]
    assert again == before
