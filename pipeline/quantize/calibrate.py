"""Source checkpoint and text in, Calibration out: everything that data gives, for any target.

The text's activations are carried from one decoder layer to the next, computed by the source's own float32
weights: every layer is calibrated on what reaches it in the source model. ModelOpt's algorithms work the same
way within one model (quantizers observe and pass on what they were given), so the result is the whole
model's. A few small layers are in memory at a time, or one large one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config.formats import AWQ
from pipeline.config.schema import CalibrationConfig, Format, QuantizationConfig
from pipeline.core.artifacts import SourceCheckpoint
from pipeline.core.progress import Progress
from pipeline.errors import Problem, ToolError
from pipeline.quantize import calibration as text
from pipeline.quantize import experts, modelopt, probes
from pipeline.quantize.export import write_json
from pipeline.quantize.formats import algorithm, by_glob, observes, quantizer_config, searches, traits
from pipeline.quantize.layered import LayeredModel
from pipeline.quantize.pieces import Pieces, discard, join
from pipeline.quantize.source_model import linear_layers, quiet_transformers

if TYPE_CHECKING:
    import torch
    from torch import nn

Tensors = dict[str, "torch.Tensor"]
_HIDDEN = "hidden"


def calibrate(
    source: SourceCheckpoint,
    quantization: QuantizationConfig,
    calibration: CalibrationConfig,
    *,
    formats: Mapping[str, Format],
    kv_ranges: bool,
    out: Path,
    progress: Progress,
    resume: Path | None = None,
) -> None:
    """Write a Calibration directory (core/artifacts.py) to `out`.

    Args:
        source: a Hugging Face directory with safetensors and tokenizer.json.
        quantization: group size, AWQ method, alpha: what the algorithms of the formats need.
        calibration: the text.
        formats: quantized layer -> format.
        kv_ranges: measure keys and values too.
        out: an existing or new directory.
        progress: told of the text and of each layer.
        resume: keeps finished layers and the activations behind them; a later run goes on from there.

    Raises:
        ConfigError: the text or the architecture does not fit.
        BadSafetensors: weights are missing or have the wrong shape.
        ToolError: ModelOpt failed, or an observer saw nothing.
    """
    observed = kv_ranges or any(observes(form) for form in formats.values())
    rows = _draw(source.path, calibration, progress, observed=observed)
    out.mkdir(parents=True, exist_ok=True)
    kept = Pieces(resume or out / "unfinished", durable=resume is not None)
    with quiet_transformers():
        model = LayeredModel.open(source.path)
        progress.note(f"calibrate on {model.device}, layer by layer: {model.why}")
        work = _Work(
            model=model,
            quantization=quantization,
            formats=formats,
            kv_ranges=kv_ranges,
            batches=_batches(rows.rows, calibration.sequences_per_pass),
            kept=kept,
            resumable=resume is not None,
            progress=progress,
        )
        work.run()
    join([kept.path(f"state-{name}") for name in work.parts], out / "state.safetensors")
    join([kept.path(f"inputs-{name}") for name in work.parts], out / "inputs.safetensors")
    seen: dict[str, int] = {}
    for name in work.parts:
        seen |= json.loads((kept.notes(f"state-{name}") or {}).get("tokens", "{}"))
    if resume is None:
        discard(kept.directory)
    write_json(out / "formats.json", dict(formats))
    covered = experts.coverage(seen) if observed else {}
    for words in experts.coverage_warnings(covered):
        progress.note(f"warning: {words}")
    write_json(out / "calibration.json", {**rows.record, **({"experts": covered} if covered else {})})


def _draw(source: Path, calibration: CalibrationConfig, progress: Progress, *, observed: bool) -> text.TokenRows:
    wanted = calibration.num_samples if observed else 1
    rows = text.sample(
        text.text_sets(calibration),
        source,
        num_samples=wanted,
        max_seq_len=calibration.max_seq_len,
        seed=calibration.seed,
    )
    if not observed:
        progress.note("nothing is calibrated; one sequence is recorded for the proof")
        return rows
    progress.note(f"calibration: {len(rows.rows)} sequences of {len(rows.rows[0])} tokens from {rows.origin}")
    for words in text.warnings(rows.record):
        progress.note(f"warning: {words}")
    return rows


def _batches(rows: Sequence[Sequence[int]], size: int) -> list[Sequence[Sequence[int]]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


@dataclass(kw_only=True)
class _Work:
    """One calibration: what it was asked for, and the activations that reach the next layer."""

    model: LayeredModel
    quantization: QuantizationConfig
    formats: Mapping[str, Format]
    kv_ranges: bool
    batches: list[Sequence[Sequence[int]]]
    kept: Pieces
    resumable: bool
    progress: Progress
    hidden: list[torch.Tensor] = field(default_factory=list)

    @property
    def parts(self) -> list[str]:
        """Names of the parts, in model order."""
        layers = [f"{index:05d}" for index in range(self.model.count)]
        return [*layers, "head"] if self.model.head in self.formats else layers

    def run(self) -> None:
        """Calibrate every layer that an earlier run has not."""
        first = self._continue()
        with self.progress.track("calibrate", len(self.parts), "layers") as advance:
            advance(first)
            tokens = sum(len(row) for batch in self.batches for row in batch)
            for indices in self.model.groups(range(first, self.model.count), self._alike, tokens=tokens):
                if self.model.head in self.formats and indices[-1] == self.model.count - 1:
                    self._layers(indices, head=True)
                    advance(1)
                self.hidden = self._layers(indices)
                if self.resumable:
                    self._keep(indices[-1] + 1)
                advance(len(indices))

    def _alike(self, index: int) -> Hashable:
        """What is equal for neighbouring layers that can be calibrated as one model."""
        if self.quantization.awq == "full" and any(self.formats[name] in AWQ for name in self._named([index])):
            return index  # clipping is searched on what smoothed layers compute, not on what the source's do
        before_head = self.model.head in self.formats and index == self.model.count - 1
        return self.model.kind(index, self.formats), before_head

    def _named(self, indices: Sequence[int]) -> list[str]:
        """The quantized linear layers of some decoder layers."""
        return [name for name in self.formats if any(self.model.inside(index, name) for index in indices)]

    def _continue(self) -> int:
        """Take up the activations that an interrupted run kept, or start; return the layer to do next."""
        notes = self.kept.notes(_HIDDEN) if self.resumable else None
        if notes is not None:
            done = int(notes["next"])
            parts = [f"{kind}-{part}" for kind in ("state", "inputs") for part in self.parts[:done]]
            if all(self.kept.notes(part) is not None for part in parts):
                stored = self.kept.load(_HIDDEN)
                self.hidden = [stored[f"{number:06d}"] for number in range(len(stored))]
                self.progress.note(f"calibrate: {done} of {self.model.count} layers are done already")
                return done
        self.hidden = self.model.embed(self.batches)
        return 0

    def _keep(self, done: int) -> None:
        tensors = {f"{number:06d}": hidden for number, hidden in enumerate(self.hidden)}
        self.kept.write(_HIDDEN, tensors, {"next": str(done)})

    def _layers(self, indices: Sequence[int], *, head: bool = False) -> list[torch.Tensor]:
        """Calibrate layers (or the head behind them), keep what was found and return what leaves them."""
        formats = {name: self.formats[name] for name in ([self.model.head] if head else self._named(indices))}
        watch = _Watch(self.model, indices, self.hidden, formats, head=head, note=self.progress.note)
        state: Tensors = {}
        for form, kv_ranges in self._passes(formats, kv_ranges=self.kv_ranges and not head):
            chosen = {name: given for name, given in formats.items() if given == form}
            how = "max" if form is None else algorithm(form, self.quantization)
            watch.averages = form in AWQ
            with self.model.borrow(indices, head=head) as live:
                named = by_glob(chosen, linear_layers(live))
                config = quantizer_config(self.quantization, named, kv_scales=kv_ranges)
                modelopt.quantize_in_place(live, {**config, "algorithm": how}, watch.feed)
                state |= _read_state(live, chosen, clipped=isinstance(how, dict) and how["method"] in _CLIPPING)
        if not watch.left:
            with self.model.borrow(indices, head=head) as live:
                watch.feed(live)
        ranged = [name for name, form in formats.items() if traits(form, export="hf").static_activations]
        watch.widest |= experts.lend_missing(watch.widest, ranged, widest=True)
        watch.rows |= experts.lend_missing(watch.rows, formats, widest=False)
        state |= {f"{name}.input_amax": amax for name, amax in watch.widest.items()}
        _check_observed(state, formats, expects_kv=self.kv_ranges and not head)
        tokens = {name: watch.tokens.get(name, 0) for name in formats}
        for part in ["head"] if head else [f"{index:05d}" for index in indices]:
            prefix = f"{self.model.head}." if head else f"{self.model.layer_name(int(part))}."
            self._keep_part(part, prefix, state, watch.rows, tokens)
        return watch.left

    def _keep_part(self, part: str, prefix: str, state: Tensors, rows: Tensors, tokens: Mapping[str, int]) -> None:
        """Keep what was found of one decoder layer, or of the head."""
        mine = {name: tensor for name, tensor in sorted(state.items()) if name.startswith(prefix)}
        counted = {name: count for name, count in tokens.items() if f"{name}.".startswith(prefix)}
        self.kept.write(f"state-{part}", mine, {"tokens": json.dumps(counted)})
        inputs = {f"{name}.input": found for name, found in sorted(rows.items()) if f"{name}.".startswith(prefix)}
        self.kept.write(f"inputs-{part}", inputs)

    def _passes(self, formats: Mapping[str, Format], *, kv_ranges: bool) -> list[tuple[Format | None, bool]]:
        """Each format for which ModelOpt searches scales, and whether keys and values are measured with it.

        None is for keys and values alone. Ranges that are plain maxima (fp8) need no quantizers: `_Watch` sees them.
        AWQ asks for the data again once ranges are known, and keys and values would then be rounded while it searches.
        """
        forms: list[Format | None] = [*sorted({form for form in formats.values() if searches(form)})]
        carrier = next((form for form in forms if form not in AWQ), None)
        if kv_ranges and carrier is None:
            forms.insert(0, None)
        return [(form, kv_ranges and form == carrier) for form in forms]


_CLIPPING = ("awq_clip", "awq_full")


class _Watch:
    """Feeds layers with what reaches them, and sees what is said of their linear layers the first time.

    ModelOpt asks once or twice for the data. The first time, quantizers only observe: what leaves the layers then is
    what leaves them in the source model, and goes on to the next ones.
    """

    def __init__(
        self,
        model: LayeredModel,
        indices: Sequence[int],
        entering: Sequence[torch.Tensor],
        formats: Mapping[str, Format],
        *,
        head: bool,
        note: Callable[[str], None],
    ) -> None:
        self.averages = False
        self.left: list[torch.Tensor] = []
        self.rows: Tensors = {}
        self.widest: Tensors = {}
        self.tokens: dict[str, int] = {}
        self._measured: tuple[torch.Tensor, torch.Tensor] | None = None  # q, k and v read one tensor
        self._model, self._indices, self._entering, self._formats, self._head = model, indices, entering, formats, head
        self._note = note

    def feed(self, live: nn.Module) -> None:
        """Run all data through the layers; ModelOpt calls this."""
        if self.left:
            for hidden in self._entering:
                self._run(live, hidden)
            return
        with self._observing(live):
            for hidden in self._entering:
                self.left.append(self._run(live, hidden))

    def _run(self, live: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """Run sequences through the layers; what does not fit into memory goes in halves.

        The widest of two halves is the widest. AWQ averages over passes, so each of its passes goes whole or fails.
        """
        import torch

        counted = dict(self.tokens)
        try:
            return self._model.run(live, self._indices, hidden, head=self._head)
        except (MemoryError, torch.OutOfMemoryError):
            self.tokens = counted
            if self.averages or len(hidden) == 1:
                raise
        half = len(hidden) // 2
        self._note(f"{len(hidden)} sequences do not fit into memory at once: they go through in halves")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return torch.cat([self._run(live, hidden[:half]), self._run(live, hidden[half:])])

    @contextmanager
    def _observing(self, live: nn.Module) -> Iterator[None]:
        handles = [live.get_submodule(name).register_forward_pre_hook(self._observer(name)) for name in self._formats]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _observer(self, name: str) -> Callable[[nn.Module, Any], None]:
        import torch

        ranged = traits(self._formats[name], export="hf").static_activations

        def observe(_module: nn.Module, args: Any) -> None:  # noqa: ANN401 - a layer's inputs
            x = args[0].detach()
            if not x.numel():
                return  # an expert that no token of the batch was sent to
            self.tokens[name] = self.tokens.get(name, 0) + x.numel() // x.shape[-1]
            if name not in self.rows:
                # The tokens that reach an expert come without the sequences that they are from.
                self.rows[name] = probes.choose_rows(x[0] if x.ndim > 2 else x).float().cpu()  # noqa: PLR2004
            if ranged:
                if self._measured is None or self._measured[0] is not args[0]:
                    self._measured = args[0], _widest(x)
                widest = self._measured[1]
                self.widest[name] = torch.maximum(self.widest[name], widest) if name in self.widest else widest.clone()

        return observe


def _widest(x: torch.Tensor) -> torch.Tensor:
    """The largest |x| of each channel: float32 [in] for x [..., in]; no copy of x is made."""
    import torch

    rows = x.reshape(-1, x.shape[-1])
    return torch.maximum(rows.amax(dim=0), -rows.amin(dim=0)).abs().float().cpu()


def _read_state(live: nn.Module, formats: Mapping[str, Format], *, clipped: bool) -> Tensors:
    """What ModelOpt's quantizers hold after a calibration, except input ranges."""
    state: Tensors = {}
    for name in formats:
        scale = modelopt.pre_quant_scale(live.get_submodule(name))
        if scale is not None:
            state[f"{name}.pre_quant_scale"] = scale.float().cpu()
    for name, quantizer in modelopt.kv_quantizers(live).items():
        if quantizer.amax is not None:
            state[f"{name}_amax"] = quantizer.amax.float().reshape(1).cpu()
    if clipped:
        state |= {f"{name}.clip": share.float().cpu() for name, share in modelopt.take_clipping(live).items()}
    return state


def _check_observed(state: Tensors, formats: Mapping[str, Format], *, expects_kv: bool) -> None:
    """Refuse a calibration in which an observer saw nothing."""
    import torch

    ranged = [name for name, form in formats.items() if traits(form, export="hf").static_activations]
    problems = [
        Problem(where=name, message="saw no calibration data.") for name in ranged if f"{name}.input_amax" not in state
    ]
    if expects_kv and not any(name.endswith(".k_amax") for name in state):
        problems.append(Problem(where="kv_cache", message="no keys or values were seen."))
    for name, tensor in state.items():
        if not torch.isfinite(tensor).all():
            problems.append(Problem(where=name, message="has a range that is not finite."))
        elif name.endswith("_amax") and not (tensor > 0).any():
            problems.append(Problem(where=name, message="saw only zeros."))
    if problems:
        raise ToolError(
            f"ModelOpt {version('nvidia-modelopt')} did not calibrate the model as asked",
            problems=problems[:20],
            hint="Use more calibration text, or exclude these layers (quantization.exclude).",
        )
