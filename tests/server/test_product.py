"""The running half of the product as a user meets it: serve, generate, chat; stopped, cancelled and broken.

The repository takes one sequence at a time and lets it be 65536 tokens long, so a second request is answered only when
the first one was really dropped.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.checkpoints import sure_llama
from tests.support.commands import argv, environment, serving, trtpipe, write_config
from tests.support.echo import write_echo_repository

pytestmark = pytest.mark.server

TOKENS = 65_536
ENDLESS = ("generate", "Hello", "--temperature", "0", "--max-tokens", str(TOKENS - 1000))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a config and its finished build in build/tiny."""
    directory = tmp_path_factory.mktemp("product")
    config = write_config(directory, sure_llama(directory / "checkpoint", max_position_embeddings=TOKENS))
    text = config.read_text().replace("max_seq_len: 256", f"max_seq_len: {TOKENS}")
    config.write_text(text.replace("max_batch_size: 4", "max_batch_size: 1"))
    trtpipe("build", config, cwd=directory)
    return directory


@pytest.fixture(scope="module")
def url(project: Path) -> Iterator[str]:
    """The address of a server that was started by the command."""
    with serving("build/tiny", cwd=project) as (_, server):
        yield server["grpc"]


@pytest.fixture(scope="module")
def echo_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server whose model answers with every word of the conversation."""
    directory = tmp_path_factory.mktemp("echo")
    write_echo_repository(directory / "echo")
    with serving("echo", cwd=directory) as (_, server):
        yield server["grpc"]


def _start(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        argv(*arguments), cwd=cwd, env=environment(), stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )


def _read(process: subprocess.Popen[str], size: int) -> str:
    """Read so many characters as soon as they are there."""
    assert process.stdout is not None
    return process.stdout.read(size)


def test_an_answer_is_printed_while_it_is_made(project: Path, url: str) -> None:
    """Text arrives although the answer has not ended, and Ctrl-C ends it with 130."""
    with _start(*ENDLESS, "--url", url, cwd=project) as process:
        assert _read(process, 4)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in stderr


def test_the_second_request_waits_while_the_first_runs(project: Path, url: str) -> None:
    """There is one place, which the next two tests rely on."""
    with _start(*ENDLESS, "--url", url, cwd=project) as process:
        _read(process, 4)
        outcome = trtpipe("generate", "Hi", "--max-tokens", "4", "--timeout", "3", "--url", url, cwd=project, code=29)
        process.kill()
    assert "did not finish in time" in outcome.stderr


def test_ctrl_c_frees_the_place_on_the_server(project: Path, url: str) -> None:
    """The only place in the batch takes the next request, which would have to wait for a minute otherwise."""
    with _start(*ENDLESS, "--url", url, cwd=project) as process:
        _read(process, 4)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    outcome = trtpipe("generate", "Hi", "--max-tokens", "4", "--timeout", "15", "--url", url, cwd=project)
    assert "output tokens 4 (length)" in outcome.stderr


def test_a_client_that_is_killed_frees_the_place_too(project: Path, url: str) -> None:
    """Nothing on the server depends on a client's good behaviour."""
    with _start(*ENDLESS, "--url", url, cwd=project) as process:
        _read(process, 4)
        process.kill()
    trtpipe("generate", "Hi", "--max-tokens", "4", "--timeout", "15", "--url", url, cwd=project)


def test_a_request_that_cannot_fit_is_refused_with_numbers(project: Path, url: str) -> None:
    """Exit code 29, and the server goes on."""
    outcome = trtpipe("generate", "Hi", "--max-tokens", str(2 * TOKENS), "--url", url, cwd=project, code=29)
    assert str(TOKENS) in outcome.stderr


def test_chat_keeps_the_conversation_until_new(tmp_path: Path, echo_url: str) -> None:
    """Each answer shows what was sent: everything so far, after /new only what follows, after /exit nothing."""
    with _start("chat", "--system", "be kind", "--url", echo_url, cwd=tmp_path) as process:
        stdout, stderr = process.communicate("one\ntwo\n/new\nthree\n/exit\nfour\n", timeout=60)
    assert process.returncode == 0, stderr
    answers = [line.split() for line in stdout.splitlines()]
    first = ["be", "kind", "one"]
    assert answers == [first, [*first, *first, "two"], ["be", "kind", "three"]]


