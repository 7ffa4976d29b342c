"""What this machine is: CPU, cores and memory that this process may use, GPUs, installed packages.

Cheap and harmless: reads /proc, /sys and package metadata, asks nvidia-smi when it exists, and imports
no package that it names.
"""

from __future__ import annotations

import csv
import importlib.metadata
import math
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MIB = 2**20
KIB = 2**10
NVIDIA_SMI_TIMEOUT_S = 20
GPU_FIELDS = ("name", "compute_cap", "memory.total", "driver_version")

# Flags of /proc/cpuinfo that decide how a CPU computes low-bit or 16-bit matrices.
CPU_FLAGS = (
    "avx2",
    "avx_vnni",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_int8",
    "amx_bf16",
    "amx_fp16",
    "asimd",
    "asimddp",
    "bf16",
    "i8mm",
    "sve",
)

# Every distribution whose version can matter to somebody reading a report.
DISTRIBUTIONS = (
    "trtpipe",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "gguf",
    "nvidia-modelopt",
    "optimum-intel",
    "nncf",
    "openvino",
    "openvino-genai",
    "tensorrt-llm",
    "vllm",
    "nvidia-pytriton",
    "tritonclient",
)


@dataclass(frozen=True, kw_only=True)
class GpuProfile:
    """One GPU as nvidia-smi reports it; `sm` is the compute capability as an integer, 90 for 9.0."""

    name: str
    sm: int | None
    memory_bytes: int | None
    driver: str


@dataclass(frozen=True, kw_only=True)
class HostProfile:
    """This machine as far as this process may use it.

    cpu_flags: those of CPU_FLAGS that the CPU has.
    usable_cores: the smaller of CPU affinity and cgroup quota, rounded up, at least 1.
    memory_total_bytes, memory_available_bytes: the smaller of the machine's and the cgroup's.
    gpus_note: why `gpus` is empty, "" when it is not.
    versions: installed distributions of DISTRIBUTIONS.
    """

    cpu_model: str
    cpu_flags: tuple[str, ...]
    usable_cores: int
    memory_total_bytes: int
    memory_available_bytes: int
    gpus: tuple[GpuProfile, ...]
    gpus_note: str
    versions: Mapping[str, str]


def probe(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> HostProfile:
    """Look at this machine. Nothing that is absent makes it fail."""
    model, flags = read_cpu(proc / "cpuinfo")
    groups = _own_cgroups(proc / "self/cgroup", cgroup)
    total, available = _memory(proc / "meminfo", groups)
    gpus, note = query_gpus()
    return HostProfile(
        cpu_model=model,
        cpu_flags=flags,
        usable_cores=_usable_cores(groups),
        memory_total_bytes=total,
        memory_available_bytes=available,
        gpus=gpus,
        gpus_note=note,
        versions=toolchain(*DISTRIBUTIONS),
    )


def toolchain(*names: str) -> dict[str, str]:
    """Return the versions of the named distributions that are installed, from their metadata."""
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def read_cpu(cpuinfo: Path) -> tuple[str, tuple[str, ...]]:
    """Return the model name of the first CPU and which of CPU_FLAGS it has."""
    fields: dict[str, str] = {}
    for line in _read(cpuinfo).splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = set((fields.get("flags") or fields.get("Features", "")).split())
    return fields.get("model name", "unknown"), tuple(flag for flag in CPU_FLAGS if flag in flags)


def query_gpus() -> tuple[tuple[GpuProfile, ...], str]:
    """Ask nvidia-smi; returns the GPUs, and why there are none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return (), "nvidia-smi is not installed"
    argv = [program, f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv"]
    try:
        answer = subprocess.run(argv, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return (), f"nvidia-smi did not answer within {NVIDIA_SMI_TIMEOUT_S} s"
    except OSError as error:
        return (), f"nvidia-smi cannot be started: {error.strerror}"
    if answer.returncode != 0:
        return (), f"nvidia-smi exited {answer.returncode}: {(answer.stdout + answer.stderr).strip()}"
    return parse_gpus(answer.stdout), ""


def parse_gpus(text: str) -> tuple[GpuProfile, ...]:
    """Read nvidia-smi's CSV with its header; a value it does not know ("[N/A]") becomes None."""
    rows = list(csv.reader(text.splitlines(), skipinitialspace=True))
    gpus = []
    for row in rows[1:]:
        if len(row) != len(GPU_FIELDS):
            continue
        name, capability, memory, driver = (cell.strip() for cell in row)
        major, _, minor = capability.partition(".")
        mebibytes = memory.removesuffix("MiB").strip()
        gpus.append(
            GpuProfile(
                name=name,
                sm=int(major) * 10 + int(minor) if major.isdigit() and minor.isdigit() else None,
                memory_bytes=int(mebibytes) * MIB if mebibytes.isdigit() else None,
                driver=driver,
            )
        )
    return tuple(gpus)


def _own_cgroups(membership: Path, root: Path) -> tuple[Path, ...]:
    """Return the directories of this process's cgroup v2 and its parents; their limits all apply."""
    for line in _read(membership).splitlines():
        hierarchy, _, path = line.partition("::")
        if hierarchy == "0":
            own = root / path.strip("/")
            return (own, *(parent for parent in own.parents if parent.is_relative_to(root)))
    return ()


def _usable_cores(groups: tuple[Path, ...]) -> int:
    cores: float = len(os.sched_getaffinity(0))
    for group in groups:
        quota, _, period = _read(group / "cpu.max").strip().partition(" ")
        if quota.isdigit() and period.isdigit():
            cores = min(cores, int(quota) / int(period))
    return max(1, math.ceil(cores))


def _memory(meminfo: Path, groups: tuple[Path, ...]) -> tuple[int, int]:
    fields = dict(line.split(":", 1) for line in _read(meminfo).splitlines() if ":" in line)
    total, available = (int(fields.get(name, "0").split()[0]) * KIB for name in ("MemTotal", "MemAvailable"))
    for group in groups:
        limit, used = _read(group / "memory.max").strip(), _read(group / "memory.current").strip()
        if limit.isdigit():
            total = min(total, int(limit))
            # What the page cache holds counts as used here although the kernel would give it back.
            available = min(available, int(limit) - int(used or 0))
    return total, max(0, available)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
