"""Which image carries which TensorRT-LLM, and whether this machine can run it. The table is toolchains.toml."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Final

from pydantic import Field

from pipeline.config.legality import gpus
from pipeline.config.section import Section
from pipeline.errors import ConfigError, Problem
from pipeline.host.probe import GpuProfile, HostProfile

# From this release on there is no trtllm-build (NVIDIA/TensorRT-LLM#15918, #16369).
FIRST_WITHOUT_ENGINES: Final = (1, 3)


class Toolchain(Section):
    """One image and what is in it.

    Attributes:
        tag: release of Triton, for example "26.05".
        tensorrt_llm: version in the image; an engine runs on no other.
        tensorrt: version of the library.
        cuda: version of the toolkit.
        driver: driver that the compatibility matrix lists.
        driver_branch: oldest driver branch that starts the image.
        torch: version of PyTorch.
        python: version of Python.
        engine_path: whether trtllm-build and the backend tensorrtllm are in it.
        commit: head of the branch whose Dockerfile was read, "" when only the matrix was.
        digest: of the image, "" when it is not pinned yet.
        note: where two sources disagree.
    """

    tag: str
    tensorrt_llm: str
    tensorrt: str
    cuda: str
    driver: str
    driver_branch: int
    torch: str
    python: str
    engine_path: bool
    commit: str
    digest: str
    note: str = ""

    @property
    def image(self) -> str:
        """The reference to pull, with the digest when it is known."""
        name = f"{table().image.repository}:{self.tag}{table().image.suffix}"
        return f"{name}@{self.digest}" if self.digest else name


class Image(Section):
    """How image references are made."""

    repository: str
    suffix: str
    source: str


class Event(Section):
    """A step in the life of the engine path."""

    date: str
    what: str
    source: str


class Release(Section):
    """Status of a TensorRT-LLM release that builds are offered for."""

    tensorrt_llm: str
    published: str
    status: str
    ends: str
    source: str


class Table(Section):
    """toolchains.toml."""

    default: Mapping[str, str]
    image: Image
    events: tuple[Event, ...] = Field(alias="event")
    releases: tuple[Release, ...] = Field(alias="release")
    toolchains: tuple[Toolchain, ...] = Field(alias="toolchain")


@cache
def table() -> Table:
    """Read toolchains.toml."""
    text = resources.files("pipeline.targets.tensorrt_llm").joinpath("toolchains.toml").read_text("utf-8")
    return Table.model_validate(tomllib.loads(text))


def by_tag(tag: str) -> Toolchain:
    """Return the toolchain of an image tag.

    Raises:
        ConfigError: the tag is not in the table; what it carries is not known.
    """
    found = next((row for row in table().toolchains if row.tag == tag), None)
    if found is None:
        newest = table().toolchains[0].tag
        raise ConfigError(
            f"image tag '{tag}' is not in the table of toolchains, which ends at {newest}, so its TensorRT-LLM is not "
            "known",
            hint=f"Use {table().default['1.2.1']} (TensorRT-LLM 1.2.1) or {table().default['1.0.0']} (1.0.0).",
        )
    return found


def find(version: str, tag: str | None = None) -> Toolchain:
    """Return the toolchain for a TensorRT-LLM version, in the image `tag` when one is named.

    Raises:
        ConfigError: no engine path in that version, not offered, or the image carries another version.
    """
    if release_of(version)[:2] >= FIRST_WITHOUT_ENGINES:
        raise ConfigError(
            f"TensorRT-LLM {version} has no trtllm-build: the engine path was removed from 1.3 on",
            hint="Use engine.toolchain: 1.2.1, or engine.target: tensorrt_llm_llmapi, which needs no engine.",
        )
    if version not in table().default:
        offered = " or ".join(table().default)
        raise ConfigError(
            f"TensorRT-LLM {version} is not a version that engines are built for",
            hint=f"Use engine.toolchain: {offered}.",
        )
    found = by_tag(tag or table().default[version])
    if found.tensorrt_llm != version:
        tags = ", ".join(row.tag for row in table().toolchains if row.tensorrt_llm == version)
        raise ConfigError(
            f"image tag '{found.tag}' carries TensorRT-LLM {found.tensorrt_llm}, and engine.toolchain is {version}",
            hint=f"Use one of {tags}.",
        )
    return found


def check_host(host: HostProfile, toolchain: Toolchain | None = None, gpu: str | None = None) -> list[Problem]:
    """Compare driver and GPUs of a machine with what a toolchain needs.

    Args:
        host: the machine.
        toolchain: None takes the default of 1.2.1.
        gpu: the config's GPU word; None accepts any GPU.

    Returns:
        What is wrong; empty when an engine can be built and served here.
    """
    toolchain = toolchain or find("1.2.1")
    if not host.gpus:
        message = f"no GPU is visible here ({host.gpus_note}); the engine has to be built on the GPU node."
        return [Problem(where="host GPU", message=message, severity="warning")]
    return [*_driver(host.gpus[0], toolchain), *(_gpu(host, gpu) if gpu is not None else [])]


def _driver(card: GpuProfile, toolchain: Toolchain) -> list[Problem]:
    """An image starts with a driver of its branch or newer (NVIDIA/TensorRT-LLM#23, #1806)."""
    branch = release_of(card.driver)[:1]
    if not branch or branch[0] >= toolchain.driver_branch:
        return []
    fitting = [row for row in table().toolchains if branch[0] >= row.driver_branch]
    offered = [row for row in fitting if row.tensorrt_llm in table().default]
    hint = f"Update the driver to R{toolchain.driver_branch} or newer (the image lists {toolchain.driver})."
    if offered:
        hint = f"{hint} With this one use engine.toolchain: {offered[0].tensorrt_llm} (image {offered[0].tag})."
    elif fitting:
        last = f"{fitting[0].tag} with TensorRT-LLM {fitting[0].tensorrt_llm}"
        hint = f"{hint} The last image that starts with this one is {last}, which engines are not built for."
    message = f"driver {card.driver} is older than R{toolchain.driver_branch}, which image {toolchain.tag} needs."
    return [Problem(where="host driver", message=message, hint=hint)]


def _gpu(host: HostProfile, gpu: str) -> list[Problem]:
    """An engine is built on the GPU model that serves it (NVIDIA/TensorRT-LLM#3031)."""
    names = ", ".join(dict.fromkeys(card.name for card in host.gpus))
    fitting = [card for card in host.gpus if is_model(card.name, gpu)]
    wanted = gpus()[gpu].sm
    if not fitting and all(card.sm != wanted for card in host.gpus):
        message = f"the config is for {gpu} (SM {wanted}), and this machine has {names}."
        return [Problem(where="host GPU", message=message, hint="Build on the GPU node, or change engine.gpu.")]
    if len(fitting) < len(host.gpus):
        message = f"the config is for {gpu}, and this machine has {names}: kernels are timed on the GPU that builds."
        hint = f"Show trtllm-build only the {gpu} (CUDA_VISIBLE_DEVICES)."
        return [Problem(where="host GPU", message=message, hint=hint, severity="warning")]
    return []


def is_model(name: str, gpu: str) -> bool:
    """Tell whether nvidia-smi's name is of the GPU that the config calls `gpu`: 'NVIDIA L40S' is no L4."""
    return gpu in re.split(r"[\s-]+", name)


def release_of(version: str) -> tuple[int, ...]:
    """Return the release numbers: '1.3.0rc7' -> (1, 3, 0)."""
    numbers = re.match(r"v?(\d+(?:\.\d+)*)", version)
    return tuple(int(part) for part in numbers[1].split(".")) if numbers else ()
