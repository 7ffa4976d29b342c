"""Starts that fail, servers that die, parents that die: each has its own error and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from pipeline.core.progress import Silent
from pipeline.errors import PortInUse, ServeError, ServerDied
from pipeline.triton import ports as tcp
from pipeline.triton.client import Client
from pipeline.triton.generation import GenerationRequest
from pipeline.triton.server import Server
from tests.support.echo import write_echo_repository

pytestmark = pytest.mark.server

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108
ROOT = Path(__file__).parents[2]

SERVE_FOR_EVER = """
import signal, sys
from pathlib import Path
from pipeline.triton.server import Server

def stop(*_):
    raise KeyboardInterrupt

signal.signal(signal.SIGTERM, stop)
try:
    with Server(Path(sys.argv[1]), log_path=Path(sys.argv[2])) as server:
        print(server.pid, server.grpc_url, flush=True)
        server.wait()
except KeyboardInterrupt:
    print("stopped", flush=True)
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository that loads."""
    return write_echo_repository(tmp_path / "repository")


def family_of(pid: int) -> list[psutil.Process]:
    """The process and everything below it."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def assert_gone(processes: list[psutil.Process]) -> None:
    """All processes end in a moment."""
    _ended, alive = psutil.wait_procs(processes, timeout=15)
    assert not alive


def shared_regions(pid: int) -> list[Path]:
    """The shared-memory files of a server, found by the prefix on its command line."""
    prefix = next(part for part in psutil.Process(pid).cmdline() if "shm-region" in part).split("=")[-1]
    return list(SHARED_MEMORY.glob(f"{prefix}*"))


