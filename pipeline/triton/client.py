"""Ask a running Triton server over gRPC: generations as streams of chunks, and what the server serves.

The generated stubs of tritonclient are used directly: one bidirectional stream per generation, read in
the caller's own thread, so that order, status codes, deadlines and cancellation are those of gRPC.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Self

from pipeline.errors import HostError, RequestError, ServeError, ServerDied, TrtpipeError
from pipeline.triton.generation import Chunk, GenerationRequest, Summary, summarize
from pipeline.triton.tensors import ModelFace, Scalar, TensorSpec, decode

PREFERRED_MODELS = ("tensorrt_llm_bls", "ensemble", "tensorrt_llm")
CONTROL_TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class ModelStatus:
    """One model of a server; `reason` is the server's text when the state is not READY."""

    name: str
    version: str
    state: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class EndpointStatus:
    """What answers at an address: live (it answers), ready (every model is), and the models."""

    url: str
    live: bool
    ready: bool = False
    server: str = ""
    models: tuple[ModelStatus, ...] = ()


class _Protocol(NamedTuple):
    grpc: Any
    messages: Any
    config: Any
    stub: Any


def endpoint_status(url: str) -> EndpointStatus:
    """Look at the server at `url` (host:port); a silent address is a status, not an error."""
    protocol = _load_protocol()
    messages = protocol.messages
    with _channel(protocol.grpc, url) as channel:
        stub = protocol.stub(channel)
        try:
            live = stub.ServerLive(messages.ServerLiveRequest(), timeout=CONTROL_TIMEOUT_S).live
            ready = stub.ServerReady(messages.ServerReadyRequest(), timeout=CONTROL_TIMEOUT_S).ready
            about = stub.ServerMetadata(messages.ServerMetadataRequest(), timeout=CONTROL_TIMEOUT_S)
            index = stub.RepositoryIndex(messages.RepositoryIndexRequest(), timeout=CONTROL_TIMEOUT_S)
        except protocol.grpc.RpcError:
            return EndpointStatus(url=url, live=False)
    models = tuple(
        ModelStatus(name=each.name, version=each.version, state=each.state or "UNAVAILABLE", reason=each.reason)
        for each in index.models
    )
    return EndpointStatus(url=url, live=live, ready=ready, server=f"{about.name} {about.version}", models=models)


class Client:
    """A connection to one text model of a server; safe to share between threads.

    Args:
        url: host:port of the gRPC endpoint.
        model: None takes the first of tensorrt_llm_bls, ensemble, tensorrt_llm that takes text.

    Raises:
        ServeError: nothing answers at `url`, or no such model is there.
        HostError: the gRPC client libraries are not installed.
    """

    def __init__(self, url: str, model: str | None = None) -> None:
        self.url = url
        self._protocol = _load_protocol()
        self._channel = _channel(self._protocol.grpc, url)
        self._stub = self._protocol.stub(self._channel)
        try:
            self.face = self._choose((model,) if model else PREFERRED_MODELS)
        except BaseException:
            self.close()
            raise

    @property
    def model(self) -> str:
        """Name of the model that is asked."""
        return self.face.model

    @property
    def rpc_error(self) -> type[Exception]:
        """The exception class of a failed call."""
        error: type[Exception] = self._protocol.grpc.RpcError
        return error

    def __enter__(self) -> Self:
        """Return self."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def close(self) -> None:
        """Close the connection; generations in flight are cancelled."""
        self._channel.close()

    def generate(self, request: GenerationRequest) -> Generation:
        """Send a request; iterate over the result for its chunks.

        Raises:
            RequestError: the model cannot take the request. (What goes wrong later is raised while iterating.)
        """
        message = self._protocol.messages.ModelInferRequest(model_name=self.model, id=uuid.uuid4().hex)
        for tensor in self.face.encode(request):
            message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
            message.raw_input_contents.append(tensor.data)
        # Without it a decoupled model that ends with an empty response gives no sign of the end.
        message.parameters["triton_enable_empty_final_response"].bool_param = True
        sent_ns = time.monotonic_ns()
        call = self._stub.ModelStreamInfer(iter([message]), timeout=request.timeout_s)
        return Generation(self, call, message.id, sent_ns)

    def generate_text(self, request: GenerationRequest) -> tuple[str, Summary]:
        """Generate to the end and return the whole answer with its figures."""
        with self.generate(request) as generation:
            text = "".join(chunk.text for chunk in generation)
        return text, generation.summary()

    def failure(self, error: Any) -> TrtpipeError:  # noqa: ANN401 - grpc has no types
        """Turn an RpcError into the error that says whether the request failed or the server is gone."""
        code, details = error.code().name, error.details()
        if code == "UNAVAILABLE" and not self._is_live():
            return ServerDied(
                f"the server at {self.url} is gone: {details}.",
                hint="See the server's log; 'trtpipe serve' starts it again.",
            )
        if code == "DEADLINE_EXCEEDED":
            return RequestError(f"{code}: model '{self.model}' did not finish in time; the request was cancelled.")
        return RequestError(f"{code}: model '{self.model}' at {self.url} failed the request: {details.rstrip('.')}.")

    def _is_live(self) -> bool:
        request = self._protocol.messages.ServerLiveRequest()
        try:
            return bool(self._stub.ServerLive(request, timeout=CONTROL_TIMEOUT_S).live)
        except self._protocol.grpc.RpcError:
            return False

    def _choose(self, candidates: tuple[str, ...]) -> ModelFace:
        for name in candidates:
            face = self._face(name)
            if face is not None:
                return face
        served = sorted({model.name for model in endpoint_status(self.url).models})
        raise ServeError(
            f"{self.url} serves no text model named {' or '.join(candidates)}.",
            hint=f"It serves: {', '.join(served) or 'nothing'}.",
        )

    def _face(self, name: str) -> ModelFace | None:
        """Read a model's inputs; None when the server has no such model or it takes no text."""
        codes = self._protocol.grpc.StatusCode
        try:
            config = self._stub.ModelConfig(
                self._protocol.messages.ModelConfigRequest(name=name), timeout=CONTROL_TIMEOUT_S
            ).config
        except self._protocol.grpc.RpcError as error:
            if error.code() in {codes.UNAVAILABLE, codes.DEADLINE_EXCEEDED} and not self._is_live():
                raise ServeError(
                    f"no server answers at {self.url}: {error.details()}.", hint="Start one: trtpipe serve REPOSITORY."
                ) from error
            if error.code() in {codes.NOT_FOUND, codes.UNAVAILABLE}:
                return None
            raise self._unexpected(name, error) from error
        batch = (-1,) if config.max_batch_size else ()
        type_name = self._protocol.config.DataType.Name
        inputs = {
            each.name: TensorSpec(
                name=each.name,
                datatype=type_name(each.data_type).removeprefix("TYPE_").replace("STRING", "BYTES"),
                dims=batch + tuple(each.dims),
                optional=each.optional,
            )
            for each in config.input
        }
        if "text_input" not in inputs:
            return None
        return ModelFace(model=name, inputs=inputs, decoupled=config.model_transaction_policy.decoupled)

    def _unexpected(self, name: str, error: Any) -> ServeError:  # noqa: ANN401 - grpc has no types
        return ServeError(f"{self.url} does not describe model '{name}': {error.code().name}: {error.details()}.")


