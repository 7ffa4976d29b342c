"""Building on this host with a stand-in for trtllm-build, and in a container (the command only).

No engine is built here: the stand-in checks flags and checkpoint like the real tool and writes its config.json.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from pipeline.config.deployment import EngineConfig
from pipeline.errors import HostError, IntegrityError, ToolError
from pipeline.host.probe import HostProfile
from pipeline.targets.tensorrt_llm.engine_files import describe
from pipeline.targets.tensorrt_llm.log import BuildLog
from pipeline.targets.tensorrt_llm.place import Place, choose_place, container_argv
from pipeline.targets.tensorrt_llm.toolchains import find
from tests.support.trtllm_building import IMAGE, NO_GPU, checkpoint, compile_, engine, host, standin_on_path

pytestmark = pytest.mark.fast


@pytest.fixture(autouse=True)
def count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the stand-in on PATH as trtllm-build; return the file with one line per run."""
    monkeypatch.setenv("PATH", standin_on_path(tmp_path / "bin"))
    monkeypatch.setenv("STANDIN_COUNT", str(tmp_path / "count"))
    return tmp_path / "count"


# --- on this host -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algo", "kv"),
    [
        (None, None),
        ("FP8", "FP8"),
        ("W8A8_SQ_PER_CHANNEL", None),
        ("W4A16_AWQ", None),
        ("W4A8_AWQ", "FP8"),
        ("W8A16", None),
    ],
)
def test_an_engine_is_built_read_back_and_described(tmp_path: Path, algo: str | None, kv: str | None) -> None:
    """Each format: nothing is reset, and engine.json holds what the engine says."""
    quantized = checkpoint(tmp_path, algo, kv, group_size=128)
    out, notes = compile_(tmp_path, quantized, engine(max_batch_size=8, max_num_tokens=512, max_seq_len=1024))
    facts = describe(out)
    assert facts["state"] == "built"
    assert facts["resets"] == []
    expected = {"max_batch_size": 8, "max_num_tokens": 512, "max_seq_len": 1024, "max_input_len": 1024}
    assert facts["limits"] == {**expected, "max_beam_width": 1, "vocab_size": 512}
    assert facts["build_config"] == json.loads((out / "engine/config.json").read_text())["build_config"]
    assert facts["quantization"]["quant_algo"] == algo
    assert facts["gpu"] == {"name": "NVIDIA H100 80GB HBM3", "sm": 90, "driver": "590.44.01"}
    assert facts["eos_token_ids"] == [2]
    assert (out / "tokenizer/tokenizer.json").is_file()
    assert any(note.startswith("host build: ") for note in notes)


def test_the_side_manifest_records_what_config_json_does_not(tmp_path: Path) -> None:
    """6.4: SM, GPU name and driver, with the key."""
    out, _ = compile_(tmp_path, checkpoint(tmp_path), engine())
    manifest = json.loads((out / "engine/manifest.json").read_text())
    assert manifest == {
        "key": json.loads((out / "engine.json").read_text())["key"],
        "gpu": "NVIDIA H100 80GB HBM3",
        "sm": 90,
        "driver": "590.44.01",
        "image": "",
        "tensorrt_llm": "1.2.1",
    }


def test_two_ranks_of_each_kind_give_four_engines(tmp_path: Path) -> None:
    """World size is tp x pp."""
    quantized = checkpoint(tmp_path, "FP8", "FP8", tp=2, pp=2)
    config = engine(tensor_parallel_size=2, pipeline_parallel_size=2)
    out, _ = compile_(tmp_path, quantized, config)
    assert describe(out)["world_size"] == 4
    assert sorted(path.name for path in (out / "engine").glob("*.engine")) == [
        f"rank{rank}.engine" for rank in range(4)
    ]