def start_foreground(repository: Path, log: Path) -> tuple[subprocess.Popen[str], int, str]:
    """Serve from another Python process; returns it, the server's pid and its address."""
    parent = subprocess.Popen(
        [sys.executable, "-c", SERVE_FOR_EVER, str(repository), str(log)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert parent.stdout is not None
    pid, url = parent.stdout.readline().split()
    return parent, int(pid), url


def test_a_clean_stop_leaves_nothing(repository: Path, tmp_path: Path) -> None:
    """Processes, ports, shared memory and scratch files are gone, and stop() may be called again."""
    with Server(repository, log_path=tmp_path / "log") as server:
        family = family_of(server.pid)
        regions = shared_regions(server.pid)
        assert len(family) == 2
        assert regions
    assert not any(process.is_running() for process in family)
    assert not any(region.exists() for region in regions)
    tcp.check_free(server.host, server.ports)
    server.stop()


def test_stopping_waits_for_the_answer_in_flight(repository: Path, tmp_path: Path) -> None:
    """A request that is being answered is finished before the model is unloaded."""
    with Server(repository, log_path=tmp_path / "log") as server, Client(server.grpc_url) as client:
        generation = client.generate(GenerationRequest(prompt="a <wait:1.5> b"))
        assert next(generation).text == "a "
        server.stop()
        assert [chunk.text for chunk in generation] == ["b ", ""]


def test_a_model_that_cannot_load_is_named_with_its_reason(tmp_path: Path) -> None:
    """The error carries the model's own exception; the good model is not blamed."""
    repository = write_echo_repository(tmp_path / "repository")
    write_echo_repository(repository, name="broken", initialize="raise")
    with (
        pytest.raises(ServeError, match="'broken' is UNAVAILABLE") as failure,
        Server(repository, log_path=tmp_path / "log"),
    ):
        pass
    assert [problem.where for problem in failure.value.problems] == ["model 'broken'"]
    assert "tokenizer.json not found" in failure.value.problems[0].message


def test_a_model_that_kills_its_process_while_loading_is_named(tmp_path: Path) -> None:
    """os._exit in initialize is reported for that model."""
    repository = write_echo_repository(tmp_path / "repository", initialize="die")
    with (
        pytest.raises(ServeError, match="'tensorrt_llm_bls' is UNAVAILABLE"),
        Server(repository, log_path=tmp_path / "log"),
    ):
        pass


def test_a_model_that_never_loads_times_out_by_name(tmp_path: Path) -> None:
    """After the timeout the error says what was still loading, and nothing runs any more."""
    repository = write_echo_repository(tmp_path / "repository", initialize="hang")
    server = Server(repository, log_path=tmp_path / "log", ready_timeout_s=2)
    server.start()
    family = family_of(server.pid)
    with pytest.raises(ServeError, match="not READY in 2 s; still loading: 'tensorrt_llm_bls'"):
        server.wait_ready()
    os.kill(server.pid, signal.SIGKILL)  # a clean stop would wait for the model
    server.stop()
    assert_gone(family)


def test_a_server_killed_while_loading_died_while_loading(tmp_path: Path) -> None:
    """The signal and the phase are in the error."""
    server = Server(write_echo_repository(tmp_path / "repository", initialize="hang"), log_path=tmp_path / "log")
    server.start()
    os.kill(server.pid, signal.SIGKILL)
    with pytest.raises(ServerDied, match=r"was killed by SIGKILL while loading"):
        server.wait_ready()
    server.stop()


def test_a_port_lost_in_the_race_is_named(repository: Path, tmp_path: Path) -> None:
    """A port that another process takes between our check and Triton's bind is PortInUse, too."""
    server = Server(repository, log_path=tmp_path / "log")
    server.start()
    with socket.create_server((server.host, server.ports.http)):
        with pytest.raises(PortInUse, match=rf"port {server.ports.http} .+ \(pid {os.getpid()}\)"):
            server.wait_ready()
        server.stop()


def test_a_killed_server_ends_streams_at_once(repository: Path, tmp_path: Path) -> None:
    """A kill -9 in mid-stream is ServerDied at the client and at the one who serves."""
    with Server(repository, log_path=tmp_path / "log") as server, Client(server.grpc_url) as client:
        family, regions = family_of(server.pid), shared_regions(server.pid)
        generation = client.generate(GenerationRequest(prompt="a " + "<wait:0.1> b " * 100))
        next(generation)
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(ServerDied, match="is gone"):
            list(generation)
        with pytest.raises(ServerDied, match="was killed by SIGKILL while serving"):
            server.wait()
        assert_gone(family)
        assert not any(region.exists() for region in regions)


def test_a_dead_python_model_stops_the_server(repository: Path, tmp_path: Path) -> None:
    """Triton would let the requests of a dead stub hang for ever; here they fail and the model is named."""
    with Server(repository, log_path=tmp_path / "log") as server, Client(server.grpc_url) as client:
        with pytest.raises(ServerDied):
            list(client.generate(GenerationRequest(prompt="a <die> b", timeout_s=30)))
        with pytest.raises(ServerDied, match=r"Python models died .+tensorrt_llm_bls/1/model.py"):
            server.wait()


def test_a_killed_parent_leaves_no_server(repository: Path, tmp_path: Path) -> None:
    """A kill -9 of the process that serves ends server, stubs and guardian and removes shared memory."""
    parent, pid, _url = start_foreground(repository, tmp_path / "log")
    family, regions = family_of(parent.pid), shared_regions(pid)
    assert len(family) == 4
    parent.kill()
    parent.wait()
    assert_gone(family)
    assert not any(region.exists() for region in regions)


def test_a_killed_guardian_takes_the_server_along(repository: Path, tmp_path: Path) -> None:
    """Even without its guardian no server stays, and the death is told."""
    with Server(repository, log_path=tmp_path / "log") as server:
        family = family_of(server.pid)
        psutil.Process(psutil.Process(server.pid).ppid()).kill()
        with pytest.raises(ServerDied, match="guardian process was killed"):
            server.wait()
        assert_gone(family)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_stop_a_foreground_server(repository: Path, tmp_path: Path, number: signal.Signals) -> None:
    """The one who serves handles the signal; the server stops in order and nothing stays."""
    parent, _pid, _url = start_foreground(repository, tmp_path / "log")
    family = family_of(parent.pid)
    parent.send_signal(number)
    output, _ = parent.communicate(timeout=30)
    assert output == "stopped\n"
    assert parent.returncode == 0
    assert_gone(family)
    assert "All models are stopped" in (tmp_path / "log").read_text()


def test_loading_is_told_while_it_happens(repository: Path, tmp_path: Path) -> None:
    """Progress hears of each model."""
    heard: list[str] = []

    class Listener(Silent):
        def note(self, text: str) -> None:
            heard.append(text)

    with Server(repository, log_path=tmp_path / "log", progress=Listener()):
        pass
    assert heard[0] == "loading model 'tensorrt_llm_bls'"
    assert heard[1].startswith("model 'tensorrt_llm_bls' is ready after")