class Generation(Iterator[Chunk]):
    """A generation in flight: iterate for its chunks; close() or leave the `with` block to cancel it.

    Iterating raises RequestError when the request fails, with the gRPC status code in front, and ServerDied
    when the server is gone. An exception in the iteration itself, KeyboardInterrupt included, cancels.
    """

    def __init__(self, client: Client, call: Any, request_id: str, sent_ns: int) -> None:  # noqa: ANN401
        self.request_id = request_id
        self.sent_ns = sent_ns
        self._client = client
        self._call = call
        self._chunks: list[Chunk] = []

    def __enter__(self) -> Self:
        """Return self."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def __next__(self) -> Chunk:
        """Wait for the next chunk; the final one is the last."""
        if self._chunks and self._chunks[-1].final:
            raise StopIteration
        try:
            response = next(self._call)
        except StopIteration:
            raise RequestError(f"{self._client.url} ended the stream without a final response.") from None
        except self._client.rpc_error as error:
            raise self._client.failure(error) from error
        except BaseException:
            self.close()
            raise
        if response.error_message:
            self.close()
            raise RequestError(
                f"model '{self._client.model}' failed the request: {response.error_message.rstrip('.')}."
            )
        chunk = _chunk(response.infer_response, time.monotonic_ns())
        self._chunks.append(chunk)
        return chunk

    def close(self) -> None:
        """Cancel what is still running; harmless when finished."""
        self._call.cancel()

    def summary(self) -> Summary:
        """Return the figures of what came so far."""
        return summarize(self.sent_ns, self._chunks)


def _chunk(response: Any, received_ns: int) -> Chunk:  # noqa: ANN401 - generated class
    outputs: dict[str, tuple[Scalar, ...]] = {
        output.name: decode(output.datatype, raw)
        for output, raw in zip(response.outputs, response.raw_output_contents, strict=True)
        if output.name in _READ
    }
    return Chunk(
        text="".join(str(part) for part in outputs.get("text_output", ())),
        received_ns=received_ns,
        final=response.parameters["triton_final_response"].bool_param,
        tokens=_first_int(outputs.get("num_output_tokens")),
        input_tokens=_first_int(outputs.get("num_input_tokens")),
        finish_reason=str(outputs["finish_reason"][0]) if outputs.get("finish_reason") else None,
        log_probs=tuple(float(value) for value in outputs.get("output_log_probs", ())),
    )


_READ = {"text_output", "num_output_tokens", "num_input_tokens", "finish_reason", "output_log_probs"}


def _first_int(values: tuple[Scalar, ...] | None) -> int | None:
    return int(values[0]) if values else None


def _channel(grpc: Any, url: str) -> Any:  # noqa: ANN401 - grpc has no types
    options = [
        ("grpc.max_receive_message_length", -1),
        # A proxy from the environment must not decide where a request to this address goes.
        ("grpc.enable_http_proxy", 0),
    ]
    return grpc.insecure_channel(url, options=options)


def _load_protocol() -> _Protocol:
    try:
        import grpc
        from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc
    except ImportError as error:
        raise HostError(
            f"the gRPC client is not installed: {error}.", hint="Install it with: pip install 'trtpipe[client]'"
        ) from error
    return _Protocol(grpc, service_pb2, model_config_pb2, service_pb2_grpc.GRPCInferenceServiceStub)
