"""Ports: free, taken, by whom, and owned by which process."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from pipeline.errors import HostError, PortInUse
from pipeline.triton.ports import FIRST_PORT, LAST_PORT, Ports, check_free, free_ports, is_free, owns

pytestmark = pytest.mark.fast

HOST = "127.0.0.1"


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which this process listens."""
    with socket.create_server((HOST, 0)) as listener:
        yield listener.getsockname()[1]


def test_free_ports_are_three_outside_the_ephemeral_range() -> None:
    """Chosen ports differ and no outgoing connection can take them."""
    ports = free_ports(HOST)
    assert len(set(ports)) == 3
    assert all(FIRST_PORT <= port < LAST_PORT and is_free(HOST, port) for port in ports)


def test_a_taken_port_is_refused_with_its_holder(taken: int) -> None:
    """The error names the port, the process and its pid."""
    with pytest.raises(PortInUse, match=rf"port {taken} on {HOST} is in use by .+ \(pid {os.getpid()}\)"):
        check_free(HOST, Ports(http=free_ports(HOST).http, grpc=taken, metrics=free_ports(HOST).metrics))


def test_a_foreign_listener_is_not_ours(taken: int) -> None:
    """Listening on one of three ports, or being another process, is not owning them."""
    other = free_ports(HOST).http
    assert owns(os.getpid(), Ports(http=taken, grpc=taken, metrics=taken))
    assert not owns(os.getpid(), Ports(http=taken, grpc=taken, metrics=other))
    assert not owns(os.getppid(), Ports(http=taken, grpc=taken, metrics=taken))


def test_an_address_of_another_machine_is_a_host_error() -> None:
    """Listening on an address this machine does not have says so."""
    with pytest.raises(HostError, match=r"192\.0\.2\.1"):
        is_free("192.0.2.1", 20_000)
