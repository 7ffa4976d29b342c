"""What depends on the machine and the image: pins, driver, GPU, and host memory for calibration and build."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from pipeline.config.formats import UNQUANTIZED, formats_of
from pipeline.errors import ConfigError
from pipeline.host.probe import HostProfile
from pipeline.targets.tensorrt_llm import budget
from pipeline.targets.tensorrt_llm.preflight.finding import Case, Finding, error, warning
from pipeline.targets.tensorrt_llm.toolchains import Toolchain, check_host, find
from pipeline.targets.tensorrt_llm.weights import weight_bytes

_TAG = re.compile(r":(\d\d\.\d\d)-trtllm-python-py3(?:@|$)")
# Host memory of a build as a multiple of the checkpoint: triton_cli@7f448b2 asks for 48 GB for 16 GB.
COMFORTABLE = 3
# Working memory of the builder beside the weights (docs.pytorch.org/TensorRT, resource management).
BUILDER_BYTES = 2 * 2**30


def check(case: Case) -> Iterator[Finding]:
    """Yield what speaks against the image and, when the machine is known, against the machine."""
    toolchain, problems = _toolchain(case)
    yield from problems
    if case.host is None:
        return
    yield from _installed(case, case.host)
    yield from _calibration_memory(case, case.host)
    blocked = list(_cards(case, case.host, toolchain)) if toolchain is not None else []
    yield from blocked
    if not blocked:
        yield from _build_memory(case, case.host)


def _cards(case: Case, host: HostProfile, toolchain: Toolchain) -> Iterator[Finding]:
    """Driver and GPUs of the machine that builds; an automatic choice defers (NVIDIA/TensorRT-LLM#3031, #1806)."""
    where = case.config.engine.build.where
    if where == "deferred" or (where == "auto" and not host.gpus):
        return
    for problem in check_host(host, toolchain, case.gpu):
        row = "TL5" if problem.where == "host driver" else "TL2"
        say = warning if where == "auto" else error if problem.severity == "error" else warning
        yield say(row, problem.where, problem.message, problem.hint)


def _toolchain(case: Case) -> tuple[Toolchain | None, list[Finding]]:
    """The toolchain that the config asks for, and what is wrong with the asking (NVIDIA/TensorRT-LLM#15918)."""
    engine = case.config.engine
    key, tag = "engine.build.image_tag", engine.build.image_tag
    if engine.build.image is not None:
        found = _TAG.search(engine.build.image)
        key, tag = "engine.build.image", found[1] if found else None
        if found is None:
            message = f"what '{engine.build.image}' carries is not known; it must be TensorRT-LLM {engine.toolchain}."
            hint = "Keep the tag '<release>-trtllm-python-py3' in the name of a mirror, before a digest."
            return find(engine.toolchain), [warning("TL1", key, message, hint)]
    try:
        return find(engine.toolchain, tag), []
    except ConfigError as problem:
        return None, [error("TL1", key, f"{problem.message}.", problem.hint)]


def _installed(case: Case, host: HostProfile) -> Iterator[Finding]:
    engine, version = case.config.engine, host.versions.get("tensorrt-llm")
    if version is None or version == engine.toolchain or engine.build.where not in ("host", "auto"):
        return
    message = f"TensorRT-LLM {version} is installed here, and the config pins {engine.toolchain}."
    hint = f"pip install tensorrt-llm=={engine.toolchain}, or set engine.build.where: container."
    say = error if engine.build.where == "host" else warning
    yield say("TL1", "engine.toolchain", message, hint)


def _calibration_memory(case: Case, host: HostProfile) -> Iterator[Finding]:
    """Quantizing holds the 16-bit weights and the quantized copy (docs/source/architecture/workflow.md@b171e87)."""
    quantization = case.config.quantization
    if formats_of(quantization)[0] in UNQUANTIZED:
        return
    need = _on_one_rank(case, {"format": "bf16", "overrides": ()}) + _on_one_rank(case, {})
    sizes = f"{_gib(need)} GiB (16-bit weights and their {' and '.join(formats_of(quantization))} copy)"
    if host.memory_total_bytes < need:
        message = f"quantizing needs at least {sizes}, and this machine has {_gib(host.memory_total_bytes)} GiB."
        yield error("TL24", "host memory", message, "Quantize on a machine with more memory.")
    elif host.memory_available_bytes < need:
        message = f"quantizing needs at least {sizes}, and {_gib(host.memory_available_bytes)} GiB are available now."
        yield warning("TL24", "host memory", message, "Stop other programs first.")


def _build_memory(case: Case, host: HostProfile) -> Iterator[Finding]:
    """Every build worker loads its rank's checkpoint into host memory (NVIDIA/TensorRT-LLM#102, #538, #743)."""
    engine = case.config.engine
    workers, key = engine.build.workers, "engine.build.workers"
    if workers > case.world_size:
        message = f"{workers} workers have {case.world_size} rank(s) to build."
        yield warning("TL27", key, message, f"Use {case.world_size} or less.")
    if engine.build.where == "deferred" or not host.gpus:
        return
    if workers > len(host.gpus):
        message = f"{workers} workers need a GPU each, and this machine has {len(host.gpus)}; upstream caps them."
        yield warning("TL27", key, message, f"Use {len(host.gpus)} or less.")
    at_once = min(workers, len(host.gpus), case.world_size)
    rank, have = weight_bytes(case.config, case.model), host.memory_total_bytes
    need = at_once * (rank + BUILDER_BYTES)
    if have < need:
        fitting = have // (rank + BUILDER_BYTES)
        message = (
            f"{at_once} worker(s) load {_gib(rank)} GiB each, and this machine has {_gib(have)} GiB: it is killed."
        )
        hint = f"Use {fitting}." if fitting else "Build on a machine with more memory, or raise tensor_parallel_size."
        yield error("TL27", key, message, hint)
    elif have < COMFORTABLE * at_once * rank:
        message = (
            f"{at_once} worker(s) load {_gib(rank)} GiB each, and builds take up to {COMFORTABLE} times that; this "
            f"machine has {_gib(have)} GiB."
        )
        yield warning("TL27", key, message, "Use one worker, and watch the memory.")


def _on_one_rank(case: Case, changes: Mapping[str, object]) -> int:
    """Bytes of all weights as one rank would hold them, with changes to the quantization."""
    engine = case.config.engine.model_copy(update={"tensor_parallel_size": 1, "pipeline_parallel_size": 1})
    quantization = case.config.quantization.model_copy(update=changes)
    config = case.config.model_copy(update={"engine": engine, "quantization": quantization})
    return weight_bytes(config, case.model)


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / budget.GIB:.1f}"
