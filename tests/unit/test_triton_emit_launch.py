"""How servers are started: command lines as upstream's launcher makes them (scripts/launch_triton_server.py)."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.deployment import ServingConfig
from pipeline.triton.launch import launch_argv
from pipeline.triton.model_config import parse, render
from pipeline.triton.repository import emit
from tests.support.gpu_engine import llama_8b_fp8, llmapi_model

pytestmark = pytest.mark.fast

SERVER = "/opt/tritonserver/bin/tritonserver"
COMMON = (
    "--http-port=8000",
    "--grpc-port=8001",
    "--metrics-port=8002",
    "--disable-auto-complete-config",
)


def repository(tmp_path: Path, serving: dict[str, Any] | None = None, **engine: Any) -> Path:
    """An emitted repository."""
    out = tmp_path / "out"
    emit(llama_8b_fp8(tmp_path / "engine", **engine), ServingConfig.model_validate(serving or {}), name="x", out=out)
    return out


def test_one_rank_is_a_plain_server(tmp_path: Path) -> None:
    """No MPI for one GPU."""
    assert launch_argv(repository(tmp_path)) == (
        SERVER,
        "--model-repository=/models",
        *COMMON,
        "--backend-config=python,shm-region-prefix-name=prefix0_",
    )


def test_leader_mode_starts_one_process_per_rank(tmp_path: Path) -> None:
    """Rank 0 serves; rank 1 loads the engine's model only."""
    assert launch_argv(repository(tmp_path, world_size=2)) == (
        "mpirun",
        "--allow-run-as-root",
        "-n",
        "1",
        SERVER,
        "--model-repository=/models",
        *COMMON,
        "--backend-config=python,shm-region-prefix-name=prefix0_",
        ":",
        "-n",
        "1",
        SERVER,
        "--model-repository=/models",
        "--model-control-mode=explicit",
        "--load-model=tensorrt_llm",
        *COMMON,
        "--backend-config=python,shm-region-prefix-name=prefix1_",
    )


def test_orchestrator_spawns_and_leaves_gpu_memory_to_the_ranks(tmp_path: Path) -> None:
    """One process, environment for the backend, no memory pools on the GPUs."""
    assert launch_argv(repository(tmp_path, {"launch_mode": "orchestrator"}, world_size=2)) == (
        "env",
        "TRTLLM_ORCHESTRATOR=1",
        "TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES=1",
        "mpirun",
        "--allow-run-as-root",
        "-n",
        "1",
        SERVER,
        "--model-repository=/models",
        "--pinned-memory-pool-byte-size=0",
        "--enable-peer-access=false",
        "--cuda-memory-pool-byte-size=0:0",
        "--cuda-memory-pool-byte-size=1:0",
        *COMMON,
        "--backend-config=python,shm-region-prefix-name=prefix0_",
    )


def test_orchestrator_without_spawning_starts_one_more_than_the_ranks(tmp_path: Path) -> None:
    """1 + 2 processes, of which the first orchestrates."""
    argv = launch_argv(repository(tmp_path, {"launch_mode": "orchestrator_no_spawn"}, world_size=2))
    assert argv[:3] == ("env", "TRTLLM_ORCHESTRATOR=1", "TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES=0")
    assert argv.count(SERVER) == 3
    assert argv.count("--load-model=tensorrt_llm") == 2


def test_several_engines_are_orchestrated(tmp_path: Path) -> None:
    """Leader mode cannot hold two; the ranks of a model without deployment.json come from its engine."""
    out = repository(tmp_path)
    shutil.copytree(out / "tensorrt_llm", out / "draft")
    config = parse((out / "draft" / "config.pbtxt").read_text(), "draft")
    config.name = "draft"
    config.parameters["gpt_model_path"].string_value = "/models/draft/1/engine"
    config.parameters["gpu_device_ids"].string_value = "3"
    (out / "draft" / "config.pbtxt").write_text(render(config))
    argv = launch_argv(out)
    assert "TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES=1" in argv
    assert argv[-2:] == ("--disable-auto-complete-config", "--backend-config=python,shm-region-prefix-name=prefix0_")
    assert "--cuda-memory-pool-byte-size=3:0" in argv


