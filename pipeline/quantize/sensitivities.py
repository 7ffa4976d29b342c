"""What each candidate format costs each group of layers, as `score` measured it: sensitivity.json, read and written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, get_args

from pipeline.config.formats import CODE_BITS
from pipeline.config.schema import Format, ScoreMethod

FILE = "sensitivity.json"
WHOLE_BITS = 16
_NAMED = 4


@dataclass(frozen=True, kw_only=True)
class Group:
    """Layers that share a format because engines fuse them, or one layer.

    Attributes:
        layers: names, in model order.
        weights: number of weights of all of them.
        scores: candidate -> estimated loss in nats per token when only this group takes it; 16 bit loses nothing.
    """

    layers: tuple[str, ...]
    weights: int
    scores: Mapping[Format, float]

    @property
    def name(self) -> str:
        """What a person calls it: "model.layers.0.self_attn.q_proj+k_proj+v_proj", or what holds many of them."""
        if len(self.layers) > _NAMED:
            parted = zip(*(name.split(".") for name in self.layers), strict=False)
            shared = takewhile(lambda parts: len(set(parts)) == 1, parted)
            return f"{'.'.join(parts[0] for parts in shared)} ({len(self.layers)} layers)"
        head, _, last = self.layers[0].rpartition(".")
        parts = [last, *(layer.removeprefix(f"{head}.") for layer in self.layers[1:])]
        return f"{head}.{'+'.join(parts)}" if head else "+".join(parts)


@dataclass(frozen=True, kw_only=True)
class Sensitivities:
    """Everything that a choice of formats is made from.

    Attributes:
        method: how ModelOpt estimated the loss.
        groups: every group that the search may decide, in model order.
        fixed: layer -> format of those that quantization.overrides decides.
        layers: number of weights of every linear layer of the model, decided or not, in model order.
        parameters: all parameters of the model; a tied head counts once.
        text: record of the token rows that were scored.
    """

    method: ScoreMethod
    groups: tuple[Group, ...]
    fixed: Mapping[str, Format]
    layers: Mapping[str, int]
    parameters: int
    text: Mapping[str, Any]

    @property
    def candidates(self) -> tuple[Format, ...]:
        """Formats that were tried, narrowest first."""
        tried = {name for group in self.groups for name in group.scores}
        return tuple(sorted(tried, key=lambda name: (CODE_BITS[name], get_args(Format).index(name))))

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "method": self.method,
            "unit": "nats per token",
            "groups": [
                {
                    "name": group.name,
                    "layers": list(group.layers),
                    "weights": group.weights,
                    "candidates": {
                        name: {"score": score, "bits": CODE_BITS[name] * group.weights}
                        for name, score in group.scores.items()
                    },
                }
                for group in self.groups
            ],
            "fixed": dict(self.fixed),
            "layers": [{"name": name, "weights": weights} for name, weights in self.layers.items()],
            "parameters": self.parameters,
            "text": dict(self.text),
        }


def write(directory: Path, found: Sensitivities, versions: Mapping[str, str]) -> None:
    """Write sensitivity.json: equal scores give equal bytes."""
    document = found.document() | {"versions": dict(versions)}
    text = json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    (directory / FILE).write_text(text, encoding="utf-8")


def read(directory: Path) -> Sensitivities:
    """Read what `write` wrote."""
    document = json.loads((directory / FILE).read_text("utf-8"))
    return Sensitivities(
        method=document["method"],
        groups=tuple(
            Group(
                layers=tuple(group["layers"]),
                weights=group["weights"],
                scores={name: tried["score"] for name, tried in group["candidates"].items()},
            )
            for group in document["groups"]
        ),
        fixed=document["fixed"],
        layers={layer["name"]: layer["weights"] for layer in document["layers"]},
        parameters=document["parameters"],
        text=document["text"],
    )
