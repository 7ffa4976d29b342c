"""From sensitivities and a budget to the format of every layer, and in words why.

The budget is an average: `effective_bits` are the bits of all codes, divided by the weights of all linear layers that
the config does not keep at 16 bit. Scales do not count, nor do embeddings; a layer that the search leaves at 16 bit
counts as 16.

The choice is exact: of all that keep the budget, the one with the least sum of scores; of equal ones, that with the
fewest bits. It is found by dynamic programming over the bits spent, because a solver of linear programs works to a
tolerance (1e-7 of a nat matters here) and settles ties as it likes. One table answers every budget.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pipeline.config.formats import CODE_BITS
from pipeline.config.schema import Format, QuantizationConfig
from pipeline.errors import ConfigError
from pipeline.quantize.sensitivities import WHOLE_BITS, Group, Sensitivities

FILE = "choice.json"
Chosen = Format | Literal["16bit"]
WHOLE: Chosen = "16bit"
_MIB_BITS = 8 * 2**20
# Steps of the table. Layer sizes share large factors: real models need some ten thousand and are solved exactly.
_MOST_STEPS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Option:
    """One way to store a group: a candidate or 16 bit, the bits of its codes and its score."""

    format: Chosen
    bits: int
    score: float


def options(group: Group) -> tuple[Option, ...]:
    """Every way to store a group, fewest bits first, 16 bit last."""
    tried = [
        Option(format=name, bits=CODE_BITS[name] * group.weights, score=score) for name, score in group.scores.items()
    ]
    tried.append(Option(format=WHOLE, bits=WHOLE_BITS * group.weights, score=0.0))
    return tuple(sorted(tried, key=lambda option: option.bits))


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What one budget buys.

    Attributes:
        asked: effective bits that were allowed.
        taken: the option of each group, in the order of `sensitivities.groups`.
        sensitivities: what it was chosen from.
    """

    asked: float
    taken: tuple[Option, ...]
    sensitivities: Sensitivities

    @property
    def formats(self) -> dict[str, Format]:
        """Layer -> format of every layer that is quantized, in model order."""
        found: dict[str, Format] = {
            name: form for name, form in self.sensitivities.fixed.items() if CODE_BITS[form] < WHOLE_BITS
        }
        for group, option in zip(self.sensitivities.groups, self.taken, strict=True):
            if option.format != "16bit":
                found |= dict.fromkeys(group.layers, option.format)
        return {name: found[name] for name in self.sensitivities.layers if name in found}

    @property
    def loss(self) -> float:
        """Sum of the scores: the estimated loss in nats per token."""
        return math.fsum(option.score for option in self.taken)

    @property
    def effective_bits(self) -> float:
        """Bits per weight of the linear layers that are not excluded."""
        return self._bits() / _counted_weights(self.sensitivities)

    @property
    def effective_bits_of_all(self) -> float:
        """As ModelOpt counts: bits per weight of all linear layers, excluded ones at 16."""
        everything = sum(self.sensitivities.layers.values())
        outside = everything - _counted_weights(self.sensitivities)
        return (self._bits() + WHOLE_BITS * outside) / everything

    @property
    def bits_per_parameter(self) -> float:
        """Bits per parameter of the whole model: embeddings and norms at 16, a tied head once."""
        outside = self.sensitivities.parameters - _counted_weights(self.sensitivities)
        return (self._bits() + WHOLE_BITS * outside) / self.sensitivities.parameters

    def _bits(self) -> int:
        return sum(option.bits for option in self.taken) + _fixed_bits(self.sensitivities)

    def document(self) -> dict[str, Any]:
        """As JSON: the budget, what was chosen for each group and why, and the format of each layer."""
        whys = list(reasons(self))
        excluded = set(self.sensitivities.layers) - set(self.sensitivities.fixed)
        excluded -= {layer for group in self.sensitivities.groups for layer in group.layers}
        return {
            "asked_effective_bits": self.asked,
            "effective_bits": self.effective_bits,
            "effective_bits_of_all_linear_layers": self.effective_bits_of_all,
            "bits_per_parameter": self.bits_per_parameter,
            "estimated_loss_nats": self.loss,
            "method": self.sensitivities.method,
            "formats": [{"name": name, "format": form} for name, form in self.formats.items()],
            "groups": [
                {
                    "name": group.name,
                    "layers": list(group.layers),
                    "weights": group.weights,
                    "format": option.format,
                    "bits": option.bits,
                    "score": option.score,
                    "reason": why,
                }
                for group, option, why in zip(self.sensitivities.groups, self.taken, whys, strict=True)
            ],
            "overridden": dict(self.sensitivities.fixed),
            "excluded": sorted(excluded),
        }