def test_hand_made_repository_starts_where_it_lies(tmp_path: Path) -> None:
    """Without deployment.json the place is the repository's own, and the ranks are the engine's."""
    out = repository(tmp_path, world_size=2)
    (out / "deployment.json").unlink()
    argv = launch_argv(out, mount="/models")
    assert argv.count(SERVER) == 2


def test_llm_api_starts_its_ranks_itself(tmp_path: Path) -> None:
    """The server is started without MPI."""
    emit(llmapi_model(tmp_path / "engine"), ServingConfig(), name="x", out=tmp_path / "out")
    assert launch_argv(tmp_path / "out")[0] == SERVER


def test_known_issue_of_1_0_gets_its_variable(tmp_path: Path) -> None:
    """Llama with pipeline ranks and FP8 weights on TensorRT-LLM 1.0."""
    out = repository(tmp_path, world_size=2, pp=2, toolchain={"tensorrt_llm": "1.0.0", "image": "i"})
    assert launch_argv(out)[:2] == ("env", "TRTLLM_LLAMA_EAGER_FUSION_DISABLED=1")


def run(script: Path) -> subprocess.CompletedProcess[str]:
    """Run launch.sh."""
    return subprocess.run(["/bin/sh", str(script)], capture_output=True, text=True, check=False, timeout=30)


def test_launch_script_holds_the_command_line(tmp_path: Path) -> None:
    """The words of launch.sh behind exec are launch_argv."""
    import shlex

    out = repository(tmp_path, {"launch_mode": "orchestrator"}, world_size=2)
    text = (out / "launch.sh").read_text()
    command = text[text.rindex("\nexec ") + len("\nexec ") :].replace("\\\n", "")
    assert tuple(shlex.split(command)) == launch_argv(out)


def test_launch_script_refuses_another_place(tmp_path: Path) -> None:
    """Paths in config.pbtxt would not exist; the message says where to mount."""
    result = run(repository(tmp_path) / "launch.sh")
    assert result.returncode == 1
    assert "paths in config.pbtxt begin with /models" in result.stderr


def test_launch_script_asks_for_the_engine_to_be_built(tmp_path: Path) -> None:
    """A deferred repository names the script to run first."""
    out = tmp_path / "out"
    engine = llama_8b_fp8(tmp_path / "engine", state="deferred")
    emit(engine, ServingConfig(), name="x", out=out, mount=str(out))
    result = run(out / "launch.sh")
    assert result.returncode == 1
    assert "rank0.engine is missing: run sh tensorrt_llm/1/build/build.sh first" in result.stderr


def test_deferred_engine_appears_where_the_configuration_looks(tmp_path: Path) -> None:
    """build.sh writes `engine` beside its own directory, which is gpt_model_path."""
    out = repository(tmp_path, state="deferred")
    config = parse((out / "tensorrt_llm" / "config.pbtxt").read_text(), "core")
    version = out / "tensorrt_llm" / "1"
    assert (version / "build" / "build.sh").is_file()
    assert (version / "checkpoint" / "config.json").is_file()
    path = config.parameters["gpt_model_path"].string_value
    assert path.removeprefix("/models/") == (version / "engine").relative_to(out).as_posix()


def test_repository_of_a_gpu_target_says_that_it_was_not_run(tmp_path: Path) -> None:
    """README and launcher are plain about it."""
    out = repository(tmp_path)
    assert "nothing of it was run" in (out / "README.md").read_text()
    assert "Not run where it was written" in (out / "launch.sh").read_text()


def test_deployment_names_image_and_mount(tmp_path: Path) -> None:
    """What a deployment tool needs to know."""
    deployment = json.loads((repository(tmp_path, world_size=2) / "deployment.json").read_text())
    assert deployment["mount"] == "/models"
    assert deployment["world_size"] == 2
    assert deployment["image"].endswith("trtllm-python-py3")


def test_emission_is_deterministic(tmp_path: Path) -> None:
    """Emitting twice writes the same bytes."""
    engine = llama_8b_fp8(tmp_path / "engine")
    serving = ServingConfig.model_validate({"warmup": True, "tensorrt_llm": {"guided_decoding_backend": "xgrammar"}})
    trees = []
    for name in ("a", "b"):
        emit(engine, serving, name="x", out=tmp_path / name)
        files = sorted(path for path in (tmp_path / name).rglob("*") if path.is_file())
        trees.append([(path.relative_to(tmp_path / name), path.read_bytes()) for path in files])
    assert trees[0] == trees[1]
