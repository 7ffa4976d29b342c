"""Time of verify's static checks beside the time to read the files that they check.

    python -m benchmarks.verify_speed WORK [--source DIR] [--formats fp8 int8_wo int4_awq] [--repeats 5]

Makes a random Llama (212M parameters, bfloat16) in WORK, or takes the Hugging Face checkpoint `--source`, and
quantizes it once per format; a WORK that holds these already is used again. Then alternates, `--repeats`
times per format:

    read     every byte of the source's and of the quantized checkpoint's safetensors files, into one buffer
    check    structure, unquantized tensors, every weight, every layer on its recorded rows

each from the page cache (warm) and after both were dropped from it (cold). One JSON line per format:
medians in seconds and the ratio of the medians. What is scored end to end on text is not measured here.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pipeline.config.schema import CalibrationConfig, Format, QuantizationConfig, VerifyConfig
from pipeline.core.artifacts import QuantizedCheckpoint, SourceCheckpoint
from pipeline.core.progress import Silent
from pipeline.quantize.formats import WantedCheckpoint
from pipeline.quantize.verify import static_checks
from tests.support.checkpoints import tiny_llama
from tests.support.making import make_quantized

BUFFER_BYTES = 4 << 20
HIDDEN, LAYERS = 1536, 10


def quantized(source: Path, format_: Format, work: Path) -> Path:
    """Quantize `source` to WORK/<format>, or take what lies there."""
    out = work / format_
    if not (out / "calibration.json").exists():
        make_quantized(
            SourceCheckpoint(path=source, digest="source"),
            QuantizationConfig(format=format_, group_size=64),
            CalibrationConfig(num_samples=4, max_seq_len=64),
            WantedCheckpoint(export="hf"),
            out,
        )
    return out


def files_of(*directories: Path) -> list[Path]:
    """Every safetensors file below the directories."""
    return [file for directory in directories for file in sorted(directory.rglob("*.safetensors"))]


def drop(files: Sequence[Path]) -> None:
    """Ask the kernel to forget the files' pages."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read(files: Sequence[Path]) -> None:
    """Read every byte."""
    buffer = bytearray(BUFFER_BYTES)
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):  # type: ignore[attr-defined]
                pass


def check(source: Path, checkpoint: Path) -> None:
    """Run the static checks; a checkpoint that fails one is no yardstick."""
    failed = [
        found
        for found in static_checks(
            SourceCheckpoint(path=source, digest="source"),
            QuantizedCheckpoint(path=checkpoint, digest="quantized"),
            VerifyConfig(),
            progress=Silent(),
        )
        if not found.passed
    ]
    if failed:
        raise SystemExit(f"{checkpoint}: {failed[0]}")


def timed(work: Callable[[], None]) -> tuple[float, float]:
    """Wall and CPU seconds of one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(source: Path, checkpoint: Path, repeats: int) -> Iterator[tuple[str, float, float]]:
    """Alternate read and check; yields (name, wall seconds, CPU seconds)."""
    files = files_of(source, checkpoint)
    for _ in range(repeats):
        for cache in ("cold", "warm"):
            for name, work in (("read", lambda: read(files)), ("check", lambda: check(source, checkpoint))):
                if cache == "cold":
                    drop(files)
                yield f"{cache}_{name}", *timed(work)


def main() -> None:
    """Measure every format that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--source", type=Path)
    parser.add_argument("--formats", nargs="+", default=["fp8", "int8_wo", "int4_awq"])
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    source = asked.source or asked.work / "source"
    if not (source / "config.json").exists():
        tiny_llama(source, hidden_size=HIDDEN, layers=LAYERS, dtype="bfloat16")
    for format_ in asked.formats:
        checkpoint = quantized(source, format_, asked.work)
        wall: dict[str, list[float]] = {}
        cpu: dict[str, list[float]] = {}
        for name, seconds, busy in measure(source, checkpoint, asked.repeats):
            wall.setdefault(name, []).append(seconds)
            cpu.setdefault(name, []).append(busy)
        medians = {name: statistics.median(values) for name, values in wall.items()}
        result = {
            "format": format_,
            "megabytes": round(sum(file.stat().st_size for file in files_of(source, checkpoint)) / 1e6),
            "seconds": {name: round(value, 3) for name, value in medians.items()},
            "cpu_seconds": {name: round(statistics.median(values), 3) for name, values in cpu.items()},
            "ratio": {
                cache: round(medians[f"{cache}_check"] / medians[f"{cache}_read"], 2) for cache in ("cold", "warm")
            },
            "cores": len(os.sched_getaffinity(0)),
        }
        sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
