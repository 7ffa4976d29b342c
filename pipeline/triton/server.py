"""Run one tritonserver as a subprocess: start it, know when it is ready, say why it is not, stop it cleanly.

Only loopback HTTP and the server's log are used to watch it. What answers is believed only when the
process that was started here owns the ports.
"""

from __future__ import annotations

import http.client
import json
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from types import TracebackType
from typing import Self

from pipeline.core.progress import Progress, Silent
from pipeline.errors import HostError, Problem, ServeError, ServerDied
from pipeline.triton import guardian
from pipeline.triton import ports as tcp
from pipeline.triton.client import ModelStatus
from pipeline.triton.installation import environment, find_tritonserver, link_backends
from pipeline.triton.ports import Ports

EXIT_TIMEOUT_S = 20
"""Time that requests in flight get when the server is stopped."""
KILL_MARGIN_S = 10.0
POLL_S = 0.05
HTTP_TIMEOUT_S = 5.0
TAIL_LINES = 20


class Server:
    """A tritonserver that serves every model of `repository`; use it as a context manager.

    Entering starts the server and returns when every model is READY; leaving stops it and everything it
    started. If this process dies, kill -9 included, the server stops as well (see guardian.py).

    Args:
        repository: Triton model repository.
        log_path: file for all output of the server and its Python models; replaced at each start.
        host: address to listen on.
        ports: ports to listen on; None takes free ones.
        ready_timeout_s: time for all models to become READY.
        progress: is told what is loading and what is ready.
    """

    def __init__(
        self,
        repository: Path,
        *,
        log_path: Path,
        host: str = "127.0.0.1",
        ports: Ports | None = None,
        ready_timeout_s: float = 600.0,
        progress: Progress | None = None,
    ) -> None:
        self.repository = repository.resolve()
        self.log_path = log_path.resolve()
        self.host = host
        self.ports = ports or tcp.free_ports(host)
        self._ready_timeout_s = ready_timeout_s
        self._progress = progress or Silent()
        self._guardian: subprocess.Popen[bytes] | None = None
        self.pid = 0
        self._log_offset = 0
        self._scratch: Path | None = None

    @property
    def grpc_url(self) -> str:
        """`host:port` for gRPC clients."""
        return f"{self.host}:{self.ports.grpc}"

    @property
    def http_url(self) -> str:
        """`http://host:port` for HTTP clients."""
        return f"http://{self.host}:{self.ports.http}"

    def __enter__(self) -> Self:
        """Start and wait for readiness; nothing runs any more when this raises."""
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the server."""
        self.stop()

    def start(self) -> None:
        """Start the process; returns before any model is loaded.

        Raises:
            ServeError: the repository has no model.
            HostError: no usable tritonserver.
            PortInUse: a port is taken, by whom when that can be seen.
        """
        if not list(self.repository.glob("*/config.pbtxt")):
            raise ServeError(
                f"{self.repository} is no model repository: no folder in it has a config.pbtxt.",
                hint="Give the folder that 'trtpipe build' or 'trtpipe emit' wrote.",
            )
        installation = find_tritonserver()
        tcp.check_free(self.host, self.ports)
        try:
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            self.log_path.write_bytes(b"")
        except OSError as error:
            raise HostError(
                f"the server log {self.log_path} cannot be written: {error.strerror}.",
                hint="Name a place for it that can: --log-file.",
            ) from error
        self._log_offset = 0
        scratch = self._scratch = Path(tempfile.mkdtemp(prefix="trtpipe-serve-"))
        shm_prefix = f"trtpipe-{uuid.uuid4().hex[:12]}-"
        launch = guardian.Launch(
            argv=server_argv(
                installation.binary,
                self.repository,
                backends=link_backends(installation, scratch / "backends"),
                host=self.host,
                ports=self.ports,
                shm_prefix=shm_prefix,
            ),
            env=environment(installation),
            log=str(self.log_path),
            scratch=str(scratch),
            shm_prefix=shm_prefix,
            stop_timeout_s=EXIT_TIMEOUT_S + KILL_MARGIN_S / 2,
        )
        self._guardian = subprocess.Popen(
            [sys.executable, "-I", "-S", guardian.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            # Guard: a session of its own, so that Ctrl-C on the terminal reaches us only and we stop it in order.
            start_new_session=True,
        )
        _order(self._guardian, json.dumps(launch).encode() + b"\n")
        event = _next_event(self._guardian, HTTP_TIMEOUT_S)
        if "pid" not in event:
            self.stop()
            raise HostError(f"{installation.binary} could not be started.", log_path=self.log_path)
        self.pid = event["pid"]

    def wait_ready(self) -> None:
        """Return when every model of the repository is READY.

        Raises:
            ServeError: a model failed to load, with Triton's reason, or time is up.
            ServerDied: the process ended while loading.
            PortInUse: another process took a port in the meantime.
        """
        deadline = time.monotonic() + self._ready_timeout_s
        loading: dict[str, float] = {}
        while time.monotonic() < deadline:
            self._report_loading(loading)
            self._check_loading()
            if self._answers("/v2/health/live"):
                self._require_all_ready()
                if self._answers("/v2/health/ready"):
                    _order(self._guardian, b"watch\n")
                    return
            time.sleep(POLL_S)
        waiting = [f"'{name}' (for {time.monotonic() - since:.0f} s)" for name, since in sorted(loading.items())]
        raise ServeError(
            f"not READY in {self._ready_timeout_s:g} s; still loading: {', '.join(waiting) or 'the server itself'}.\n"
            + self.log_tail(),
            log_path=self.log_path,
            hint="Give a longer ready timeout, or see the log for what the model waits for.",
        )

    def wait(self) -> None:
        """Block until the server ends: ServerDied when nobody stopped it. Signals are the caller's affair."""
        running = self._guardian
        if running is not None:
            running.wait()
            self.check()

    def check(self) -> None:
        """Raise ServerDied when the server, which should be serving, is gone."""
        if self._guardian is not None and self._guardian.poll() is not None:
            raise self._died("serving")

    def stop(self) -> None:
        """Finish requests in flight, unload the models, end every process; harmless when stopped already."""
        running, self._guardian = self._guardian, None
        if running is None:
            return
        _order(running, b"stop\n")
        try:
            running.wait(EXIT_TIMEOUT_S + KILL_MARGIN_S)
        except subprocess.TimeoutExpired:
            running.kill()  # takes the server along: PR_SET_PDEATHSIG in guardian.py
            running.wait()
        finally:
            for pipe in (running.stdin, running.stdout):
                if pipe is not None:
                    pipe.close()
            if self._scratch is not None:  # still there when the guardian was killed
                shutil.rmtree(self._scratch, ignore_errors=True)

    def models(self) -> tuple[ModelStatus, ...]:
        """Ask the running server for the state of every model in its repository."""
        index = json.loads(self._request("POST", "/v2/repository/index"))
        return tuple(
            ModelStatus(
                name=each["name"],
                version=each.get("version", ""),
                state=each.get("state", "UNAVAILABLE"),
                reason=each.get("reason", ""),
            )
            for each in index
        )

    def metrics(self) -> str:
        """Fetch the server's metrics in Prometheus text format."""
        return self._request("GET", "/metrics", port=self.ports.metrics)

    def log_tail(self, lines: int = TAIL_LINES) -> str:
        """Return the last lines of the log that say something (no tables, no blank lines)."""
        text = self.log_path.read_text(errors="replace")
        telling = [line for line in text.splitlines() if line.strip() and not line.startswith(("|", "+-"))]
        return "\n".join(telling[-lines:])

    def _answers(self, path: str) -> bool:
        """Tell whether *our* process answers `path` with success."""
        if not tcp.owns(self.pid, self.ports):
            return False
        try:
            self._request("GET", path)
        except ServeError:
            return False
        return True

    def _request(self, method: str, path: str, port: int | None = None) -> str:
        port = port or self.ports.http
        connection = http.client.HTTPConnection(self.host, port, timeout=HTTP_TIMEOUT_S)
        try:
            connection.request(method, path)
            response = connection.getresponse()
            body = response.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            self.check()
            raise ServeError(f"{method} http://{self.host}:{port}{path} failed: {error}.") from error
        finally:
            connection.close()
        if response.status != http.client.OK:
            raise ServeError(f"{method} http://{self.host}:{port}{path} answered {response.status}: {body}.")
        return body

    def _report_loading(self, loading: dict[str, float]) -> None:
        """Tell progress what the log says since the last call; `loading` maps model to its start time."""
        with self.log_path.open("rb") as log:
            log.seek(self._log_offset)
            new = log.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._log_offset += len(whole)
        for match in re.finditer(
            r"\"loading: (\S+):\d+\"|\"successfully loaded '(\S+)'\"", whole.decode("utf-8", "replace")
        ):
            if match[1]:
                loading[match[1]] = time.monotonic()
                self._progress.note(f"loading model '{match[1]}'")
            else:
                seconds = time.monotonic() - loading.pop(match[2], time.monotonic())
                self._progress.note(f"model '{match[2]}' is ready after {seconds:.1f} s")

    def _check_loading(self) -> None:
        """Raise PortInUse or ServerDied when the server ended while loading."""
        if self._guardian is None or self._guardian.poll() is None:
            return
        if re.search(r"failed to start \w+ service|already in use", self.log_tail(), re.IGNORECASE):
            tcp.check_free(self.host, self.ports)
        raise self._died("loading")

    def _require_all_ready(self) -> None:
        """Raise ServeError for models that failed; the endpoints open only when loading is over."""
        failed = [model for model in self.models() if model.state != "READY"]
        if not failed:
            return
        # A model that merely depends on a failed one is listed after the cause.
        failed.sort(key=lambda model: ("depends on" in model.reason, model.name))
        names = ", ".join(f"'{model.name}' is {model.state}" for model in failed)
        raise ServeError(
            f"cannot serve {self.repository}: {names}.",
            problems=[
                Problem(where=f"model '{each.name}'", message=each.reason or "no reason given") for each in failed
            ],
            log_path=self.log_path,
        )

    def _died(self, phase: str) -> ServerDied:
        event = _next_event(self._guardian, 0) if self._guardian is not None else guardian.Event()
        code = event.get("exit")
        if code is None:
            how = "is gone: its guardian process was killed"
        elif "lost" in event:
            how = f"was stopped because the process of one of its Python models died ({event['lost']})"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"exited with code {code}"
        killed = code == -signal.SIGKILL and "lost" not in event
        hint = "The kernel kills on memory shortage: see dmesg." if killed else ""
        return ServerDied(
            f"tritonserver (pid {self.pid}) {how} while {phase}. Last lines of its log:\n{self.log_tail()}",
            log_path=self.log_path,
            hint=hint,
        )


