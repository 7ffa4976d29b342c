"""One real tritonserver with the echo model: serving, streaming, cancelling, status."""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.errors import PortInUse, RequestError, ServeError
from pipeline.triton.client import Client, endpoint_status
from pipeline.triton.generation import GenerationRequest
from pipeline.triton.ports import Ports, free_ports
from pipeline.triton.server import Server
from tests.support.echo import write_echo_repository

pytestmark = pytest.mark.server

SLOW_PROMPT = "one " + "<wait:0.05> more " * 200


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that is shared by the module."""
    folder = tmp_path_factory.mktemp("serving")
    with Server(write_echo_repository(folder / "repository"), log_path=folder / "server.log") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Client]:
    """A client of that server."""
    with Client(server.grpc_url) as connected:
        yield connected


def cancelled_streams(client: Client) -> int:
    """Ask the model how many streams it saw cancelled."""
    return int(client.generate_text(GenerationRequest(prompt="<cancelled>"))[0])


def await_cancelled(client: Client, expected: int) -> None:
    """Wait until the model has seen `expected` cancellations."""
    deadline = time.monotonic() + 10
    while cancelled_streams(client) < expected:
        assert time.monotonic() < deadline, f"the model did not see {expected} cancellations"
        time.sleep(0.02)


def test_ready_means_every_model_is_ready(server: Server) -> None:
    """A server that was entered serves its models, and metrics tell of them."""
    assert [(model.name, model.state) for model in server.models()] == [("tensorrt_llm_bls", "READY")]
    assert "nv_inference_request_success" in server.metrics()


def test_answer_streams_in_order_with_token_counts(client: Client) -> None:
    """Chunks come one by one, the last is final, and nothing is lost."""
    words = [f"w{index}" for index in range(50)] + ["größe", "日本語"]
    generation = client.generate(GenerationRequest(prompt=" ".join(words)))
    chunks = list(generation)
    assert "".join(chunk.text for chunk in chunks).split() == words
    assert [chunk.final for chunk in chunks] == [False] * len(words) + [True]
    summary = generation.summary()
    assert (summary.input_tokens, summary.output_tokens, summary.complete) == (len(words), len(words), True)


def test_first_chunk_arrives_before_the_last_is_made(client: Client) -> None:
    """Streaming is not buffered: the first chunk is here while the model still waits."""
    generation = client.generate(GenerationRequest(prompt="a <wait:1> b"))
    first, second, _final = list(generation)
    assert second.received_ns - first.received_ns > 0.9e9


def test_messages_reach_the_model(client: Client) -> None:
    """A conversation is sent as such."""
    conversation = ({"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"})
    assert client.generate_text(GenerationRequest(messages=conversation))[0].split() == ["be", "kind", "hi"]


def test_max_tokens_limits_the_answer(client: Client) -> None:
    """Numbers arrive as numbers."""
    assert client.generate_text(GenerationRequest(prompt="a b c d", max_tokens=2))[0].split() == ["a", "b"]


def test_an_error_in_the_stream_is_raised_after_what_came(client: Client) -> None:
    """Chunks before the error are delivered, then the model's own words, and the server goes on."""
    generation = client.generate(GenerationRequest(prompt="a b <error:no-such-adapter> c"))
    assert [next(generation).text, next(generation).text] == ["a ", "b "]
    with pytest.raises(RequestError, match="no-such-adapter"):
        next(generation)
    assert client.generate_text(GenerationRequest(prompt="fine"))[0] == "fine "


def test_what_the_model_lacks_is_refused_by_name(client: Client) -> None:
    """Nothing is sent when the model has no such input."""
    with pytest.raises(RequestError, match="top_k: model 'tensorrt_llm_bls' has no input for it"):
        client.generate(GenerationRequest(prompt="a", top_k=3))


def test_closing_a_stream_cancels_it_on_the_server(client: Client) -> None:
    """The model learns that nobody reads any more."""
    before = cancelled_streams(client)
    with client.generate(GenerationRequest(prompt=SLOW_PROMPT)) as generation:
        assert next(generation).text == "one "
    assert not generation.summary().complete
    await_cancelled(client, before + 1)


def test_an_exception_while_waiting_cancels(client: Client) -> None:
    """Ctrl-C in the middle of an answer stops the server's work too."""
    before = cancelled_streams(client)
    generation = client.generate(GenerationRequest(prompt="one <wait:0.3> two <wait:0.3> three"))
    next(generation)
    interrupter = threading.Timer(0.1, _thread.interrupt_main)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        next(generation)
    await_cancelled(client, before + 1)


def test_a_deadline_ends_the_request_on_both_sides(client: Client) -> None:
    """The client gets an error in time and the model a cancellation."""
    before = cancelled_streams(client)
    with pytest.raises(RequestError, match="DEADLINE_EXCEEDED"):
        list(client.generate(GenerationRequest(prompt=SLOW_PROMPT, timeout_s=0.3)))
    await_cancelled(client, before + 1)


def test_many_dropped_streams_leave_the_server_well(server: Server, client: Client) -> None:
    """Clients that leave in mid-stream, several at a time, do not hurt it."""
    before = cancelled_streams(client)

    def drop() -> None:
        for _ in range(5):
            with client.generate(GenerationRequest(prompt=SLOW_PROMPT)) as generation:
                next(generation)

    threads = [threading.Thread(target=drop) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    await_cancelled(client, before + 30)
    server.check()


def test_status_tells_what_is_served(server: Server) -> None:
    """Live, ready and the models with their states."""
    status = endpoint_status(server.grpc_url)
    assert (status.live, status.ready) == (True, True)
    assert [(model.name, model.state) for model in status.models] == [("tensorrt_llm_bls", "READY")]


def test_status_of_a_silent_port_is_not_live() -> None:
    """No server is an answer, not an exception."""
    assert not endpoint_status(f"127.0.0.1:{free_ports('127.0.0.1').grpc}").live


def test_a_client_without_server_says_so() -> None:
    """Connecting to nothing names the address."""
    url = f"127.0.0.1:{free_ports('127.0.0.1').grpc}"
    with pytest.raises(ServeError, match=f"no server answers at {url}"):
        Client(url)


def test_an_unknown_model_lists_what_is_served(server: Server) -> None:
    """Asking for a model that is not there names those that are."""
    with pytest.raises(ServeError, match="serves no text model named nope") as missing:
        Client(server.grpc_url, model="nope")
    assert "tensorrt_llm_bls" in missing.value.hint


def test_a_taken_port_names_its_holder(server: Server, tmp_path: Path) -> None:
    """A second server on the same port is refused before it starts, and the first is named."""
    spare = free_ports("127.0.0.1")
    wanted = Ports(http=spare.http, grpc=server.ports.grpc, metrics=spare.metrics)
    with (
        pytest.raises(PortInUse, match=rf"port {wanted.grpc} .+ tritonserver \(pid {server.pid}\)"),
        Server(server.repository, log_path=tmp_path / "log", ports=wanted),
    ):
        pass


def test_two_servers_serve_one_repository(server: Server, client: Client, tmp_path: Path) -> None:
    """Free ports and own shared memory: neither disturbs the other, stopping one leaves the other."""
    with Server(server.repository, log_path=tmp_path / "log") as second, Client(second.grpc_url) as other:
        assert other.generate_text(GenerationRequest(prompt="two"))[0] == "two "
    assert client.generate_text(GenerationRequest(prompt="one"))[0] == "one "
