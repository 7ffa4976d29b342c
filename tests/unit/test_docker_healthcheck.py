"""The health check of the containers says yes only when a token came out."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast

SCRIPT = Path(__file__).parents[2] / "docker" / "healthcheck.py"
READY, BLS, CORE = "/v2/health/ready", "/v2/models/tensorrt_llm_bls", "/v2/models/tensorrt_llm"


@contextmanager
def triton(answers: dict[str, bytes]) -> Iterator[tuple[str, list[tuple[str, object]]]]:
    """Answer the given paths with 200 and a body, as Triton does over HTTP, others with 400; keep what was posted."""
    posted: list[tuple[str, object]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path in answers else 400)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_POST(self) -> None:
            posted.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            self.send_response(200 if self.path in answers else 400)
            self.end_headers()
            self.wfile.write(answers.get(self.path, b""))

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", posted
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def check(url: str) -> tuple[int, str]:
    """Run the script as a container does: exit code and what it says."""
    done = subprocess.run([sys.executable, "-I", str(SCRIPT), url], capture_output=True, text=True, check=False)
    assert done.stdout == ""
    return done.returncode, done.stderr


CHUNK = b'data: {"model_name":"tensorrt_llm_bls","text_output":" Paris"}\n\n'


def test_a_token_is_health() -> None:
    """Ready, the scripted endpoint ready, and a chunk of its stream: exit code 0 and silence."""
    with triton({READY: b"", f"{BLS}/ready": b"", f"{BLS}/generate_stream": CHUNK}) as (url, posted):
        assert check(url) == (0, "")
    assert posted == [(f"{BLS}/generate_stream", {"text_input": "Hello", "stream": True, "max_tokens": 1})]


def test_a_repository_of_the_llm_api_is_asked_by_its_own_names() -> None:
    """With the one model of upstream's llmapi repository the request has that model's inputs."""
    with triton({READY: b"", f"{CORE}/ready": b"", f"{CORE}/generate_stream": CHUNK}) as (url, posted):
        assert check(url) == (0, "")
    assert posted[0][1] == {"text_input": "Hello", "streaming": True, "sampling_param_max_tokens": 1}


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ({}, "the server is not ready"),
        ({READY: b""}, "none of tensorrt_llm_bls, ensemble, tensorrt_llm is ready"),
        ({READY: b"", f"{BLS}/ready": b""}, "HTTPError"),
        ({READY: b"", f"{BLS}/ready": b"", f"{BLS}/generate_stream": b""}, "ended without an answer"),
        ({READY: b"", f"{BLS}/ready": b"", f"{BLS}/generate_stream": b'data: {"error":"engine is gone"}\n'}, "is gone"),
        ({READY: b"", f"{BLS}/ready": b"", f"{BLS}/generate_stream": b"data: <html>\n"}, "JSONDecodeError"),
    ],
)
def test_anything_else_is_not(answers: dict[str, bytes], reason: str) -> None:
    """Exit code 1 and one line that says why."""
    with triton(answers) as (url, _):
        code, said = check(url)
    assert code == 1
    assert reason in said
    assert said.count("\n") == 1


def test_a_server_that_is_not_there_is_not_healthy() -> None:
    """A refused connection is a reason like others."""
    with triton({}) as (url, _):
        gone = url
    code, said = check(gone)
    assert code == 1
    assert "refused" in said