def server_argv(
    binary: Path, repository: Path, *, backends: Path, host: str, ports: Ports, shm_prefix: str
) -> list[str]:
    """Build tritonserver's command line; pure.

    `--exit-on-error=false` keeps a server whose models failed to load alive long enough to be asked, model by
    model, why; readiness stays strict.
    """
    return [
        str(binary),
        f"--model-repository={repository}",
        "--model-control-mode=none",
        "--disable-auto-complete-config",
        "--exit-on-error=false",
        "--strict-readiness=true",
        f"--exit-timeout-secs={EXIT_TIMEOUT_S}",
        f"--http-address={host}",
        f"--http-port={ports.http}",
        f"--grpc-address={host}",
        f"--grpc-port={ports.grpc}",
        f"--metrics-address={host}",
        f"--metrics-port={ports.metrics}",
        f"--backend-directory={backends}",
        f"--backend-config=python,shm-region-prefix-name={shm_prefix}",
        "--log-verbose=0",
        "--log-format=ISO8601",
    ]


def _order(running: subprocess.Popen[bytes] | None, line: bytes) -> None:
    """Write one line to the guardian; when it is gone already there is nobody to order."""
    if running is None or running.stdin is None or running.stdin.closed:
        return
    try:
        running.stdin.write(line)
    except BrokenPipeError:
        return


def _next_event(running: subprocess.Popen[bytes], timeout_s: float) -> guardian.Event:
    """Read the guardian's next answer; empty when there is none in time."""
    pipe = running.stdout
    if pipe is None or not select.select([pipe], [], [], timeout_s)[0]:
        return {}
    line = pipe.readline()
    event: guardian.Event = json.loads(line) if line else {}
    return event