def test_ctrl_c_in_a_chat_ends_the_answer_and_not_the_chat(tmp_path: Path, echo_url: str) -> None:
    """What comes next is answered."""
    with _start("chat", "--url", echo_url, cwd=tmp_path) as process:
        assert process.stdin is not None
        process.stdin.write("slow <wait:60> end\n")
        process.stdin.flush()
        assert _read(process, 4) == "slow"
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate("/new\nagain\n", timeout=30)
    assert process.returncode == 0, stderr
    cancelled, again = stdout.splitlines()
    assert "[cancelled]" in cancelled
    assert "end" not in cancelled
    assert again.strip() == "again"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_that_was_asked_for_is_success_and_leaves_nothing(project: Path, number: signal.Signals) -> None:
    """Exit code 0; no process and no port stays."""
    with serving("build/tiny", cwd=project) as (process, server):
        family = psutil.Process(process.pid).children(recursive=True)
        assert server["pid"] in {each.pid for each in family}
        process.send_signal(number)
        assert process.wait(timeout=60) == 0
    _ended, alive = psutil.wait_procs(family, timeout=15)
    assert not alive
    for key in ("grpc", "http"):
        host, _, port = server[key].removeprefix("http://").partition(":")
        with socket.socket() as probe:
            assert probe.connect_ex((host, int(port))) != 0


def test_a_taken_port_names_its_holder(project: Path) -> None:
    """Exit code 27, and which process to stop."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        outcome = trtpipe("serve", "build/tiny", "--http-port", port, cwd=project, code=27)
    assert port in outcome.stderr
    assert f"(pid {os.getpid()})" in outcome.stderr


def test_a_directory_without_models_is_not_served(project: Path) -> None:
    """Exit code 8, and nothing is started."""
    assert "no model repository" in trtpipe("serve", "checkpoint", cwd=project, code=8).stderr


def test_a_damaged_model_gives_its_own_reason(project: Path, tmp_path: Path) -> None:
    """The model is named with what its runtime said of the file."""
    shutil.copytree(project / "build" / "tiny", tmp_path / "tiny")
    for graph in (tmp_path / "tiny").rglob("openvino_model.xml"):
        graph.write_text("<net")
    free = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")
    outcome = trtpipe("serve", "tiny", *free, cwd=tmp_path, code=8)
    assert "model 'tensorrt_llm'" in outcome.stderr
    assert "openvino_model.xml" in outcome.stderr
    assert "tiny.server.log" in outcome.stderr
    assert "internal error" not in outcome.stderr


def test_a_server_that_dies_while_loading_is_told_as_such(project: Path) -> None:
    """Exit code 28, with the signal."""
    free = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")
    with _start("serve", "build/tiny", *free, cwd=project) as process:
        server: list[psutil.Process] = []
        while not server:
            assert process.poll() is None
            family = psutil.Process(process.pid).children(recursive=True)
            server = [each for each in family if each.name() == "tritonserver"]
            time.sleep(0.01)
        server[0].kill()
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 28
    assert "killed by SIGKILL while loading" in stderr


@pytest.mark.parametrize(
    "line",
    [
        "build tiny.yaml", "quantize tiny.yaml", "verify tiny.yaml", "compile tiny.yaml", "emit tiny.yaml",
        "plan tiny.yaml", "config check tiny.yaml", "config show tiny.yaml", "cache ls", "cache show tiny@emit",
        "cache verify", "cache gc --dry-run", "doctor", "check build/tiny", "matrix Llama",
    ],
)  # fmt: skip
def test_json_is_one_document_and_nothing_else(line: str, project: Path) -> None:
    """All of stdout parses."""
    assert json.loads(trtpipe(*line.split(), "--json", cwd=project).stdout)


def test_json_of_an_answer_is_one_document(project: Path, url: str) -> None:
    """The stream is not shown beside it."""
    document = trtpipe("generate", "Hi", "--max-tokens", "4", "--json", "--url", url, cwd=project).document
    assert document["summary"]["output_tokens"] == 4
    assert document["answer"]


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("build nothing.yaml", 3),
        ("plan tiny.yaml --set engine.max_batch_sizes=3", 3),
        ("config check tiny.yaml --set source.path=nothing", 21),
        ("cache show nothing", 3),
        ("generate Hi --url 127.0.0.1:9", 8),
        ("serve checkpoint", 8),
    ],
)
def test_json_of_a_failure_is_one_document_too(line: str, code: int, project: Path) -> None:
    """It says the kind, the words and the exit code; people read the same on stderr."""
    outcome = trtpipe(*line.split(), "--json", cwd=project, code=code)
    error = outcome.document["error"]
    assert error["exit_code"] == code
    assert error["message"] in outcome.stderr
