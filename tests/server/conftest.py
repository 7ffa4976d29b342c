"""What server tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pipeline.config.deployment import ServingConfig
from pipeline.triton.repository import emit
from pipeline.triton.server import Server
from tests.support.triton_repo import tiny_engine


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """GRPC address of a server with the emitted repository of a tiny engine, one for each file of tests."""
    directory = tmp_path_factory.mktemp("served")
    engine = tiny_engine(directory)
    emit(engine, ServingConfig(), name="tiny", out=directory / "repository")
    with Server(directory / "repository", log_path=directory / "server.log", ready_timeout_s=120) as server:
        yield f"127.0.0.1:{server.ports.grpc}"
