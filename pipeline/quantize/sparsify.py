"""Source checkpoint in, the same checkpoint with two zeros in every four weights out.

The weights that stay keep their exact 16-bit values. Later stages keep the zeros by themselves: zero is a code of
every format here and no scale moves it; only `finetune` has to be told.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config.formats import covers
from pipeline.config.schema import CalibrationConfig, SparsityConfig
from pipeline.core.artifacts import SourceCheckpoint
from pipeline.core.progress import Progress
from pipeline.errors import ConfigError, Problem, ToolError
from pipeline.quantize import calibration as text
from pipeline.quantize import modelopt
from pipeline.quantize.export import write_json
from pipeline.quantize.rewrite import rewrite_source
from pipeline.quantize.source_model import load_model, quiet_transformers, read_config, read_layout
from pipeline.quantize.sparsity import SPARSITY

if TYPE_CHECKING:
    import torch
    from torch import nn

# ModelOpt skips other sizes with a warning (modelopt/torch/sparsity/weight_sparsity, magnitude and sparsegpt, 0.47).
_MULTIPLES = {"magnitude": (8, 16), "sparsegpt": (4, 4)}


def sparsify(
    source: SourceCheckpoint,
    sparsity: SparsityConfig,
    calibration: CalibrationConfig,
    *,
    out: Path,
    progress: Progress,
) -> None:
    """Write a SourceCheckpoint whose linear layers are 2:4 sparse along the input axis, and sparsity.json.

    Args:
        source: a Hugging Face directory.
        sparsity: method and excludes; not "none".
        calibration: the text that sparsegpt weighs inputs by.
        out: an existing or new directory.
        progress: told of the text and of what was done.

    Raises:
        ConfigError: excludes or a layer's size do not fit, or the text is unusable.
        ToolError: ModelOpt failed, or left a layer dense.
    """
    if sparsity.method == "none":
        raise ValueError("there is nothing to do")
    linears, modules = read_layout(read_config(source.path))
    layers = _select(linears, modules, sparsity)
    rows = None
    if sparsity.method == "sparsegpt":
        rows = text.sample(
            text.text_sets(calibration),
            source.path,
            num_samples=calibration.num_samples,
            max_seq_len=calibration.max_seq_len,
            seed=calibration.seed,
        )
    with quiet_transformers():
        model = load_model(source.path, "float32", progress)
        progress.note(f"sparsify {len(layers)} layers by {sparsity.method}")
        loop = None if rows is None else _forward_loop(rows, calibration.sequences_per_pass, progress)
        modelopt.sparsify_in_place(model, sparsity.method, layers, loop)
    live = {f"{name}.weight": model.get_parameter(f"{name}.weight").data for name in layers}
    _check(live)
    rewrite_source(
        source.path, out, lambda name, tensor: live[name].to("cpu", tensor.dtype) if name in live else tensor
    )
    write_json(out / SPARSITY, _describe(sparsity, layers, rows))


def _select(linears: dict[str, tuple[int, int]], modules: list[str], sparsity: SparsityConfig) -> tuple[str, ...]:
    unknown = [
        Problem(where="sparsity.exclude", message=f"'{glob}' matches no module of this model.")
        for glob in sparsity.exclude
        if not any(covers((glob,), name) for name in modules)
    ]
    if unknown:
        raise ConfigError("sparsity.exclude names modules that do not exist", problems=unknown)
    layers = tuple(name for name in linears if not covers(sparsity.exclude, name))
    rows, columns = _MULTIPLES[sparsity.method]
    odd = [
        Problem(where=name, message=f"{linears[name][0]} outputs and {linears[name][1]} inputs.")
        for name in layers
        if linears[name][0] % rows or linears[name][1] % columns
    ]
    if odd or not layers:
        raise ConfigError(
            f"sparsity.method {sparsity.method} needs outputs in multiples of {rows} and inputs of {columns}"
            if odd
            else "sparsity.exclude leaves no layer",
            problems=odd[:20],
            hint="Exclude these layers (sparsity.exclude)." if odd else "Exclude fewer modules.",
        )
    return layers


def _forward_loop(rows: text.TokenRows, batch_size: int, progress: Progress) -> modelopt.ForwardLoop:
    import torch

    batches = [rows.rows[start : start + batch_size] for start in range(0, len(rows.rows), batch_size)]

    def run(model: nn.Module) -> None:
        body: Any = model.base_model
        device = next(model.parameters()).device
        with torch.no_grad(), progress.track("collect inputs", len(rows.rows), "sequences") as advance:
            for batch in batches:
                body(torch.tensor(batch, device=device), use_cache=False)
                advance(len(batch))

    return run


def _check(live: dict[str, torch.Tensor]) -> None:
    dense = [
        Problem(where=name, message=f"{worst} of four neighbouring weights are not zero.")
        for name, weight in live.items()
        if (worst := int((weight.reshape(len(weight), -1, 4) != 0).sum(dim=2).max())) > 2  # noqa: PLR2004 - of 2:4
    ]
    if dense:
        raise ToolError(
            f"ModelOpt {version('nvidia-modelopt')} left {len(dense)} layers dense",
            problems=dense[:20],
            hint="Exclude these layers (sparsity.exclude).",
        )


def _describe(sparsity: SparsityConfig, layers: tuple[str, ...], rows: text.TokenRows | None) -> dict[str, Any]:
    return {
        "method": sparsity.method,
        "pattern": sparsity.pattern,
        "exclude": list(sparsity.exclude),
        "layers": list(layers),
        "text": None if rows is None else dict(rows.record),
        "versions": {name: version(name) for name in ("nvidia-modelopt", "torch", "transformers")},
    }