def test_options_that_the_build_resets_are_told_with_the_rule(tmp_path: Path) -> None:
    """2.4: what is asked and not kept is in engine.json and in the notes."""
    switches = {"reduce_fusion": "enable", "user_buffer": "enable", "use_paged_context_fmha": "enable"}
    config = engine(build=switches, max_batch_size=2, max_num_tokens=8192, max_seq_len=256)
    out, notes = compile_(tmp_path, checkpoint(tmp_path, "W4A16_AWQ", "INT8"), config)
    resets = {reset["option"]: reset for reset in json.loads((out / "engine.json").read_text())["resets"]}
    assert set(resets) == {"reduce_fusion", "user_buffer", "use_paged_context_fmha", "max_num_tokens"}
    assert resets["reduce_fusion"]["why"] == "tensor_parallel_size is 1."
    assert resets["use_paged_context_fmha"]["why"] == "the KV cache is INT8."
    assert (resets["max_num_tokens"]["asked"], resets["max_num_tokens"]["becomes"]) == (8192, 512)
    assert any("reduce_fusion was asked to be True; the build made it False: tensor" in note for note in notes)


@pytest.mark.parametrize("kv", [None, "FP8", "INT8"])
@pytest.mark.parametrize(
    ("algo", "sm"),
    [
        (algo, sm)
        for algo in (None, "FP8", "W4A16_AWQ", "W4A8_AWQ")
        for sm in (80, 89, 90)
        if sm > 80 or algo not in ("FP8", "W4A8_AWQ")  # 5.1: these stop before config.json is written
    ],
)
def test_the_plan_expects_what_the_stand_in_makes_of_contradicting_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algo: str | None, kv: str | None, sm: int
) -> None:
    """Two separately written readings of 2.4 agree on every reset, when everything is switched on."""
    monkeypatch.setenv("STANDIN_SM", str(sm))
    names = ("use_paged_context_fmha", "use_fp8_context_fmha", "reduce_fusion", "user_buffer", "use_fused_mlp")
    gpu = {80: "A100", 89: "L4", 90: "H100"}[sm]
    machine = host({80: "NVIDIA A100-SXM4-80GB", 89: "NVIDIA L4", 90: "NVIDIA H100 PCIe"}[sm], sm)
    draft = {"speculative_decoding_mode": "draft_tokens_external", "max_draft_len": 7}
    config = engine(gpu=gpu, max_num_tokens=128, build={**dict.fromkeys(names, "enable"), **draft})
    quantized = checkpoint(tmp_path, algo, kv, group_size=128)
    compile_(tmp_path, quantized, config, machine=machine)
    built = json.loads((tmp_path / "out/engine.json").read_text())
    shutil.rmtree(tmp_path / "out")
    planned = config.model_copy(update={"build": config.build.model_copy(update={"where": "deferred"})})
    compile_(tmp_path, quantized, planned, machine=machine)
    expected = json.loads((tmp_path / "out/engine.json").read_text())
    assert sorted(built["resets"], key=str) == sorted(expected["resets"], key=str)
    assert built["limits"] == expected["limits"]
    assert "no rule" not in str(built["resets"])


def test_a_failed_build_shows_log_tail_cause_and_script_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cause comes from the last lines of the log."""
    monkeypatch.setenv("STANDIN_FAULT", "oom")
    seen: list[str] = []

    def explain(lines: Sequence[str]) -> str:
        seen.extend(lines)
        return "The GPU is too small."

    with pytest.raises(ToolError) as caught:
        compile_(tmp_path, checkpoint(tmp_path), engine(), explain=explain)
    text = str(caught.value)
    assert "Engine building failed, please check the error log." in text
    assert "The GPU is too small. Run it alone: " in text
    assert caught.value.log_path is not None
    assert "out of memory" in caught.value.log_path.read_text()
    assert caught.value.log_path.with_suffix(".reproduce.sh").is_file()
    assert any("out of memory" in line for line in seen)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["build"]


def test_a_build_that_is_killed_leaves_no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank files that were written before are gone."""
    monkeypatch.setenv("STANDIN_FAULT", "killed")
    with pytest.raises(ToolError, match="was killed by SIGKILL"):
        compile_(tmp_path, checkpoint(tmp_path), engine())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["build"]


