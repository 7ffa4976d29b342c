"""Time of calibrate and quantize beside ModelOpt's own example flow, on the same model, text and machine.

    python -m benchmarks.modelopt_flow MODEL WORK [--formats fp8 int4_awq] [--dtype float32] [--repeats 3]

MODEL is a Hugging Face directory; WORK is written. "theirs" makes the calls of ModelOpt's
examples/hf_ptq/hf_ptq.py (0.47) that are not specific to a GPU: load, get_dataset_dataloader on a local
JSONL, mtq.quantize with create_forward_loop, export_hf_checkpoint, tokenizer saved; without its previews, which
generate text before and after. "ours" makes a calibration and from it a checkpoint, with the probes that verify
needs. Both feed `--samples` sequences of `--tokens` tokens in batches of 4, each in a process of its own, in
turn. Prints one JSON line per format: medians of the seconds after the imports, the imports, the peak of resident
memory, and the ratio of the medians.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

BATCH_SIZE = 4
GROUP_SIZE: Literal[64] = 64
SIDES = ("theirs", "ours")


def write_text(path: Path, samples: int) -> None:
    """Write documents that are each longer than any sequence, so that both sides feed full ones."""
    from pipeline.quantize.documents import SHIPPED_CALIBRATION, read_documents

    texts = [document.text for document in read_documents(SHIPPED_CALIBRATION) if document.text]
    rows = [" ".join(texts[n % len(texts) :] + texts[: n % len(texts)]) for n in range(samples)]
    path.write_text("\n".join(json.dumps({"text": f"{n} {row}"[:20_000]}) for n, row in enumerate(rows)))


def theirs(asked: argparse.Namespace, text: Path, out: Path) -> tuple[float, float]:
    """ModelOpt's example; returns when the imports were done and when all was."""
    import modelopt.torch.quantization as mtq
    import torch
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.utils.dataset_utils import create_forward_loop, get_dataset_dataloader
    from transformers import AutoModelForCausalLM, AutoTokenizer

    begun = time.perf_counter()
    dtype = "auto" if asked.dtype == "auto" else getattr(torch, asked.dtype)
    model = AutoModelForCausalLM.from_pretrained(asked.model, dtype=dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(asked.model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    loader = get_dataset_dataloader(
        dataset_name=str(text),
        tokenizer=tokenizer,
        batch_size=BATCH_SIZE,
        num_samples=asked.samples,
        max_sample_length=asked.tokens,
    )
    config = {"fp8": mtq.FP8_DEFAULT_CFG, "int4_awq": mtq.INT4_AWQ_CFG}[asked.one]
    if asked.one == "int4_awq":  # what hf_ptq.py's --awq_block_size does
        for entry in config["quant_cfg"]:
            sizes = entry.get("cfg", {}).get("block_sizes") if isinstance(entry.get("cfg"), dict) else None
            if sizes and -1 in sizes:
                sizes[-1] = GROUP_SIZE
    model = mtq.quantize(model, config, create_forward_loop(dataloader=loader))
    with torch.inference_mode():
        export_hf_checkpoint(model, export_dir=out)
    tokenizer.save_pretrained(out)
    return begun, time.perf_counter()


def ours(asked: argparse.Namespace, text: Path, out: Path) -> tuple[float, float]:
    """Calibrate and quantize, as a build does; returns when the imports were done and when all was."""
    # What both sides import is not counted on either; trtpipe would import these where they are first needed.
    import modelopt.torch.export
    import modelopt.torch.quantization  # noqa: F401
    import transformers  # noqa: F401

    from pipeline.config.schema import CalibrationConfig, QuantizationConfig
    from pipeline.core.artifacts import Calibration, SourceCheckpoint
    from pipeline.core.progress import Silent
    from pipeline.quantize.calibrate import calibrate
    from pipeline.quantize.formats import WantedCheckpoint
    from pipeline.quantize.quantize import plan_formats, quantize

    begun = time.perf_counter()
    source = SourceCheckpoint(path=Path(asked.model), digest="source")
    quantization = QuantizationConfig(format=asked.one, group_size=GROUP_SIZE)
    calibration = CalibrationConfig(
        dataset=text, num_samples=asked.samples, max_seq_len=asked.tokens, batch_size=BATCH_SIZE
    )
    wanted = WantedCheckpoint(export="hf", dtype="bfloat16")
    formats = plan_formats(source, quantization, wanted)
    made = out / "calibration"
    calibrate(source, quantization, calibration, formats=formats, kv_ranges=False, out=made, progress=Silent())
    found = Calibration(path=made, digest="calibration")
    quantize(source, quantization, found, wanted, out=out, progress=Silent())
    return begun, time.perf_counter()


def one(asked: argparse.Namespace, side: str, text: Path, out: Path) -> None:
    """Run one side in this process and print its figures."""
    started = time.perf_counter()
    begun, ended = {"theirs": theirs, "ours": ours}[side](asked, text, out)
    figures = {
        "seconds": ended - begun,
        "imports": begun - started,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "cpu_seconds": time.process_time(),
    }
    sys.stdout.write(json.dumps(figures) + "\n")


def measure(asked: argparse.Namespace, arguments: list[str], text: Path, format_: str) -> dict[str, object]:
    """Run both sides in turn, each in a process of its own."""
    found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for repeat in range(asked.repeats):
        for side in SIDES:
            command = [sys.executable, "-m", "benchmarks.modelopt_flow", *arguments, "--one", format_, "--side", side]
            run = subprocess.run(
                [*command, "--out", str(asked.work / f"{format_}-{side}-{repeat}"), "--text", str(text)],
                check=True,
                capture_output=True,
                text=True,
            )
            found[side].append(json.loads(run.stdout.splitlines()[-1]))
    medians = {
        side: {name: round(statistics.median(run[name] for run in runs), 2) for name in runs[0]}
        for side, runs in found.items()
    }
    ratio = medians["ours"]["seconds"] / medians["theirs"]["seconds"]
    return {"format": format_, "dtype": asked.dtype, **medians, "ratio": round(ratio, 2), "repeats": asked.repeats}


def main() -> None:
    """Measure every format that was asked for, or run one side of one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--formats", nargs="+", default=["fp8", "int4_awq"], choices=["fp8", "int4_awq"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "auto"], help="In which ModelOpt loads.")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--text", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        one(asked, asked.side, asked.text, asked.out)
        return
    asked.work.mkdir(parents=True, exist_ok=True)
    text = asked.work / "text.jsonl"
    write_text(text, asked.samples)
    arguments = [str(asked.model), str(asked.work), "--samples", str(asked.samples), "--tokens", str(asked.tokens)]
    arguments += ["--dtype", asked.dtype]
    for format_ in asked.formats:
        sys.stdout.write(json.dumps(measure(asked, arguments, text, format_)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
