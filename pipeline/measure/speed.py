"""How fast a compiled CPU engine answers: time to the first token and tokens per second.

The engine runs in process with the settings that its server would use, on random token ids: no tokenizer, no
server, so that nothing but the engine differs between two of them. `compare` measures several engines fairly:
each sample is a fresh process, and the samples go round the engines again and again, each round starting with
another one, so that what else the machine does meets all of them. A sample is a time, not an artifact:
nothing of it is stored, and what it says holds for this machine.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.core.progress import Progress
from pipeline.errors import ToolError
from pipeline.host.cpu_time import busy_seconds

if TYPE_CHECKING:
    import openvino_genai as genai

IDS_FROM = 16
"""Below are special tokens in most vocabularies."""
_METRICS = ("ttft_ms", "decode_tokens_per_s", "output_tokens_per_s")


@dataclass(frozen=True, kw_only=True)
class Load:
    """Requests of equal shape: `requests` in all, `concurrency` of them in flight at a time."""

    concurrency: int
    requests: int
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One load, once.

    ttft_ms: from a request to its first token, median over the requests.
    itl_ms: between the tokens of a request, median over the requests.
    decode_tokens_per_s: the tokens after each request's first, over the time from the earliest first token to
        the last token of all.
    output_tokens_per_s: all output tokens over the whole time, prompts included.
    """

    ttft_ms: float
    itl_ms: float
    decode_tokens_per_s: float
    output_tokens_per_s: float


@dataclass(frozen=True, kw_only=True)
class Round:
    """What one fresh process measured: a sample for each load, and the cores that other processes kept busy."""

    samples: tuple[Sample, ...]
    busy_elsewhere: float | None


@dataclass(frozen=True, kw_only=True)
class Speed:
    """All rounds of one engine."""

    loads: tuple[Load, ...]
    rounds: tuple[Round, ...]

    def document(self) -> dict[str, Any]:
        """As JSON: for each load the median, the lowest and the highest of every metric."""
        loads = [asdict(load) | self._spread(number) for number, load in enumerate(self.loads)]
        return {"repeats": len(self.rounds), "loads": loads}

    def _spread(self, load: int) -> dict[str, dict[str, Any]]:
        columns = {name: [getattr(each.samples[load], name) for each in self.rounds] for name in _METRICS}
        return {
            name: {"median": _rounded(statistics.median(column)), "low": min(column), "high": max(column)}
            for name, column in columns.items()
        }


def compare(
    engines: Sequence[Path],
    loads: Sequence[Load],
    repeats: int,
    progress: Progress,
    measure: Callable[[Path, Sequence[Load], int], Round] | None = None,
) -> tuple[Speed, ...]:
    """Measure every engine `repeats` times under every load, in turns; one Speed for each engine.

    Raises:
        ToolError: an engine cannot be loaded or asked.
    """
    measure = measure or measure_apart
    rounds: list[list[Round]] = [[] for _ in engines]
    with progress.track("speed", repeats * len(engines), "samples") as advance:
        for turn in range(repeats):
            for position in range(len(engines)):
                number = (turn + position) % len(engines)
                # The prompts of a turn are the same for all.
                rounds[number].append(measure(engines[number], loads, turn))
                advance(1)
    return tuple(Speed(loads=tuple(loads), rounds=tuple(each)) for each in rounds)