def test_a_missing_rank_file_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 0 is not believed."""
    monkeypatch.setenv("STANDIN_FAULT", "norank")
    with pytest.raises(IntegrityError, match=r"did not write rank0\.engine"):
        compile_(tmp_path, checkpoint(tmp_path), engine())
    assert not (tmp_path / "out/engine").exists()


def test_an_engine_of_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """10.1: an engine runs on the version that built it."""
    monkeypatch.setenv("STANDIN_VERSION", "1.1.0")
    with pytest.raises(IntegrityError, match=r"TensorRT-LLM 1\.1\.0 built the engine, and the config pins 1\.2\.1"):
        compile_(tmp_path, checkpoint(tmp_path), engine())


def test_missing_scales_stop_the_loader_and_the_tensor_is_named(tmp_path: Path) -> None:
    """10.2 row 10."""
    quantized = checkpoint(tmp_path, "FP8", without="mlp.fc.activation_scaling_factor")
    with pytest.raises(ToolError, match="Required but not provided tensors"):
        compile_(tmp_path, quantized, engine())


def test_a_checkpoint_of_other_ranks_is_refused_before_the_build(tmp_path: Path, count: Path) -> None:
    """Mapping and config have to agree, and every rank has a file."""
    quantized = checkpoint(tmp_path, tp=2)
    with pytest.raises(IntegrityError) as caught:
        compile_(tmp_path, quantized, engine())
    assert "mapping.tp_size: is 2 in the checkpoint and 1 in the config." in str(caught.value)
    (tmp_path / "q/trtllm/rank1.safetensors").unlink()
    with pytest.raises(IntegrityError, match=r"rank1\.safetensors: is missing"):
        compile_(tmp_path, quantized, engine(tensor_parallel_size=2))
    assert not count.exists()


def test_a_timing_cache_is_kept_per_image_and_gpu_and_used_again(tmp_path: Path, count: Path) -> None:
    """The second build starts from what the first one wrote; another GPU does not."""
    caches = tmp_path / "caches"
    quantized = checkpoint(tmp_path)
    for machine in (host(), host(), host("NVIDIA H100 PCIe")):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        compile_(tmp_path, quantized, engine(), machine=machine, timing_caches=caches)
    assert sorted(path.name for path in caches.iterdir()) == [
        "26.05-NVIDIA-H100-80GB-HBM3-590.44.01.cache",
        "26.05-NVIDIA-H100-PCIe-590.44.01.cache",
    ]
    assert ["--input_timing_cache" in line for line in count.read_text().splitlines()] == [False, True, False]


def test_the_log_of_a_build_counts_three_phases_per_rank_and_shows_a_warning_once() -> None:
    """Lines as trtllm-build prints them (NVIDIA/TensorRT-LLM examples/gpt/README.md), two ranks."""
    units: list[int] = []
    notes: list[str] = []
    log = BuildLog(units.append, notes.append)
    log.take("[TensorRT-LLM] TensorRT-LLM version: 1.2.1")
    for rank in (0, 1):
        for line in (
            f"[TRT-LLM] [W] Provided but not required tensors: {{'transformer.layers.{rank}.x'}}",
            "[TRT-LLM] [I] Total time of constructing network from module object 2.1 seconds",
            "[TRT-LLM] [I] Build TensorRT engine Unnamed Network 0",
            "[TRT] [I] Engine generation completed in 35.9738 seconds.",
            "[TRT-LLM] [I] Total time of building Unnamed Network 0: 00:00:36",
            f"[TRT-LLM] [I] Serializing engine to engine/rank{rank}.engine...",
            "[TRT-LLM] [I] Engine serialized. Total time: 00:00:02",
        ):
            log.take(f"[03/12/2024-10:21:08] {line}")
    assert units == [1] * 6
    assert log.version == "1.2.1"
    assert [note for note in notes if "warns" in note] == [
        "trtllm-build warns: Provided but not required tensors: {'transformer.layers.0.x'}"
    ]
    assert "rank 1: engine built, writing it" in notes


# --- where to build -----------------------------------------------------------------------------------


def where(machine: HostProfile, *programs: str, config: EngineConfig | None = None) -> Place:
    """The place that is chosen when these programs exist."""
    found = set(programs)
    return choose_place(
        config or engine("auto"), machine, find("1.2.1"), which=lambda name: f"/x/{name}" if name in found else None
    )


def test_auto_takes_the_host_then_the_container_then_the_node() -> None:
    """The first that this machine can do, with the reason."""
    assert where(host(), "trtllm-build", "docker").kind == "host"
    assert where(host(), "podman").program == "podman"
    nothing = where(host())
    assert nothing.kind == "deferred"
    assert (
        "trtllm-build is not on PATH; neither docker nor podman is on PATH. The engine was not built and not run"
        in (nothing.why)
    )


def test_auto_defers_on_a_machine_without_the_gpu_even_with_docker() -> None:
    """An engine is built on the GPU that serves it."""
    assert "no GPU is visible here" in where(NO_GPU, "docker", "trtllm-build").why
    assert where(host("NVIDIA A100-SXM4-80GB", 80), "docker").kind == "deferred"


def test_auto_passes_over_an_installed_tensorrt_llm_of_another_version() -> None:
    """The container has the pinned one."""
    machine = dataclasses.replace(host(), versions={"tensorrt-llm": "1.1.0"})
    assert where(machine, "trtllm-build", "docker").kind == "container"
    with pytest.raises(HostError, match=r"TensorRT-LLM 1\.1\.0 is installed, and the config pins 1\.2\.1"):
        where(machine, "trtllm-build", config=engine("host"))


def test_an_old_driver_stops_the_container_and_not_the_host() -> None:
    """R570 does not start a CUDA 13 image."""
    machine = host(driver="570.124.06")
    assert where(machine, "trtllm-build", config=engine("host")).kind == "host"
    with pytest.raises(HostError, match="is older than R580"):
        where(machine, "docker", config=engine("container"))


def test_the_container_command_has_the_limits_that_the_image_needs() -> None:
    """10.4 row 49, no network, our user, read-only checkpoint."""
    place = Place(kind="container", program="docker", why="")
    argv = container_argv(place, IMAGE, ("trtllm-build", "--x"), name="n", mounts={Path("/a"): "/checkpoint:ro"})
    text = " ".join(argv)
    assert text.startswith("docker run --rm --init --name n --gpus all --ipc=host --ulimit memlock=-1 ")
    assert "--ulimit stack=67108864 --shm-size" in text
    assert "--network none" in text
    assert "--env HF_HUB_OFFLINE=1" in text
    assert "--volume /a:/checkpoint:ro" in text
    assert text.endswith(f"{IMAGE} trtllm-build --x")


def test_a_build_in_the_container_runs_the_engine_command_with_mounted_paths(tmp_path: Path) -> None:
    """A docker on PATH that records its arguments and runs the rest here: what it would have been told."""
    recorder = tmp_path / "bin/docker"
    recorder.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/docker\nexit 3\n')
    recorder.chmod(0o755)
    quantized = checkpoint(tmp_path)
    with pytest.raises(ToolError, match="docker exited 3"):
        compile_(tmp_path, quantized, engine("container"))
    removal = (tmp_path / "docker").read_text().splitlines()
    assert removal[:2] == ["rm", "--force"]  # the last call removes the container that was started
    script = (tmp_path / "out/build/trtllm-build.reproduce.sh").read_text()
    assert f"--volume {quantized.path}/trtllm:/checkpoint:ro" in script
    assert f"{IMAGE} trtllm-build --checkpoint_dir /checkpoint --output_dir /engine" in script
