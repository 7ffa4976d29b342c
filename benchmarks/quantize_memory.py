"""How much memory it takes to calibrate and quantize a checkpoint, against the checkpoint's size.

    python -m benchmarks.quantize_memory --gigabytes 2.5 --format int4_awq

writes a Llama of random bfloat16 weights (the same in every layer), one layer a shard, runs each stage in a process of
its own with few short rows of text, and prints the most memory that was resident. The working set is one decoder
layer and the libraries, whatever the size of the model; activations come on top with the text.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

from pipeline.config.schema import CalibrationConfig, QuantizationConfig, VerifyConfig
from pipeline.core.artifacts import Calibration, QuantizedCheckpoint, SourceCheckpoint
from pipeline.core.progress import Silent
from pipeline.quantize.formats import WantedCheckpoint
from tests.support.checkpoints import tiny_tokenizer

Stage = Literal["calibrate", "quantize", "verify"]
STAGES: tuple[Stage, ...] = ("calibrate", "quantize", "verify")
HIDDEN, INNER, VOCABULARY = 2048, 5632, 32000


def write_model(directory: Path, n_bytes: float) -> int:
    """Write a random Llama of about `n_bytes` in bfloat16, one layer a shard; return its bytes."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    per_layer = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER
    layers = max(1, round((n_bytes / 2 - 2 * VOCABULARY * HIDDEN) / per_layer))
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=VOCABULARY,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )
    tiny_tokenizer(directory)
    config.save_pretrained(directory)
    square, wide = (HIDDEN, HIDDEN), (INNER, HIDDEN)
    shapes: dict[str, tuple[int, ...]] = {f"self_attn.{name}_proj.weight": square for name in "qkvo"}
    shapes |= {"mlp.gate_proj.weight": wide, "mlp.up_proj.weight": wide, "mlp.down_proj.weight": (HIDDEN, INNER)}
    shapes |= {f"{name}.weight": (HIDDEN,) for name in ("input_layernorm", "post_attention_layernorm")}
    layer = {
        name: (0.02 * torch.randn(shape) if len(shape) > 1 else torch.ones(shape)).bfloat16()
        for name, shape in shapes.items()
    }
    total = 0
    for index in range(layers + 1):
        tensors = {f"model.layers.{index}.{name}": tensor for name, tensor in layer.items()}
        if index == layers:
            table = (VOCABULARY, HIDDEN)
            tensors = {name: torch.randn(table) * 0.02 for name in ("model.embed_tokens.weight", "lm_head.weight")}
            tensors["model.norm.weight"] = torch.ones(HIDDEN)
        path = directory / f"model-{index + 1:05d}-of-{layers + 1:05d}.safetensors"
        save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
        total += path.stat().st_size
    return total


def run(stage: Stage, work: Path, quantization: QuantizationConfig) -> None:
    """Run one stage over what the stages before it left in `work`."""
    from pipeline.quantize.calibrate import calibrate
    from pipeline.quantize.quantize import plan_formats, quantize
    from pipeline.quantize.verify import verify

    source = SourceCheckpoint(path=work / "source", digest="source")
    found = Calibration(path=work / "calibrate", digest="calibration")
    wanted = WantedCheckpoint(export="hf")
    match stage:
        case "calibrate":
            text = CalibrationConfig(num_samples=2, max_seq_len=32)
            formats = plan_formats(source, quantization, wanted)
            calibrate(source, quantization, text, formats=formats, kv_ranges=False, out=found.path, progress=Silent())
        case "quantize":
            quantize(source, quantization, found, wanted, out=work / "quantize", progress=Silent())
        case "verify":
            made = QuantizedCheckpoint(path=work / "quantize", digest="quantized")
            out = work / "verify"
            out.mkdir()
            # What random weights predict is noise, and its limits would judge that.
            limits = VerifyConfig(num_tokens=64, max_kl=1e3, min_top1_agreement=0, max_perplexity_increase=1e3)
            verify(source, made, limits, out=out, progress=Silent())


def main() -> None:
    """Print one JSON line a stage."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.5)
    parser.add_argument("--format", default="fp8")
    parser.add_argument("--stage", choices=STAGES)
    parser.add_argument("--work", type=Path)
    arguments = parser.parse_args()
    if arguments.stage:
        run(arguments.stage, arguments.work, QuantizationConfig(format=arguments.format, group_size=128))
        sys.stdout.write(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}\n")
        return
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        size = write_model(work / "source", arguments.gigabytes * 1e9)
        for stage in STAGES:
            command = [sys.executable, "-m", "benchmarks.quantize_memory", "--stage", stage, "--work", scratch]
            done = subprocess.run([*command, "--format", arguments.format], check=False, capture_output=True, text=True)
            line = {"stage": stage, "format": arguments.format, "checkpoint_bytes": size}
            if done.returncode == 0:
                peak = int(done.stdout.split()[-1])
                line |= {"peak_bytes": peak, "ratio": round(peak / size, 3)}
            else:
                line |= {"error": done.stderr.strip().splitlines()[-1]}
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
