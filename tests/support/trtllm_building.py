"""Compiling the tiny checkpoint with a stand-in for trtllm-build on PATH."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from pipeline.config.deployment import EngineConfig
from pipeline.core.artifacts import QuantizedCheckpoint
from pipeline.core.progress import Silent
from pipeline.host.probe import GpuProfile, HostProfile
from pipeline.targets.tensorrt_llm import build
from pipeline.targets.tensorrt_llm.run import Explain
from tests.support import trtllm_build_standin as standin
from tests.support.trtllm_checkpoint import llama_config, write_checkpoint

NO_GPU = HostProfile(
    cpu_model="",
    cpu_flags=(),
    usable_cores=1,
    memory_total_bytes=1,
    memory_available_bytes=1,
    gpus=(),
    gpus_note="nvidia-smi is not installed",
    versions={},
)


def host(name: str = "NVIDIA H100 80GB HBM3", sm: int = 90, driver: str = "590.44.01") -> HostProfile:
    """A machine with one GPU."""
    return dataclasses.replace(NO_GPU, gpus=(GpuProfile(name=name, sm=sm, memory_bytes=None, driver=driver),))


def standin_on_path(directory: Path) -> str:
    """Put the stand-in into `directory` as trtllm-build; return the PATH to use."""
    directory.mkdir()
    program = directory / "trtllm-build"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(standin.__file__).resolve()} "$@"\n')
    program.chmod(0o755)
    return f"{directory}:/usr/bin:/bin"


IMAGE = "nvcr.io/nvidia/tritonserver:26.05-trtllm-python-py3"


@dataclasses.dataclass(frozen=True)
class Source:
    """Facts about the tiny model."""

    architecture: str = "LlamaForCausalLM"
    vocab_size: int = 512
    max_position_embeddings: int = 2048
    eos_token_ids: tuple[int, ...] = (2,)
    pad_token_id: int | None = 0


class Notes(Silent):
    """Keeps what is told."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        """Keep one fact."""
        self.texts.append(text)


def checkpoint(
    tmp_path: Path, algo: str | None = None, kv: str | None = None, **options: object
) -> QuantizedCheckpoint:
    """A quantized artifact with trtllm/."""
    without = str(options.pop("without", ""))
    config = llama_config(algo, kv, **options)  # type: ignore[arg-type]
    write_checkpoint(tmp_path / "q/trtllm", config, without=without)
    return QuantizedCheckpoint(path=tmp_path / "q", digest="sha256:" + "1" * 64)


def engine(where: str = "host", gpu: str = "H100", **values: object) -> EngineConfig:
    """An engine section; `build` merges with the place."""
    extra = values.pop("build", {})
    assert isinstance(extra, dict)
    section = {"target": "tensorrt_llm", "gpu": gpu, "build": {"where": where, **extra}, **values}
    return EngineConfig.model_validate(section)


def compile_(
    tmp_path: Path,
    quantized: QuantizedCheckpoint,
    config: EngineConfig,
    *,
    machine: HostProfile | None = None,
    explain: Explain = lambda _lines: "",
    timing_caches: Path | None = None,
) -> tuple[Path, list[str]]:
    """Compile into tmp_path/out; return it with the notes."""
    notes = Notes()
    build.compile_engine(
        quantized,
        config,
        architecture=Source(),
        out=tmp_path / "out",
        progress=notes,
        host=machine or host(),
        explain=explain,
        timing_caches=timing_caches,
    )
    return tmp_path / "out", notes.texts
