"""Throughput and time to first token of an engine directory, in process: the yardstick for serving.

    python -m benchmarks.openvino_engine ENGINE [--concurrency 1 16] [--input-tokens 180] [--output-tokens 64]

Drives OpenVINO GenAI's ContinuousBatchingPipeline with the settings of engine.json and random token ids:
no tokenizer, no server. Prints one JSON document. Times of the single stream are medians over the
repeats; each concurrency keeps that many requests in flight from a closed loop of `--requests` requests.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from dataclasses import asdict
from pathlib import Path

from pipeline.measure.speed import Load, load_engine, run_load


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
    pipe, facts = load_engine(arguments.engine)
    load_s = time.perf_counter() - began
    vocab_size = facts["limits"]["vocab_size"]
    shape = {"input_tokens": arguments.input_tokens, "output_tokens": arguments.output_tokens}
    run_load(pipe, vocab_size, Load(concurrency=1, requests=1, **shape), seed=0)
    results = []
    for seed, concurrency in enumerate(arguments.concurrency, start=1):
        requests = arguments.requests or max(3, 2 * concurrency)
        load = Load(concurrency=concurrency, requests=requests, **shape)
        head = {"concurrency": concurrency, "requests": requests}
        results.append(head | asdict(run_load(pipe, vocab_size, load, seed)))
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
