"""NVIDIA ModelOpt's search over formats, for its scores: what each candidate does to each group of layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pipeline.quantize.modelopt import guarded

if TYPE_CHECKING:
    import torch
    from torch import nn

_ALL = 1 << 30


@dataclass(frozen=True, kw_only=True)
class ScoredGroup:
    """Layers that must share a format, and what each candidate does to the loss when only they take it.

    `scores` are sums over every token that was scored, as ModelOpt defines them for the method.
    """

    layers: tuple[str, ...]
    scores: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Search:
    """What `score_groups` is to try: candidate name -> quantizer config, on batches of token ids [rows, length].

    Attributes:
        candidates: by name.
        batches: gives every batch, each time it is iterated.
        kept: layers that stay as they are.
        method: ModelOpt's.
        run: feeds a batch, and returns the logits in torch's inference mode, which only kl_div scores in.
        backward: takes a batch to the gradients of its summed loss.
    """

    candidates: Mapping[str, dict[str, Any]]
    batches: Iterable[torch.Tensor]
    kept: Sequence[str]
    method: Literal["gradient", "kl_div"]
    run: Callable[[nn.Module, torch.Tensor], torch.Tensor | None]
    backward: Callable[[nn.Module, torch.Tensor], None]


def score_groups(model: nn.Module, search: Search) -> list[ScoredGroup]:
    """Calibrate every candidate and score each group of layers with it, all others at full precision.

    The groups are ModelOpt's: q, k and v share a format, gate and up do. The model is not usable afterwards.
    """
    import torch

    with guarded(f"score layers ({search.method})"), _without_bars(), torch.no_grad():
        import modelopt.torch.quantization as mtq
        from modelopt.torch.quantization.algorithms import QuantRecipe

        only_gradient = {"forward_backward_step": search.backward} if search.method == "gradient" else {}
        mtq.auto_quantize(
            model,
            # Every format meets this budget: scores do not depend on it, and the choice is made elsewhere.
            constraints={"effective_bits": 16.0},
            quantization_formats=list(search.candidates.values()),
            data_loader=search.batches,
            forward_step=search.run,
            disabled_layers=list(search.kept),
            # Every batch there is: ModelOpt would calibrate AWQ with a quarter of them.
            num_calib_steps=_ALL,
            num_score_steps=_ALL,
            method=search.method,
            **only_gradient,
        )
        recipes = {name: QuantRecipe(quant_cfg=config, name=name) for name, config in search.candidates.items()}
        return [
            ScoredGroup(
                layers=tuple(group.quant_module_names),
                scores={name: _score(group, recipe) for name, recipe in recipes.items()},
            )
            for group in searched_groups(model)
        ]


def searched_groups(model: nn.Module) -> list[Any]:
    """The groups of layers that a search may decide, once it has begun."""
    from modelopt.torch.opt.utils import named_hparams
    from modelopt.torch.quantization.algorithms import QuantRecipeHparam

    found = (group for _name, group in named_hparams(model, unique=True) if isinstance(group, QuantRecipeHparam))
    return [group for group in found if group.is_configurable]


def _score(group: Any, recipe: Any) -> float:  # noqa: ANN401 - QuantRecipeHparam and QuantRecipe
    """The score as it was measured: ModelOpt's own table lowers it to that of a narrower candidate, and sums a set."""
    parts = group._importance_dict[recipe].values()  # noqa: SLF001 - ModelOpt offers no public way
    return math.fsum(float(part) for part in parts if part is not None)


@contextmanager
def _without_bars() -> Iterator[None]:
    """Keep the search's progress bars off the terminal: they write to stderr, where our own progress speaks."""
    from modelopt.torch.quantization import algorithms

    drawn = algorithms.tqdm
    algorithms.tqdm = lambda iterable, **_options: iterable
    try:
        yield
    finally:
        algorithms.tqdm = drawn
