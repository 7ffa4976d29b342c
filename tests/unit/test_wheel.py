"""What a built wheel holds: everything that the code reads beside itself."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> frozenset[str]:
    """The files of a wheel that is built from a copy of what git tracks."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("wheel")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if tracked.returncode != 0:
        pytest.skip("not a git checkout")
    for name in filter(None, tracked.stdout.split("\0")):
        if (ROOT / name).is_file() and not name.startswith("tests/"):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--wheel-dir", str(out), str(copy)], check=True, capture_output=True)
    with zipfile.ZipFile(next(out.glob("*.whl"))) as wheel:
        return frozenset(wheel.namelist())


@pytest.mark.parametrize("pattern", ["*.toml", "*.jsonl", "*.py"])
def test_every_data_file_of_the_package_is_in_the_wheel(names: frozenset[str], pattern: str) -> None:
    """Tables, texts and code."""
    wanted = {path.relative_to(ROOT).as_posix() for path in (ROOT / "pipeline").rglob(pattern)}
    assert wanted
    assert wanted <= names


def test_the_templates_of_the_repository_are_in_the_wheel(names: frozenset[str]) -> None:
    """They lie inside the package there."""
    templates = {
        f"pipeline/triton_repo/{path.relative_to(ROOT / 'triton_repo').as_posix()}"
        for pattern in ("*.py", "*.pbtxt")
        for path in (ROOT / "triton_repo").rglob(pattern)
    }
    assert len(templates) > 15
    assert templates <= names
