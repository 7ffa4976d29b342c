"""Throughput and time to first token of an engine directory, in process: the yardstick for serving.

    python benchmarks/openvino_engine.py ENGINE [--concurrency 1 16] [--input-tokens 180] [--output-tokens 64]

Drives OpenVINO GenAI's ContinuousBatchingPipeline with the settings of engine.json and random token ids:
no tokenizer, no server. Prints one JSON document. Times of the single stream are medians over the
repeats; each concurrency keeps that many requests in flight from a closed loop of `--requests` requests.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import openvino_genai as genai

IDS_FROM = 16  # below are special tokens in most vocabularies


@dataclass(frozen=True, kw_only=True)
class Load:
    """Shape of the requests."""

    concurrency: int
    requests: int
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One concurrency: output tokens per second over the whole run, medians over requests otherwise."""

    concurrency: int
    requests: int
    output_tokens_per_s: float
    ttft_ms: float
    itl_ms: float


def load_pipeline(engine: Path) -> tuple[genai.ContinuousBatchingPipeline, dict[str, Any]]:
    """Build the pipeline as the serving process does."""
    import openvino_genai as genai

    facts: dict[str, Any] = json.loads((engine / "engine.json").read_text("utf-8"))
    scheduler = genai.SchedulerConfig()
    for key, value in facts["scheduler"].items():
        setattr(scheduler, key, value)
    return genai.ContinuousBatchingPipeline(str(engine), scheduler, "CPU", facts["plugin_config"]), facts


def measure(pipe: genai.ContinuousBatchingPipeline, vocab_size: int, load: Load, seed: int) -> Measured:
    """Keep `load.concurrency` requests in flight until `load.requests` are done."""
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
    seconds = time.perf_counter() - started
    first = [1e3 * (times[0] - sent[number]) for number, times in arrivals.items()]
    gaps = [1e3 * (times[-1] - times[0]) / (len(times) - 1) for times in arrivals.values()]
    return Measured(
        concurrency=load.concurrency,
        requests=load.requests,
        output_tokens_per_s=round(load.requests * load.output_tokens / seconds, 1),
        ttft_ms=round(statistics.median(first), 1),
        itl_ms=round(statistics.median(gaps), 2),
    )


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16])
    parser.add_argument(
        "--requests", type=int, default=0, help="requests per concurrency; 0 takes 3 for 1, else 2 rounds"
    )
    parser.add_argument("--input-tokens", type=int, default=180)
    parser.add_argument("--output-tokens", type=int, default=64)
    arguments = parser.parse_args()
    began = time.perf_counter()
    pipe, facts = load_pipeline(arguments.engine)
    load_s = time.perf_counter() - began
    vocab_size = facts["limits"]["vocab_size"]
    shape = {"input_tokens": arguments.input_tokens, "output_tokens": arguments.output_tokens}
    measure(pipe, vocab_size, Load(concurrency=1, requests=1, **shape), seed=0)
    results = []
    for seed, concurrency in enumerate(arguments.concurrency, start=1):
        requests = arguments.requests or max(3, 2 * concurrency)
        results.append(
            asdict(measure(pipe, vocab_size, Load(concurrency=concurrency, requests=requests, **shape), seed))
        )
    document = {
        "format": facts["format"],
        "engine_bytes": sum(path.stat().st_size for path in arguments.engine.glob("openvino_model.*")),
        "load_s": round(load_s, 2),
        "max_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "kv_cache_bytes": pipe.get_metrics().cache_size_in_bytes,
        **shape,
        "results": results,
    }
    json.dump(document, sys.stdout, indent=2)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
