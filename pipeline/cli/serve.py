"""serve, generate, chat: the running half of the product."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli import options, output
from pipeline.cli.progress import for_this_terminal

if TYPE_CHECKING:
    from pipeline.triton.client import Client
    from pipeline.triton.generation import GenerationRequest, Summary
    from pipeline.triton.ports import Ports
    from pipeline.triton.server import Server

DEFAULT_PORTS = (8000, 8001, 8002)
PORT = click.IntRange(0, 65535)


@click.command()
@click.argument("repository", type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--http-port", type=PORT, help="Default 8000; 0 takes a free one, and so does --ask.")
@click.option("--grpc-port", type=PORT, help="Default 8001; 0 takes a free one, and so does --ask.")
@click.option("--metrics-port", type=PORT, help="Default 8002; 0 takes a free one, and so does --ask.")
@click.option("--log-file", type=click.Path(path_type=Path), help="Server log; default beside the repository.")
@click.option("--ready-timeout", "ready_timeout_s", type=float, default=300.0, show_default=True, help="Seconds.")
@click.option("--ask", metavar="QUESTION", help="Ask one question when ready, print the answer, stop.")
@options.json_option
def serve(
    repository: Path,
    host: str,
    http_port: int | None,
    grpc_port: int | None,
    metrics_port: int | None,
    log_file: Path | None,
    ready_timeout_s: float,
    ask: str | None,
    as_json: bool,
) -> None:
    """Serve REPOSITORY on a real tritonserver until Ctrl-C.

    Ready means that the model has produced tokens. SIGINT and SIGTERM stop the server cleanly.

    \b
    trtpipe serve build/my
    trtpipe serve build/my --ask "What is the capital of France?"
    """
    from pipeline.triton.server import Server

    server = Server(
        repository,
        log_path=log_file or repository.resolve().with_name(repository.resolve().name + ".server.log"),
        host=host,
        ports=_ports(host, (http_port, grpc_port, metrics_port), free=ask is not None),
        ready_timeout_s=ready_timeout_s,
        progress=for_this_terminal(),
    )
    started = time.monotonic()
    with server:
        ready_s = time.monotonic() - started
        if ask is not None:
            _ask(server, ask, repository, ready_s, as_json=as_json)
            stopping = time.monotonic()
        else:
            _serve(server, ready_s, as_json=as_json)
            stopping = time.monotonic()
    if not as_json:
        click.echo(f"server stopped in {output.seconds(time.monotonic() - stopping)}; log: {server.log_path}", err=True)


def _ports(host: str, wanted: Sequence[int | None], *, free: bool) -> Ports:
    from pipeline.triton.ports import Ports, free_ports

    spare = free_ports(host)
    defaults = tuple(spare) if free else DEFAULT_PORTS
    chosen = [
        default if port is None else (port or other)
        for port, default, other in zip(wanted, defaults, spare, strict=True)
    ]
    return Ports(http=chosen[0], grpc=chosen[1], metrics=chosen[2])


def _announce(server: Server, ready_s: float, *, as_json: bool) -> None:
    document = {
        "grpc": server.grpc_url,
        "http": server.http_url,
        "metrics": f"http://{server.host}:{server.ports.metrics}/metrics",
        "pid": server.pid,
        "log": str(server.log_path),
        "ready_s": round(ready_s, 3),
    }
    if as_json:
        output.emit_json(document)
        sys.stdout.flush()
        return
    click.echo(output.table(("serving", ""), list(document.items())))
    click.echo(f'\nnext: trtpipe generate "Hello" --url {server.grpc_url}      (Ctrl-C stops the server)')


def _serve(server: Server, ready_s: float, *, as_json: bool) -> None:
    """Block until the server dies (an error) or the user ends it (a clean stop, exit code 0)."""
    try:
        # Guard: inside, for who reads that the server is ready may stop it before the next line of ours runs.
        _announce(server, ready_s, as_json=as_json)
        server.wait()
    except KeyboardInterrupt:
        click.echo("stopping: requests in flight are finished first", err=True)


def _ask(server: Server, question: str, repository: Path, ready_s: float, *, as_json: bool) -> None:
    from pipeline.triton.client import Client
    from pipeline.triton.generation import GenerationRequest

    request = GenerationRequest(messages=({"role": "user", "content": question},), temperature=0.0)
    with Client(server.grpc_url) as client:
        if not as_json:
            click.echo(f"\nasking model '{client.model}' at {server.grpc_url}: {question}\n")
        text, summary = _stream(client, request, quiet=as_json)
    if as_json:
        output.emit_json({"answer": text, "ready_s": round(ready_s, 3), "summary": asdict(summary)})
        return
    rows = [("server ready after", output.seconds(ready_s)), *_figures(summary)]
    click.echo("\n" + output.table(("figure", "value"), rows))
    click.echo(
        "\nnext commands:\n"
        f"  trtpipe serve {repository}\n"
        '  trtpipe generate "Write a haiku about paging."      (in another terminal)\n'
        "  trtpipe chat\n"
    )


def _stream(client: Client, request: GenerationRequest, *, quiet: bool = False) -> tuple[str, Summary]:
    """Print the answer as it comes; Ctrl-C cancels it on the server."""
    parts = []
    try:
        with client.generate(request) as generation:
            for chunk in generation:
                parts.append(chunk.text)
                if not quiet:
                    click.echo(chunk.text, nl=False)
                    sys.stdout.flush()
    finally:
        if parts and not quiet:
            click.echo()
    return "".join(parts), generation.summary()


def _figures(summary: Summary) -> list[tuple[str, str]]:
    def shown(value: float | None, unit: str) -> str:
        return "not known" if value is None else f"{value:.1f} {unit}"

    return [
        ("input tokens", str(summary.input_tokens)),
        ("output tokens", f"{summary.output_tokens} ({summary.finish_reason or 'end not told'})"),
        ("TTFT", shown(summary.ttft_ms, "ms")),
        ("mean ITL", shown(summary.mean_itl_ms, "ms")),
        ("end to end", shown(summary.e2e_ms, "ms")),
        ("output throughput", shown(summary.output_tokens_per_s, "tokens/s")),
    ]


SAMPLING: list[Callable[[options.Command], options.Command]] = [
    click.option("--max-tokens", type=click.IntRange(1), help="Output tokens at most; default: the server's."),
    click.option("--temperature", type=click.FloatRange(0), help="0 is greedy."),
    click.option("--top-p", type=click.FloatRange(0, 1), help="Nucleus sampling."),
    click.option("--top-k", type=click.IntRange(0), help="Sample from the k likeliest tokens."),
    click.option("--seed", type=click.IntRange(0), help="Seed of the sampling."),
    click.option("--stop", multiple=True, help="Text that ends the answer; may be given several times."),
    click.option("--system", help="System message, put before the conversation."),
    click.option("--model", help="Model of the server; default: the one that takes text."),
    click.option("--timeout", "timeout_s", type=float, default=600.0, show_default=True, help="Seconds."),
]


def _sampling_options(command: options.Command) -> options.Command:
    for option in SAMPLING[::-1]:
        command = option(command)
    return command


@click.command()
@click.argument("prompt")
@click.option("--raw", is_flag=True, help="Continue the text as it stands; no chat template.")
@_sampling_options
@options.url_option
@options.json_option
def generate(
    prompt: str, raw: bool, system: str | None, model: str | None, url: str, as_json: bool, **sampling: Any
) -> None:
    """Send PROMPT ('-' reads stdin) as a user message and stream the answer. Ctrl-C cancels on the server.

    \b
    trtpipe generate "Write a haiku about paging."
    trtpipe generate --raw "The capital of France is" --max-tokens 8
    """
    from pipeline.triton.client import Client
    from pipeline.triton.generation import GenerationRequest

    text = sys.stdin.read() if prompt == "-" else prompt
    if raw:
        request = GenerationRequest(prompt=text, **sampling)
    else:
        request = GenerationRequest(messages=(*_system(system), {"role": "user", "content": text}), **sampling)
    with Client(url, model) as client:
        answer, summary = _stream(client, request, quiet=as_json)
    if as_json:
        output.emit_json({"answer": answer, "model": client.model, "summary": asdict(summary)})
    else:
        click.echo("  ".join(f"{name} {value}" for name, value in _figures(summary)), err=True)


def _system(text: str | None) -> tuple[dict[str, str], ...]:
    return () if text is None else ({"role": "system", "content": text},)


@click.command()
@_sampling_options
@options.url_option
def chat(system: str | None, model: str | None, url: str, **sampling: Any) -> None:
    """Talk to a running server; the chat template is applied there.

    Ctrl-C cancels the answer that is coming; Ctrl-D or /exit ends the conversation, /new starts over.
    """
    from pipeline.errors import RequestError
    from pipeline.triton.client import Client
    from pipeline.triton.generation import GenerationRequest

    conversation = list(_system(system))
    with Client(url, model) as client:
        click.echo(f"model '{client.model}' at {url}; /new starts over, /exit ends", err=True)
        while (line := _read_line()) is not None:
            if line == "/new":
                conversation = list(_system(system))
            elif line:
                asked = (*conversation, {"role": "user", "content": line})
                try:
                    answer = _answer(client, GenerationRequest(messages=asked, **sampling))
                except RequestError as error:
                    if not sys.stdin.isatty():
                        raise
                    click.echo(f"error: {error}\n  The conversation goes on without this message.", err=True)
                else:
                    conversation = [*asked, {"role": "assistant", "content": answer}]


def _read_line() -> str | None:
    """Return the next line of the user, None at the end of the conversation."""
    try:
        line = input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
    return None if line == "/exit" else line


def _answer(client: Client, request: GenerationRequest) -> str:
    """Stream one answer; Ctrl-C ends this answer only, and what came of it stays in the conversation."""
    parts = []
    try:
        with client.generate(request) as generation:
            for chunk in generation:
                parts.append(chunk.text)
                click.echo(chunk.text, nl=False)
                sys.stdout.flush()
    except KeyboardInterrupt:
        click.echo(" [cancelled]", nl=False)
    click.echo()
    return "".join(parts)
