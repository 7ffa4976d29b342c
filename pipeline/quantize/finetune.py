"""Source checkpoint and calibration in, trained source checkpoint out: quantization-aware training and distillation.

Only the weights of quantized layers train, through their own rounding (training.student). Input ranges and
pre-quant scales stay as calibration found them, so `quantize` takes the trained weights with the same calibration
and writes what was trained. Embeddings, norms, biases and 16-bit layers keep the source's bytes.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config.schema import FinetuneConfig
from pipeline.core.artifacts import SourceCheckpoint
from pipeline.core.progress import Progress
from pipeline.quantize import calibration as text
from pipeline.quantize.documents import SHIPPED_CALIBRATION
from pipeline.quantize.export import write_json
from pipeline.quantize.rewrite import rewrite_source
from pipeline.quantize.source_model import load_model, quiet_transformers
from pipeline.quantize.sparsity import SPARSITY

if TYPE_CHECKING:
    import torch

    from pipeline.quantize.training.student import LayerRanges


def finetune(
    source: SourceCheckpoint,
    layers: Mapping[str, LayerRanges],
    settings: FinetuneConfig,
    *,
    out: Path,
    resume: Path,
    progress: Progress,
) -> None:
    """Train the weights of `layers` and write a SourceCheckpoint with training.json to `out`.

    Trained weights are float32: rounding them to 16 bit here would move some across a boundary of their grid.
    Equal inputs give equal bytes on one machine with one number of threads, interrupted or not.

    Args:
        source: a Hugging Face directory, perhaps a sparse one, whose zeros then stay.
        layers: name -> ranges of every quantized layer.
        settings: not of method "none".
        out: an existing or new directory.
        resume: where the states of an interrupted training are kept.
        progress: told of sizes and of every step.

    Raises:
        ConfigError: the text is unusable.
        ToolError: the loss left the numbers.
    """
    if settings.method == "none":
        raise ValueError("there is nothing to train")
    import torch

    from pipeline.quantize.training.student import StudentLinear, make_student
    from pipeline.quantize.training.trainer import Task, train

    drawn = _draw(settings, source.path)
    with quiet_transformers():
        torch.manual_seed(settings.seed)
        model = load_model(source.path, "float32", progress)
        role = make_student(
            model,
            layers,
            rank=settings.lora_rank,
            keep_zeros=(source.path / SPARSITY).is_file(),
            keep_source=settings.method == "qad",
        )
        trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        progress.note(f"{settings.method}: {trainable:,} parameters of {len(layers)} layers train")
        task = Task(model=model, role=role, method=settings.method, rows=_schedule(drawn.rows, settings))
        curve = train(task, settings, resume=resume, progress=progress)
    progress.note(
        f"{settings.method}: loss {curve[0]['loss']:.4g} at the first step, {curve[-1]['loss']:.4g} at the last"
    )
    trained: dict[str, torch.Tensor] = {
        f"{name}.weight": module.trained_weight().detach().float().cpu()
        for name, module in model.named_modules()
        if isinstance(module, StudentLinear)
    }
    rewrite_source(source.path, out, trained.get)
    write_json(out / "training.json", _describe(settings, layers, drawn, curve, trainable))


def _draw(settings: FinetuneConfig, tokenizer: Path) -> text.TokenRows:
    """Draw as many rows as the steps take, or all that the text has."""
    path = settings.dataset or SHIPPED_CALIBRATION
    wanted = settings.steps * settings.batch_size * settings.gradient_accumulation
    name = "shipped" if settings.dataset is None else path.name
    return text.sample(
        [text.TextSet(path=path, name=name, key="finetune.dataset", complete=False)],
        tokenizer,
        num_samples=wanted,
        max_seq_len=settings.max_seq_len,
        seed=settings.seed,
    )


def _schedule(rows: tuple[tuple[int, ...], ...], settings: FinetuneConfig) -> list[tuple[int, ...]]:
    """Order the rows of all steps: every row once, then every row again in another order."""
    wanted = settings.steps * settings.batch_size * settings.gradient_accumulation
    shuffler = random.Random(settings.seed)  # noqa: S311 - sampling, not secrecy
    scheduled: list[tuple[int, ...]] = []
    while len(scheduled) < wanted:
        scheduled += shuffler.sample(rows, len(rows))
    return scheduled[:wanted]


def _describe(
    settings: FinetuneConfig,
    layers: Mapping[str, LayerRanges],
    drawn: text.TokenRows,
    curve: list[dict[str, float]],
    trainable: int,
) -> dict[str, Any]:
    tokens = sum(len(row) for row in _schedule(drawn.rows, settings))
    return {
        "method": settings.method,
        "settings": settings.model_dump(mode="json", exclude={"dataset", "save_every"}),
        "layers": list(layers),
        "trainable_parameters": trainable,
        "tokens": tokens,
        "passes_over_text": round(tokens / drawn.record["tokens"], 2),
        "text": dict(drawn.record),
        "curve": curve,
        "versions": {name: version(name) for name in ("accelerate", "torch", "transformers")},
    }
