"""The compile step for the GPU node: a script that builds once, a compose service and a Kubernetes Job.

The script really runs here, with a stand-in for trtllm-build; no engine comes out of it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from pipeline.targets.tensorrt_llm import deferred
from pipeline.targets.tensorrt_llm.engine_files import describe
from tests.support.trtllm_building import IMAGE, NO_GPU, checkpoint, compile_, engine, host, standin_on_path

pytestmark = pytest.mark.fast


@pytest.fixture(autouse=True)
def count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the stand-in on PATH as trtllm-build; return the file with one line per run."""
    monkeypatch.setenv("PATH", standin_on_path(tmp_path / "bin"))
    monkeypatch.setenv("STANDIN_COUNT", str(tmp_path / "count"))
    return tmp_path / "count"


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """A deferred engine, as it arrives on the GPU node."""
    out, _ = compile_(tmp_path, checkpoint(tmp_path, "FP8", "FP8"), engine("deferred"), machine=NO_GPU)
    return out


def script(node: Path, **environment: str) -> subprocess.Popen[str]:
    """Start build.sh with the stand-in on PATH."""
    return subprocess.Popen(
        ["/bin/sh", str(node / "build/build.sh")],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait and return exit code and output."""
    output, _ = process.communicate(timeout=60)
    return process.returncode, output


def test_a_deferred_engine_has_everything_for_the_node(node: Path) -> None:
    """Checkpoint, script, compose service, Job; engine.json says that nothing was built."""
    facts = describe(node)
    assert (facts["state"], facts["gpu"]) == ("deferred", {"name": "H100", "sm": 90})
    assert facts["toolchain"]["image"] == IMAGE
    assert sorted(path.name for path in (node / "checkpoint").iterdir()) == ["config.json", "rank0.safetensors"]
    assert sorted(path.name for path in (node / "build").iterdir()) == [
        "build.sh",
        "compose.yaml",
        "job.yaml",
        "manifest.json",
    ]
    assert not (node / "engine").exists()


def test_the_script_builds_once_and_then_does_nothing(node: Path, count: Path) -> None:
    """The manifest of the key is the mark; the second run says so."""
    code, output = finish(script(node))
    assert (code, "engine is complete\n" in output) == (0, True), output
    assert json.loads((node / "engine/manifest.json").read_text())["key"] == describe(node)["key"]
    assert (node / "engine/rank0.engine").is_file()
    code, output = finish(script(node))
    assert (code, "nothing to do" in output) == (0, True)
    assert len(count.read_text().splitlines()) == 1


def test_two_runs_at_once_build_once(node: Path, count: Path) -> None:
    """The lock makes the second wait, and it finds the engine complete."""
    both = [script(node, STANDIN_SECONDS="0.5"), script(node, STANDIN_SECONDS="0.5")]
    results = [finish(process) for process in both]
    assert [code for code, _ in results] == [0, 0]
    assert len(count.read_text().splitlines()) == 1
    assert sum("nothing to do" in output for _, output in results) == 1


def test_a_script_that_fails_leaves_the_old_engine_and_no_half_one(node: Path) -> None:
    """Staging is removed; what was there before is not touched."""
    (node / "engine").mkdir()
    (node / "engine/manifest.json").write_text('{"key": "sha256:older"}')
    code, output = finish(script(node, STANDIN_FAULT="killed"))
    assert code == 1
    assert "trtllm-build exited 137" in output
    assert not (node / "engine.building").exists()
    assert [path.name for path in (node / "engine").iterdir()] == ["manifest.json"]
    assert finish(script(node))[0] == 0  # the next run replaces it
    assert json.loads((node / "engine/manifest.json").read_text())["key"] == describe(node)["key"]


def test_what_a_power_cut_left_is_cleared_away(node: Path) -> None:
    """A half engine of an earlier run does not become part of the new one."""
    (node / "engine.building").mkdir()
    (node / "engine.building/rank7.engine").write_bytes(b"half")
    assert finish(script(node))[0] == 0
    assert not (node / "engine/rank7.engine").exists()


def test_the_script_refuses_another_gpu(node: Path, tmp_path: Path, count: Path) -> None:
    """SM 80 cannot run an engine for SM 90; nothing is built."""
    smi = tmp_path / "bin/nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'NVIDIA A100-SXM4-80GB, 8.0, 580.65.06'\n")
    smi.chmod(0o755)
    code, output = finish(script(node))
    assert code == 1
    assert "this is NVIDIA A100-SXM4-80GB (compute capability 8.0); the engine is for H100 (9.0)" in output
    assert not count.exists()


def test_the_script_records_gpu_and_driver_and_keeps_a_timing_cache(node: Path, tmp_path: Path) -> None:
    """The side manifest of a built engine, made on the node."""
    smi = tmp_path / "bin/nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 9.0, 590.44.01'\n")
    smi.chmod(0o755)
    code, output = finish(script(node))
    assert code == 0, output
    manifest = json.loads((node / "engine/manifest.json").read_text())
    assert (manifest["gpu"], manifest["compute_capability"], manifest["driver"], manifest["image"]) == (
        "NVIDIA H100 80GB HBM3",
        "9.0",
        "590.44.01",
        IMAGE,
    )
    assert [path.name for path in (node / "timing").iterdir()] == ["26.05-NVIDIA-H100-80GB-HBM3.cache"]


def test_the_script_refuses_an_engine_of_another_version(node: Path) -> None:
    """The wrong image on the node is noticed."""
    code, output = finish(script(node, STANDIN_VERSION="1.0.0"))
    assert (code, "TensorRT-LLM 1.0.0 built this, and the repository is for 1.2.1" in output) == (1, True)
    assert not (node / "engine").exists()


def test_the_script_is_clean_for_shellcheck(node: Path) -> None:
    """POSIX sh without findings."""
    program = shutil.which("shellcheck", path="/usr/local/bin:/usr/bin")
    if program is None:
        pytest.skip("shellcheck is not installed")
    answer = subprocess.run(
        [program, "--shell=sh", node / "build/build.sh"], capture_output=True, text=True, check=False
    )
    assert (answer.returncode, answer.stdout) == (0, "")


def test_compose_and_job_use_the_pinned_image_and_ask_for_the_gpu(node: Path) -> None:
    """Both files are valid YAML with what the build needs."""
    service = yaml.safe_load((node / "build/compose.yaml").read_text())["services"]["engine-build"]
    assert service["image"] == IMAGE
    assert service["ulimits"] == {"memlock": -1, "stack": 67108864}
    assert service["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]
    job = yaml.safe_load((node / "build/job.yaml").read_text())
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert (job["kind"], container["image"]) == ("Job", IMAGE)
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 1}
    assert container["command"][1] == f"{deferred.MOUNT}/build/build.sh"


def test_a_deferred_artifact_is_the_same_bytes_on_every_machine(tmp_path: Path) -> None:
    """No path, time or host of the machine is in it."""
    quantized = checkpoint(tmp_path, "FP8", "FP8")
    texts = []
    for machine in (NO_GPU, host()):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        out, _ = compile_(tmp_path, quantized, engine("deferred"), machine=machine)
        texts.append({path.name: path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()})
    assert texts[0] == texts[1]
    assert str(tmp_path).encode() not in b"".join(texts[0].values())


def test_the_key_follows_checkpoint_and_flags_and_not_how_the_build_runs(tmp_path: Path) -> None:
    """More workers or a louder log are the same engine; another batch size is not."""
    keys = []
    for config in (
        engine("deferred"),
        engine("deferred", build={"workers": 2, "log_level": "verbose"}),
        engine("deferred", max_batch_size=7),
    ):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        out, _ = compile_(tmp_path, checkpoint(tmp_path), config)
        keys.append(json.loads((out / "engine.json").read_text())["key"])
    assert keys[0] == keys[1]
    assert keys[0] != keys[2]