class Table:
    """The best choice for every budget."""

    def __init__(self, sensitivities: Sensitivities) -> None:
        self._sensitivities = sensitivities
        self._options = [options(group) for group in sensitivities.groups]
        self._floor = sum(row[0].bits for row in self._options) + _fixed_bits(sensitivities)
        spread = [[option.bits - row[0].bits for option in row] for row in self._options]
        total = sum(row[-1] for row in spread)
        self._unit = max(reduce(math.gcd, (bits for row in spread for bits in row), 0), -(-total // _MOST_STEPS), 1)
        # Rounded up, so that what the table calls affordable is.
        steps = [[-(-bits // self._unit) for bits in row] for row in spread]
        self._least = np.zeros(sum(row[-1] for row in steps) + 1)
        self._least[1:] = math.inf
        self._picks: list[npt.NDArray[np.int8]] = []
        self._steps = steps
        for row, costs in zip(self._options, steps, strict=True):
            self._add(row, costs)

    def _add(self, row: Sequence[Option], costs: Sequence[int]) -> None:
        """Let the table decide one more group: least[n] is the least loss for which exactly n steps are spent."""
        least = np.full_like(self._least, math.inf)
        pick = np.zeros(len(least), np.int8)
        for number, (option, cost) in enumerate(zip(row, costs, strict=True)):
            reached = np.full_like(least, math.inf)
            reached[cost:] = self._least[: len(least) - cost] + option.score
            better = reached < least
            least[better], pick[better] = reached[better], number
        self._least = least
        self._picks.append(pick)

    @property
    def lowest(self) -> float:
        """The least effective bits that any choice has."""
        return self._floor / _counted_weights(self._sensitivities)

    def choose(self, effective_bits: float) -> Choice:
        """Return the best choice that keeps the budget.

        Raises:
            ConfigError: no choice does; says the lowest budget that has one.
        """
        known = self._sensitivities
        # A budget that `lowest` gave, or that is met exactly, must not fail by a rounding of its product.
        room = math.floor(effective_bits * _counted_weights(known) + 1e-6) - self._floor
        if room < 0:
            lowest = math.ceil(self.lowest * 1e4) / 1e4
            raise ConfigError(
                f"quantization.auto.effective_bits: {effective_bits:g} cannot be kept; the lowest is {lowest:g}",
                hint="Raise it, add a narrower candidate, or override fewer layers with wide formats.",
            )
        spent = int(np.argmin(self._least[: room // self._unit + 1]))
        taken: list[Option] = []
        for row, costs, pick in zip(self._options[::-1], self._steps[::-1], self._picks[::-1], strict=True):
            number = int(pick[spent])
            taken.append(row[number])
            spent -= costs[number]
        return Choice(asked=effective_bits, taken=tuple(taken[::-1]), sensitivities=known)


def write(directory: Path, choice: Choice) -> None:
    """Write choice.json."""
    text = json.dumps(choice.document(), indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    (directory / FILE).write_text(text, encoding="utf-8")


def read_formats(directory: Path) -> dict[str, Format]:
    """Read the format of every layer that is quantized from choice.json, in model order."""
    document = json.loads((directory / FILE).read_text("utf-8"))
    return {layer["name"]: layer["format"] for layer in document["formats"]}


def decided(quantization: QuantizationConfig, formats: Mapping[str, Format], whole: Format) -> QuantizationConfig:
    """Return the config that names for each layer what was chosen, as if its user had written it.

    Args:
        quantization: a config of format auto.
        formats: layer -> format of those that are quantized.
        whole: the 16-bit format of all others.
    """
    overrides = [{"layers": name, "format": form} for name, form in formats.items()]
    return QuantizationConfig.model_validate(
        quantization.model_dump() | {"format": whole, "auto": {}, "overrides": overrides}
    )


def reasons(choice: Choice) -> Iterator[str]:
    """Say for each group why it got its format."""
    price = dearest(choice)
    for group, taken in zip(choice.sensitivities.groups, choice.taken, strict=True):
        narrower = [option for option in options(group) if option.bits < taken.bits]
        if not narrower:
            yield f"the narrowest candidate, for {taken.score:.2g} nats"
            continue
        step = min(narrower, key=lambda option: _price(option, taken))
        mib = (taken.bits - step.bits) / _MIB_BITS
        text = f"{step.format} would add {step.score - taken.score:.2g} nats and save {mib:.3g} MiB"
        if price and _price(step, taken) >= price:
            both = f"{_price(step, taken) * _MIB_BITS:.2g} nats per MiB, where the dearest that was taken costs"
            yield f"{text}: {both} {price * _MIB_BITS:.2g}"
        else:
            yield f"{text}, and the budget is kept without it"


def dearest(choice: Choice) -> float:
    """The most that any saving costs that the choice made, in nats per bit; 0 when it made none."""
    taken = [
        max(_price(option, wider) for wider in options(group) if wider.bits > option.bits)
        for group, option in zip(choice.sensitivities.groups, choice.taken, strict=True)
        if option.format != WHOLE
    ]
    return max([0.0, *taken])


def _price(narrow: Option, wide: Option) -> float:
    return (narrow.score - wide.score) / (wide.bits - narrow.bits)


def _counted_weights(known: Sensitivities) -> int:
    return sum(group.weights for group in known.groups) + sum(known.layers[name] for name in known.fixed)


def _fixed_bits(known: Sensitivities) -> int:
    return sum(CODE_BITS[form] * known.layers[name] for name, form in known.fixed.items())
