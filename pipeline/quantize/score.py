"""Score what each candidate format costs each group of layers: one 16-bit model, ModelOpt's estimates, no choice yet.

Both methods look at one group at a time, all others at full precision, and give nats per token:

gradient: half the sum of squares of (gradient of the loss x change of the layer's output), the second-order estimate of
    the loss with the Fisher information in place of the Hessian. One backward pass over the text, with checkpoints at
    the decoder layers, so that the activations of one layer are in memory at a time.
kl_div: the Kullback-Leibler divergence from the full-precision model, measured. One pass over the text for each group
    and candidate; the decoder layers in front of the changed one are not computed again, which halves it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config.schema import CalibrationConfig, QuantizationConfig, ScoreMethod
from pipeline.core.artifacts import SourceCheckpoint
from pipeline.core.progress import Advance, Progress
from pipeline.errors import ToolError
from pipeline.quantize import calibration as text
from pipeline.quantize import modelopt, modelopt_search, sensitivities
from pipeline.quantize.formats import check_group_size, layer_formats, search_config, traits
from pipeline.quantize.sensitivities import Group, Sensitivities
from pipeline.quantize.source_model import load_model, quiet_transformers, read_config, read_layout

if TYPE_CHECKING:
    import torch
    from torch import nn

DEFAULT_SAMPLES: Mapping[ScoreMethod, int] = {"gradient": 16, "kl_div": 2}


def score(
    source: SourceCheckpoint,
    quantization: QuantizationConfig,
    calibration: CalibrationConfig,
    *,
    out: Path,
    progress: Progress,
) -> None:
    """Score `quantization.auto.candidates` and write sensitivity.json to `out`.

    Equal inputs give byte-identical files on one machine. The budget is no input.

    Args:
        source: a Hugging Face directory with safetensors and tokenizer.json.
        quantization: candidates, method, group size, algorithms; excluded and overridden layers are not searched.
        calibration: the text; the first `quantization.auto.num_score_samples` of its sequences are taken.
        out: an existing directory.
        progress: told of each pass.

    Raises:
        ConfigError: excludes, overrides, group size or text do not fit.
        BadSafetensors: weights are missing or have the wrong shape.
        ToolError: ModelOpt failed, or gave scores that are no numbers.
    """
    auto = quantization.auto
    linears, modules = read_layout(read_config(source.path))
    formats = layer_formats(linears, modules, quantization)
    searched = [name for name, form in formats.items() if form == "auto"]
    if any(traits(name, export="hf").grouped for name in auto.candidates):
        check_group_size({name: linears[name] for name in searched}, quantization.group_size, 1)
    rows, record = _draw(source.path, quantization, calibration)
    with quiet_transformers():
        model = load_model(source.path, "float32", progress)
        progress.note(
            f"score {', '.join(auto.candidates)} by {auto.method} on {len(rows)} sequences of {len(rows[0])} tokens"
        )
        parameters = sum(parameter.numel() for parameter in model.parameters())
        kept = [name for name in linears if name not in searched]
        scored = _search(model, kept, quantization, _Feed(model, rows, calibration.sequences_per_pass, progress))
    weights = {name: outputs * inputs for name, (outputs, inputs) in linears.items()}
    groups = tuple(
        Group(
            layers=group.layers,
            weights=sum(weights[name] for name in group.layers),
            scores={name: group.scores[name] / _unit(auto.method, rows) for name in auto.candidates},
        )
        for group in scored
    )
    _check(groups)
    fixed = {name: form for name, form in formats.items() if form != "auto"}
    found = Sensitivities(
        method=auto.method, groups=groups, fixed=fixed, layers=weights, parameters=parameters, text=record
    )
    sensitivities.write(out, found, {name: version(name) for name in ("nvidia-modelopt", "torch", "transformers")})


def _draw(
    source: Path, quantization: QuantizationConfig, calibration: CalibrationConfig
) -> tuple[tuple[tuple[int, ...], ...], dict[str, Any]]:
    """The first sequences of those that calibrate, and the record of exactly these."""
    drawn = text.sample(
        text.text_sets(calibration),
        source,
        num_samples=calibration.num_samples,
        max_seq_len=calibration.max_seq_len,
        seed=calibration.seed,
    )
    wanted = quantization.auto.num_score_samples or DEFAULT_SAMPLES[quantization.auto.method]
    rows = drawn.rows[:wanted]
    record = {
        "source": drawn.origin,
        "seed": calibration.seed,
        "sequences": len(rows),
        "tokens": sum(len(row) for row in rows),
        "ids_sha256": text.digest_rows(rows),
    }
    return rows, record


def _unit(method: ScoreMethod, rows: tuple[tuple[int, ...], ...]) -> float:
    """What a sum of ModelOpt's is divided by to be nats per token; see the module's words on both methods."""
    tokens = sum(len(row) for row in rows)
    return 2.0 * (tokens - len(rows)) if method == "gradient" else float(tokens)


class _Feed:
    """The batches, again each time they are asked for; tells how far each pass is."""

    def __init__(
        self, model: nn.Module, rows: tuple[tuple[int, ...], ...], batch_size: int, progress: Progress
    ) -> None:
        import torch

        device = next(model.parameters()).device
        starts = range(0, len(rows), batch_size)
        self.batches = [torch.tensor(rows[start : start + batch_size], device=device) for start in starts]
        self.progress = progress

    def __iter__(self) -> Iterator[torch.Tensor]:
        import torch

        if torch.is_inference_mode_enabled():
            # kl_div passes over each batch many times, and counts those.
            yield from self.batches
            return
        label = "score layers" if torch.is_grad_enabled() else "calibrate candidates"
        sequences = sum(len(batch) for batch in self.batches)
        with self.progress.track(label, sequences, "sequences") as advance:
            for batch in self.batches:
                yield batch
                advance(len(batch))


def _search(
    model: nn.Module, kept: list[str], quantization: QuantizationConfig, feed: _Feed
) -> list[modelopt_search.ScoredGroup]:
    """Let ModelOpt score every candidate; its groups come in model order."""
    auto = quantization.auto
    with ExitStack() as stack:
        measured = _Measured(model, feed, stack, head_searched="lm_head" not in kept)
        search = modelopt_search.Search(
            candidates={name: search_config(quantization, name) for name in auto.candidates},
            batches=feed,
            kept=kept,
            method=auto.method,
            run=measured.run,
            backward=_backward,
        )
        return modelopt_search.score_groups(model, search)


def _backward(model: nn.Module, batch: torch.Tensor) -> None:
    """Gradients of the loss of next tokens, summed over the batch [rows, length]."""
    from torch.nn.functional import cross_entropy

    logits = model(batch, use_cache=False).logits[:, :-1].float()
    loss: Any = cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")
    loss.backward()


@dataclass
class _Measured:
    """Forward passes for calibration and for kl_div, where outputs of unchanged first layers are taken from before."""

    model: nn.Module
    feed: _Feed
    stack: ExitStack
    head_searched: bool
    outputs: dict[int, Any] = field(default_factory=dict)
    first_changed: int | None = None
    advance: Advance | None = None

    def run(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor | None:
        """Calibrate with a batch; in inference mode return its logits [rows, length, vocabulary]."""
        import torch

        if not torch.is_inference_mode_enabled():
            # Guard: the head of a large vocabulary costs as much as several layers, for nothing when it is excluded.
            body: Any = model if self.head_searched else model.base_model
            body(batch, use_cache=False)
            return None
        advance = self.advance or self._begin()
        changed = [number for number, layer in enumerate(self.decoder) if modelopt.is_quantizing(layer)]
        elsewhere = modelopt.is_quantizing(model)
        self.first_changed = changed[0] if changed else (len(self.decoder) if elsewhere else None)
        logits: torch.Tensor = model(batch, use_cache=False).logits
        advance(1)
        return logits

    @property
    def decoder(self) -> list[nn.Module]:
        """The decoder layers in order; empty where they are not a plain list, and then nothing is skipped."""
        import torch

        size = getattr(self.model.config, "num_hidden_layers", 0)
        lists = (module for module in self.model.modules() if isinstance(module, torch.nn.ModuleList))
        return list(next((found for found in lists if len(found) == size), ()))

    def _begin(self) -> Advance:
        """At the first pass that scores: count the passes, and keep outputs from now on."""
        groups = modelopt_search.searched_groups(self.model)
        passes = len(self.feed.batches) * (1 + sum(len(group.choices) - 1 for group in groups))
        self.advance = self.stack.enter_context(self.feed.progress.track("score layers", passes, "passes"))
        for number, layer in enumerate(self.decoder):
            live: Any = layer
            live.forward = self._resuming(number, live.forward)
        return self.advance

    def _resuming(self, number: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def resume(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - whatever the layer takes and returns
            if self.first_changed is not None and number < self.first_changed:
                return self.outputs[number]
            output = forward(*arguments, **options)
            if self.first_changed is None:
                self.outputs[number] = output
            return output

        return resume


def _check(groups: tuple[Group, ...]) -> None:
    """Refuse scores that no choice can be made from."""
    if not groups:
        raise ToolError("ModelOpt found no layer to decide on", hint="Exclude or override fewer layers.")
    # A candidate that rounds weights and changes nothing at all was never looked at.
    unseen = [group.name for group in groups if not any(group.scores.values())]
    if unseen:
        raise ToolError(
            f"ModelOpt gave no score to {len(unseen)} groups of layers, first {unseen[0]}",
            hint="Set quantization.auto.method: kl_div, give other calibration text, or exclude these layers.",
        )
    bad = [group.name for group in groups if not all(math.isfinite(score) for score in group.scores.values())]
    if bad:
        raise ToolError(
            f"the scores of {len(bad)} groups are not finite, first of {bad[0]}",
            hint="The source overflows on this text; use other calibration text, or method: kl_div.",
        )