def measure_apart(engine: Path, loads: Sequence[Load], seed: int) -> Round:
    """Measure in a process of its own, which is gone afterwards.

    Raises:
        ToolError: the process ended without a result; it has said why on stderr.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure_into, args=(sender, engine, loads, seed), daemon=True)
    process.start()
    # Guard: while this end stays open too, the death of the process would not end the wait.
    sender.close()
    try:
        result: Round = receiver.recv()
    except EOFError:
        process.join()
        raise ToolError(f"measuring {engine} ended with exit code {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
    return result


def _measure_into(sender: Connection, engine: Path, loads: Sequence[Load], seed: int) -> None:
    pipe, facts = load_engine(engine)
    vocab_size = facts["limits"]["vocab_size"]
    # The first request of a process pays for what is made on use.
    run_load(pipe, vocab_size, Load(concurrency=1, requests=1, input_tokens=8, output_tokens=4), seed)
    busy, own, started = busy_seconds(), time.process_time(), time.perf_counter()
    samples = tuple(run_load(pipe, vocab_size, load, seed + 1) for load in loads)
    now, own, seconds = busy_seconds(), time.process_time() - own, time.perf_counter() - started
    elsewhere = None if busy is None or now is None else _rounded(max(0.0, (now - busy - own) / seconds))
    sender.send(Round(samples=samples, busy_elsewhere=elsewhere))


def load_engine(engine: Path) -> tuple[genai.ContinuousBatchingPipeline, dict[str, Any]]:
    """Build the pipeline as the serving process does; return it with engine.json."""
    import openvino_genai as genai

    facts: dict[str, Any] = json.loads((engine / "engine.json").read_text("utf-8"))
    scheduler = genai.SchedulerConfig()
    for key, value in facts["scheduler"].items():
        setattr(scheduler, key, value)
    return genai.ContinuousBatchingPipeline(str(engine), scheduler, "CPU", facts["plugin_config"]), facts


def run_load(pipe: genai.ContinuousBatchingPipeline, vocab_size: int, load: Load, seed: int) -> Sample:
    """Keep `load.concurrency` requests of random ids in flight until `load.requests` are done."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    rng = np.random.default_rng(seed)
    config = genai.GenerationConfig(max_new_tokens=load.output_tokens, ignore_eos=True)
    sent: dict[int, float] = {}
    arrivals: dict[int, list[float]] = {}
    live: dict[int, genai.GenerationHandle] = {}
    started = time.perf_counter()
    while len(sent) < load.requests or live:
        while len(live) < load.concurrency and len(sent) < load.requests:
            number = len(sent)
            ids = rng.integers(IDS_FROM, vocab_size, (1, load.input_tokens), dtype=np.int64)
            sent[number], arrivals[number] = time.perf_counter(), []
            live[number] = pipe.add_request(number, ov.Tensor(ids), config)
        pipe.step()
        now = time.perf_counter()
        for number, handle in list(live.items()):
            while handle.can_read():
                arrivals[number] += [now] * sum(len(output.generated_ids) for output in handle.read().values())
            if len(arrivals[number]) >= load.output_tokens:
                del live[number]
    return summarize(list(sent.values()), list(arrivals.values()), time.perf_counter() - started)


def summarize(sent: Sequence[float], arrivals: Sequence[Sequence[float]], seconds: float) -> Sample:
    """Compute a sample from times in seconds: when each request was sent and each of its tokens, two at least, came."""
    first = [times[0] for times in arrivals]
    tokens = sum(map(len, arrivals))
    gaps = [(times[-1] - times[0]) / (len(times) - 1) for times in arrivals]
    decoding = max(times[-1] for times in arrivals) - min(first)
    return Sample(
        ttft_ms=_rounded(1e3 * statistics.median(came - asked for came, asked in zip(first, sent, strict=True))),
        itl_ms=_rounded(1e3 * statistics.median(gaps)),
        decode_tokens_per_s=_rounded((tokens - len(arrivals)) / decoding),
        output_tokens_per_s=_rounded(tokens / seconds),
    )


def fitting_loads(
    engines: Sequence[Path], concurrency: Sequence[int], input_tokens: int, output_tokens: int
) -> tuple[Load, ...]:
    """One wave of requests at each concurrency, with prompts as long as every engine takes, `input_tokens` at most."""
    limits: list[Mapping[str, int]] = [
        json.loads((each / "engine.json").read_text("utf-8"))["limits"] for each in engines
    ]
    room = min(each["max_seq_len"] for each in limits)
    output_tokens = min(output_tokens, room // 2)
    shape = {"input_tokens": min(input_tokens, room - output_tokens), "output_tokens": output_tokens}
    return tuple(Load(concurrency=each, requests=each, **shape) for each in concurrency)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
