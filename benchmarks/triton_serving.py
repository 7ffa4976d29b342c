"""Closed-loop load on a served repository: TTFT and output tokens per second at concurrency 1 and 16.

    python -m benchmarks.triton_serving REPOSITORY [--json]

Serves the repository, sends prompts of 180 tokens and takes 64 tokens of each (end of sequence is held off by
min_tokens), after a warm-up round. Comparable to benchmarks/openvino_engine.py, which gives the same ids to the
same engine in process.
"""

from __future__ import annotations

import argparse
import json
import queue
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.prompts import OUTPUT_TOKENS, REQUESTS, Prompt, make_prompts
from pipeline.errors import RequestError
from pipeline.triton.client import Client
from pipeline.triton.generation import GenerationRequest, Summary
from pipeline.triton.server import Server


def measure(client: Client, prompts: Sequence[Prompt], concurrency: int) -> dict[str, float]:
    """Send all prompts, `concurrency` at a time; each answer must have exactly the requested length.

    Returns:
        ttft_p50_ms, mean_itl_ms (mean over requests) and output_tokens_per_s over the whole window.
    """
    waiting: queue.SimpleQueue[Prompt] = queue.SimpleQueue()
    for prompt in prompts:
        waiting.put(prompt)
    summaries: list[Summary] = []
    failures: list[BaseException] = []

    def work() -> None:
        try:
            while True:
                summaries.append(_generate(client, waiting.get_nowait()))
        except queue.Empty:
            return
        except RequestError as error:
            failures.append(error)

    workers = [threading.Thread(target=work) for _ in range(concurrency)]
    start = time.monotonic()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = time.monotonic() - start
    if failures:
        raise failures[0]
    return {
        "requests": len(summaries),
        "ttft_p50_ms": statistics.median(each.ttft_ms for each in summaries if each.ttft_ms is not None),
        "mean_itl_ms": statistics.fmean(each.mean_itl_ms for each in summaries if each.mean_itl_ms is not None),
        "output_tokens_per_s": sum(each.output_tokens or 0 for each in summaries) / seconds,
    }


def _generate(client: Client, prompt: Prompt) -> Summary:
    request = GenerationRequest(prompt=prompt.text, max_tokens=OUTPUT_TOKENS, min_tokens=OUTPUT_TOKENS, top_k=1)
    _text, summary = client.generate_text(request)
    if summary.output_tokens != OUTPUT_TOKENS:
        raise RequestError(
            f"asked for {OUTPUT_TOKENS} tokens, got {summary.output_tokens}: the figures would be wrong."
        )
    return summary


def main() -> None:
    """Serve, warm up, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository", type=Path)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args()
    tokenizer = next(arguments.repository.resolve().rglob("tokenizer.json"))
    results: dict[int, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        log_path = Path(folder) / "server.log"
        with Server(arguments.repository, log_path=log_path) as server, Client(server.grpc_url) as client:
            for concurrency, count in REQUESTS.items():
                prompts = make_prompts(tokenizer, concurrency + count, seed=concurrency)
                measure(client, prompts[:concurrency], concurrency)
                results[concurrency] = measure(client, prompts[concurrency:], concurrency)
    if arguments.json:
        print(json.dumps(results))  # noqa: T201 - a program
        return
    for concurrency, figures in results.items():
        text = ", ".join(f"{name} {value:.1f}" for name, value in figures.items())
        print(f"concurrency {concurrency:2}: {text}")  # noqa: T201 - a program


if __name__ == "__main__":
    main()
