"""Run `trtpipe` as a user does: a process of its own, in a directory of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG = """\
name: tiny
source:
  path: {source}
quantization:
  format: {format}
  group_size: 64
calibration:
  num_samples: 4
  max_seq_len: 64
verify:
  num_tokens: 256
  min_top1_agreement: 0.1 # random weights have no favourite token
engine:
  max_batch_size: 4
  max_num_tokens: 256
  max_seq_len: 256
serving:
  default_max_tokens: 32
"""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a finished command left."""

    code: int
    stdout: str
    stderr: str

    @property
    def document(self) -> dict[str, Any]:
        """The JSON document on stdout."""
        document: dict[str, Any] = json.loads(self.stdout)
        return document


def environment() -> dict[str, str]:
    """One thread: tiny models are slower with two."""
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def argv(*arguments: str | Path) -> list[str]:
    """The command line of `trtpipe` in this interpreter."""
    return [sys.executable, "-m", "pipeline", *map(str, arguments)]


def trtpipe(*arguments: str | Path, cwd: Path, timeout_s: float = 240, code: int | None = 0) -> Outcome:
    """Run a command to its end; `code` is what it must exit with (None: anything)."""
    done = subprocess.run(
        argv(*arguments), cwd=cwd, env=environment(), capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert code is None or done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return Outcome(code=done.returncode, stdout=done.stdout, stderr=done.stderr)


def write_config(directory: Path, source: Path, format_: str = "int4_awq") -> Path:
    """Write a config for a tiny checkpoint and return its path."""
    config = directory / "tiny.yaml"
    config.write_text(CONFIG.format(source=source, format=format_))
    return config


@contextmanager
def serving(repository: str | Path, *options: str, cwd: Path) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Run `trtpipe serve --json` on free ports; yields the process and what it announced, and ends it with SIGTERM."""
    free = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")
    with subprocess.Popen(
        argv("serve", repository, *free, "--json", *options),
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process, _announced(process)
        finally:
            process.terminate()
            process.communicate(timeout=60)


def _announced(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Read the one document that `serve --json` prints when it is ready."""
    assert process.stdout is not None
    assert process.stderr is not None
    text = ""
    for line in process.stdout:
        text += line
        if line == "}\n":
            document: dict[str, Any] = json.loads(text)
            return document
    raise AssertionError(f"serve ended before it was ready:\n{text}{process.stderr.read()}")
