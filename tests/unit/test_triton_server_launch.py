"""How a tritonserver is found and what it is started with."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest

from pipeline.errors import HostError, ServeError
from pipeline.triton import installation
from pipeline.triton.installation import TritonInstallation, environment, find_tritonserver, link_backends
from pipeline.triton.ports import Ports
from pipeline.triton.server import Server, server_argv

pytestmark = pytest.mark.fast

PORTS = Ports(http=1, grpc=2, metrics=3)


def make_installation(root: Path, *, stub: bool = True) -> TritonInstallation:
    """Lay out the files of a wheel-like installation."""
    (root / "backends" / "python").mkdir(parents=True)
    (root / "backends" / "python" / "libtriton_python.so").touch()
    (root / "stub").touch()
    return TritonInstallation(
        origin="test",
        binary=root / "tritonserver",
        backends=root / "backends",
        libraries=(Path("/a"), Path("/b")),
        stub=root / "stub" if stub else None,
    )


def test_command_line_is_complete_and_loopback_only() -> None:
    """Every endpoint is bound to the given host and nothing is completed or polled behind our back."""
    argv = server_argv(Path("/t"), Path("/repo"), backends=Path("/be"), host="127.0.0.1", ports=PORTS, shm_prefix="x-")
    assert argv == [
        "/t",
        "--model-repository=/repo",
        "--model-control-mode=none",
        "--disable-auto-complete-config",
        "--exit-on-error=false",
        "--strict-readiness=true",
        "--exit-timeout-secs=20",
        "--http-address=127.0.0.1",
        "--http-port=1",
        "--grpc-address=127.0.0.1",
        "--grpc-port=2",
        "--metrics-address=127.0.0.1",
        "--metrics-port=3",
        "--backend-directory=/be",
        "--backend-config=python,shm-region-prefix-name=x-",
        "--log-verbose=0",
        "--log-format=ISO8601",
    ]


def test_models_run_in_this_interpreters_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """python3 on PATH is this one; variables that would redirect imports are dropped."""
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("PYTHONHOME", "/elsewhere")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/c")
    env = environment(make_installation(tmp_path))
    assert env["PATH"].split(":")[0] == str(Path(sys.executable).parent)
    assert env["LD_LIBRARY_PATH"] == "/a:/b:/c"
    assert "PYTHONPATH" not in env
    assert "PYTHONHOME" not in env


def test_backends_are_linked_with_the_stub(tmp_path: Path) -> None:
    """The folder given to the server holds the backend's files and the stub beside them."""
    folder = link_backends(make_installation(tmp_path / "wheel"), tmp_path / "links")
    assert (folder / "python" / "libtriton_python.so").resolve().exists()
    assert (folder / "python" / "triton_python_backend_stub").resolve() == tmp_path / "wheel" / "stub"


def test_a_complete_backend_folder_is_used_as_it_is(tmp_path: Path) -> None:
    """A system installation has its own stub."""
    found = make_installation(tmp_path / "system", stub=False)
    assert link_backends(found, tmp_path / "links") == found.backends


def test_a_machine_without_triton_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says which extra brings the server."""

    def absent(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", absent)
    monkeypatch.setattr(installation, "SYSTEM_ROOT", tmp_path)
    with pytest.raises(HostError, match=r"pip install 'trtpipe\[serve\]'"):
        find_tritonserver()


def test_a_folder_without_models_is_no_repository(tmp_path: Path) -> None:
    """Serving the wrong folder is refused before anything starts."""
    with pytest.raises(ServeError, match="is no model repository"), Server(tmp_path, log_path=tmp_path / "log"):
        pass
