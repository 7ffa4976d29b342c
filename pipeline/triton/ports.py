"""TCP ports of a server: which are free, who holds one, and whether a process really owns them.

The last question matters because a Triton that is stopping keeps its ports for half a minute and
answers readiness probes meant for its successor.
"""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Protocol

import psutil

from pipeline.errors import HostError, PortInUse

# Guard: below Linux's ephemeral range (32768..60999 by default), so that no outgoing connection takes a
# chosen port while the models load and before Triton binds it.
FIRST_PORT = 20_000
LAST_PORT = 32_000
ATTEMPTS = 200


class _Connection(Protocol):
    """What is used of psutil's connection tuples."""

    @property
    def status(self) -> str: ...

    @property
    def laddr(self) -> Sequence[object]: ...


@dataclass(frozen=True, kw_only=True)
class Ports:
    """The three ports of one Triton server."""

    http: int
    grpc: int
    metrics: int

    def __iter__(self) -> Iterator[int]:
        """Iterate over http, grpc, metrics."""
        return iter(astuple(self))


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A process that listens on a port."""

    pid: int
    name: str

    def __str__(self) -> str:
        """Name and pid."""
        return f"{self.name} (pid {self.pid})"


def is_free(host: str, port: int) -> bool:
    """Tell whether a server could listen on `host:port` now.

    Raises:
        HostError: `host` is not an address of this machine, or the port needs privileges.
    """
    try:
        with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
            # As Triton does: a port whose last connections are in TIME_WAIT is free, one with a listener is not.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except (OSError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            return False
        raise HostError(f"cannot listen on {host}:{port}: {error}.", hint="Use --host 127.0.0.1.") from error
    return True


def free_ports(host: str) -> Ports:
    """Choose three ports of `host` that are free now; another process may still win the race for one."""
    chosen: list[int] = []
    draw = random.SystemRandom()
    for _attempt in range(ATTEMPTS):
        port = draw.randrange(FIRST_PORT, LAST_PORT)
        if port not in chosen and is_free(host, port):
            chosen.append(port)
        if len(chosen) == len(("http", "grpc", "metrics")):
            return Ports(http=chosen[0], grpc=chosen[1], metrics=chosen[2])
    raise PortInUse(f"no three free ports in {FIRST_PORT}..{LAST_PORT} on {host} after {ATTEMPTS} draws.")


def check_free(host: str, ports: Ports) -> None:
    """Raise PortInUse, naming the first port that is taken and its holder when it can be seen."""
    for port in ports:
        if not is_free(host, port):
            raise port_in_use(host, port)


def port_in_use(host: str, port: int) -> PortInUse:
    """Build the error for a taken port."""
    holder = find_holder(port)
    by = f"{holder}" if holder else "a process that this user may not see"
    return PortInUse(
        f"port {port} on {host} is in use by {by}.", hint="Stop that process, or leave the ports out to take free ones."
    )


def find_holder(port: int) -> Holder | None:
    """Find the process that listens on `port`; None when there is none or it belongs to another user."""
    for connection in psutil.net_connections(kind="tcp"):
        if _listens_on(connection, port) and connection.pid:
            try:
                return Holder(pid=connection.pid, name=psutil.Process(connection.pid).name())
            except psutil.NoSuchProcess:
                return None
    return None


def owns(pid: int, ports: Ports) -> bool:
    """Tell whether process `pid` itself listens on every one of `ports`."""
    try:
        connections = psutil.Process(pid).net_connections(kind="tcp")
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
    return all(any(_listens_on(connection, port) for connection in connections) for port in ports)


def _listens_on(connection: _Connection, port: int) -> bool:
    # laddr is an empty tuple on a socket that is not bound.
    return connection.status == psutil.CONN_LISTEN and bool(connection.laddr) and connection.laddr[1] == port


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
