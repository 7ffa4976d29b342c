"""What this machine is, on canned and on the real machine."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.host.probe import GpuProfile, parse_gpus, probe, query_gpus, read_cpu, toolchain

pytestmark = pytest.mark.fast

GIB = 2**30
TWO_GPUS = """name, compute_cap, memory.total [MiB], driver_version
NVIDIA H100 80GB HBM3, 9.0, 81559 MiB, 550.54.15
NVIDIA A100-SXM4-40GB, 8.0, 40960 MiB, 550.54.15
"""


def fake_machine(root: Path, *, cpu_max: str, memory_max: str) -> tuple[Path, Path]:
    """Write a /proc and a cgroup v2 tree whose limits sit in the parent group."""
    proc, cgroup = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    (cgroup / "pod" / "container").mkdir(parents=True)
    (proc / "cpuinfo").write_text(
        "processor\t: 0\nmodel name\t: Test CPU\nflags\t\t: fpu avx2 avx512f amx_bf16 amx_tile\n\n"
        "processor\t: 1\nmodel name\t: Other CPU\nflags\t\t: fpu\n"
    )
    (proc / "meminfo").write_text("MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\n")
    (proc / "self" / "cgroup").write_text("0::/pod/container\n")
    (cgroup / "pod" / "cpu.max").write_text(cpu_max)
    (cgroup / "pod" / "memory.max").write_text(memory_max)
    (cgroup / "pod" / "memory.current").write_text(str(GIB))
    (cgroup / "pod" / "container" / "cpu.max").write_text("max 100000\n")
    return proc, cgroup


def test_gpus_are_read_from_nvidia_smi_csv() -> None:
    """Compute capability becomes an SM number and MiB become bytes."""
    assert parse_gpus(TWO_GPUS) == (
        GpuProfile(name="NVIDIA H100 80GB HBM3", sm=90, memory_bytes=81559 * 2**20, driver="550.54.15"),
        GpuProfile(name="NVIDIA A100-SXM4-40GB", sm=80, memory_bytes=40960 * 2**20, driver="550.54.15"),
    )


def test_values_that_nvidia_smi_does_not_know_are_none() -> None:
    """An unknown value never becomes a number."""
    text = (
        "name, compute_cap, memory.total [MiB], driver_version\nNVIDIA GB10, 12.1, [N/A], 580.1\nold, [N/A], 1 MiB, 1\n"
    )
    assert [(gpu.sm, gpu.memory_bytes) for gpu in parse_gpus(text)] == [(121, None), (None, 2**20)]


@pytest.mark.parametrize("text", ["", "No devices were found\n", TWO_GPUS.splitlines()[0]])
def test_no_gpu_lines_mean_no_gpus(text: str) -> None:
    """Anything but rows of four fields is no GPU."""
    assert parse_gpus(text) == ()


@pytest.mark.parametrize(
    ("script", "n_gpus", "note"),
    [
        (f"cat <<'END'\n{TWO_GPUS}END", 2, ""),
        ("echo 'NVIDIA-SMI has failed'; exit 9", 0, "nvidia-smi exited 9: NVIDIA-SMI has failed"),
        (None, 0, "nvidia-smi is not installed"),
    ],
)
def test_an_absent_or_broken_nvidia_smi_is_told_and_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, n_gpus: int, note: str
) -> None:
    """The program on PATH is asked; why there is no GPU is said."""
    if script is not None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin" if script else str(tmp_path))
    gpus, said = query_gpus()
    assert (len(gpus), said) == (n_gpus, note)


def test_the_first_cpu_and_its_relevant_flags_are_read(tmp_path: Path) -> None:
    """Only flags that matter for low-bit arithmetic are kept, in a fixed order."""
    proc, _ = fake_machine(tmp_path, cpu_max="max 100000", memory_max="max")
    assert read_cpu(proc / "cpuinfo") == ("Test CPU", ("avx2", "avx512f", "amx_tile", "amx_bf16"))


@pytest.mark.parametrize(("cpu_max", "cores"), [("50000 100000\n", 1), ("100000 100000\n", 1), ("max 100000\n", None)])
def test_a_cgroup_quota_limits_the_cores(tmp_path: Path, cpu_max: str, cores: int | None) -> None:
    """The limit of a parent group counts; 'max' is no limit."""
    host = probe(*fake_machine(tmp_path, cpu_max=cpu_max, memory_max="max"))
    assert host.usable_cores == (cores or len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    ("memory_max", "total", "available"), [("max", 16 * GIB, 8 * GIB), (str(4 * GIB), 4 * GIB, 3 * GIB)]
)
def test_a_cgroup_limits_the_memory(tmp_path: Path, memory_max: str, total: int, available: int) -> None:
    """Total is the limit, available what is left under it."""
    host = probe(*fake_machine(tmp_path, cpu_max="max 100000", memory_max=memory_max))
    assert (host.memory_total_bytes, host.memory_available_bytes) == (total, available)


def test_a_machine_that_tells_nothing_is_no_error(tmp_path: Path) -> None:
    """Without /proc and /sys the profile says unknown."""
    host = probe(tmp_path / "proc", tmp_path / "cgroup")
    assert (host.cpu_model, host.cpu_flags, host.memory_total_bytes) == ("unknown", (), 0)
    assert host.usable_cores >= 1


def test_this_machine_is_probed() -> None:
    """The real machine has a CPU, memory, and cores that this process may use."""
    host = probe()
    assert host.cpu_model
    assert 1 <= host.usable_cores <= len(os.sched_getaffinity(0))
    assert 0 < host.memory_available_bytes <= host.memory_total_bytes
    assert bool(host.gpus) == (host.gpus_note == "")


def test_the_toolchain_holds_installed_versions_only() -> None:
    """A distribution that is not installed has no entry."""
    assert toolchain("pytest", "no-such-distribution") == {"pytest": importlib.metadata.version("pytest")}


def test_probing_imports_nothing_heavy() -> None:
    """Versions come from metadata: no probed package is loaded."""
    code = (
        "import sys; from pipeline.host.probe import probe; probe();"
        "print([n for n in ('torch', 'transformers', 'openvino', 'numpy', 'modelopt') if n in sys.modules])"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
