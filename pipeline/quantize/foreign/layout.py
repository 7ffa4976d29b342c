"""What a layout of quantized layers has to say, and the refusals that all layouts share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from pipeline.errors import ConfigError
from pipeline.quantize.foreign.linear import Element, ForeignLinear
from pipeline.quantize.tensor_files import TensorFiles

Settings = Mapping[str, Any]
_BLOCK = (128, 128)


class Layout(Protocol):
    """How one tool stores quantized linear layers.

    Attributes:
        name: for people, with the variant.
        marker: the suffix whose presence makes a module a quantized layer.
        suffixes: every tensor of a quantized layer but its bias.
    """

    name: str
    marker: str
    suffixes: frozenset[str]

    def shape(self, tensors: TensorFiles, module: str) -> tuple[int, int]:
        """(out, in) of a layer, from the headers."""
        ...

    def decode(self, tensors: TensorFiles, module: str) -> ForeignLinear:
        """Read one layer."""
        ...

    def kind(self, layer: ForeignLinear) -> str:
        """The layout with what a runtime chooses its kernel by, as legality.toml's [[passed_on]] names it."""
        ...


def integer_element(bits: int, module: str) -> Element:
    """The element of integers of `bits` bits.

    Raises:
        ConfigError: neither 4 nor 8 bits.
    """
    match bits:
        case 4:
            return "int4"
        case 8:
            return "int8"
        case _:
            raise refused(f"{module} holds {bits}-bit weights", "Only 4 and 8 bits are read.")


def activations(layer: ForeignLinear) -> str:
    """How a layer's inputs are rounded: "static", "dynamic" or "16 bit"."""
    if layer.input_scale is not None:
        return "static"
    return "dynamic" if layer.dynamic_activations else "16 bit"


def scaling(layer: ForeignLinear, block: tuple[int, int] | None) -> str:
    """What shares a weight scale: "tensor", "channel", "group" or "block"; blocks but 128 x 128 say their size."""
    if block is not None:
        return "block" if block == _BLOCK else f"block {block[0]}x{block[1]}"
    if layer.scales.size == 1:
        return "tensor"
    return "channel" if layer.scales.shape[1] == 1 else "group"


def refused(what: str, hint: str) -> ConfigError:
    """The error for a checkpoint that is understood and not supported."""
    return ConfigError(f"the quantized checkpoint cannot be used: {what}.", hint=hint)
