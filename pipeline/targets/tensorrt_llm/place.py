"""Where trtllm-build runs: on this host, in the pinned container, or later on the GPU node."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from pipeline.config.deployment import EngineConfig
from pipeline.errors import HostError, Problem
from pipeline.host.probe import HostProfile
from pipeline.targets.tensorrt_llm.command import PROGRAM
from pipeline.targets.tensorrt_llm.toolchains import Toolchain, check_host

Kind = Literal["host", "container", "deferred"]
Which = Callable[[str], str | None]
CONTAINER_PROGRAMS: Final = ("docker", "podman")
# Limits that NVIDIA's images ask for at start; a small /dev/shm hangs multi-GPU runs
# (triton-inference-server/tensorrtllm_backend#377, #576).
CONTAINER_LIMITS: Final = ("--ipc=host", "--ulimit", "memlock=-1", "--ulimit", "stack=67108864", "--shm-size", "2g")
# A build reads local files only.
OFFLINE: Final[Mapping[str, str]] = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


@dataclass(frozen=True, kw_only=True)
class Place:
    """A decision for a place.

    kind: the place.
    program: trtllm-build on PATH, or docker or podman; "" when deferred.
    why: the reason, as a user reads it.
    """

    kind: Kind
    program: str
    why: str


def choose_place(engine: EngineConfig, host: HostProfile, toolchain: Toolchain, which: Which = shutil.which) -> Place:
    """Take the place that engine.build.where names, or the first that this machine can do.

    Raises:
        HostError: the named place is not possible here.
    """
    wanted = engine.build.where
    if wanted == "deferred":
        return Place(kind="deferred", program="", why="engine.build.where says so.")
    problems = check_host(host, toolchain, engine.gpu)
    if wanted == "host":
        return _host(problems, host, toolchain, which, forced=True)
    if wanted == "container":
        return _container(problems, which, toolchain, forced=True)
    reasons = []
    try:
        return _host(problems, host, toolchain, which, forced=False)
    except HostError as error:
        reasons.append(error.message)
    try:
        return _container(problems, which, toolchain, forced=False)
    except HostError as error:
        reasons.append(error.message)
    return Place(
        kind="deferred",
        program="",
        why=f"{'; '.join(dict.fromkeys(reasons))}. The engine was not built and not run: the GPU node builds it once.",
    )


def _host(problems: list[Problem], host: HostProfile, toolchain: Toolchain, which: Which, *, forced: bool) -> Place:
    program = which(PROGRAM)
    if program is None:
        hint = f"Run inside {toolchain.image}, or set engine.build.where: container or deferred."
        raise HostError(f"{PROGRAM} is not on PATH", hint=hint)
    version = host.versions.get("tensorrt-llm")
    if version is not None and version != toolchain.tensorrt_llm:
        hint = f"Install tensorrt-llm=={toolchain.tensorrt_llm}, or build in {toolchain.image}."
        raise HostError(f"TensorRT-LLM {version} is installed, and the config pins {toolchain.tensorrt_llm}", hint=hint)
    _require([problem for problem in problems if problem.where != "host driver"], forced=forced)
    return Place(kind="host", program=program, why=f"{program} is on PATH.")


def _container(problems: list[Problem], which: Which, toolchain: Toolchain, *, forced: bool) -> Place:
    program = next((name for name in CONTAINER_PROGRAMS if which(name) is not None), None)
    if program is None:
        raise HostError(
            "neither docker nor podman is on PATH", hint="Install one, or set engine.build.where: deferred."
        )
    _require(problems, forced=forced)
    return Place(kind="container", program=program, why=f"{program} is on PATH; image {toolchain.image}.")


def _require(problems: list[Problem], *, forced: bool) -> None:
    """Refuse a machine whose driver or GPU does not fit; a GPU that nobody sees stops only an automatic choice."""
    errors = [problem for problem in problems if problem.severity == "error" or not forced]
    if errors:
        raise HostError(errors[0].message.rstrip("."), problems=errors, hint="Set engine.build.where: deferred.")


def container_argv(
    place: Place,
    image: str,
    command: tuple[str, ...],
    *,
    name: str,
    mounts: Mapping[Path, str],
) -> tuple[str, ...]:
    """Return the command line that runs `command` in the image.

    Args:
        place: a place of kind container.
        image: the reference to run.
        command: program and arguments with paths as the container sees them.
        name: of the container, so that it can be removed.
        mounts: directory here -> path in the container; one that ends in ":ro" cannot be written.
    """
    return (place.program, "run", "--rm", "--init", "--name", name, *_options(place.program, mounts), image, *command)


def _options(program: str, mounts: Mapping[Path, str]) -> Iterator[str]:
    yield from ("--gpus", "all") if program == "docker" else ("--device", "nvidia.com/gpu=all")
    yield from CONTAINER_LIMITS
    yield from ("--network", "none")
    if program == "podman":
        yield "--userns=keep-id"
    yield from ("--user", f"{os.getuid()}:{os.getgid()}")
    for variable, value in {**OFFLINE, "HOME": "/tmp"}.items():  # noqa: S108 - the container's own
        yield from ("--env", f"{variable}={value}")
    for source, target in mounts.items():
        yield from ("--volume", f"{source}:{target}")
    yield from ("--workdir", "/engine")
