"""Configs of format auto as configs of one format, for whoever judges or counts before anything is chosen."""

from __future__ import annotations

from pipeline.config.formats import CODE_BITS, SIXTEEN_BIT
from pipeline.config.schema import BuildConfig, Format


def variants(config: BuildConfig) -> tuple[BuildConfig, ...]:
    """The config; with format auto, one config for each candidate as the format of every layer that is searched.

    What holds for each of them holds for each layer of what the search chooses.
    """
    quantization = config.quantization
    if quantization.format != "auto":
        return (config,)
    return tuple(_with_format(config, name) for name in quantization.auto.candidates)


def planned(config: BuildConfig) -> BuildConfig:
    """The config; with format auto, one that takes no less memory than what the search will choose.

    That is the narrowest candidate whose codes have the bits of the budget, or 16 bit.
    """
    quantization = config.quantization
    if quantization.format != "auto":
        return config
    enough = [
        name for name in quantization.auto.candidates if CODE_BITS[name] >= (quantization.auto.effective_bits or 16)
    ]
    return _with_format(config, min(enough, key=CODE_BITS.__getitem__, default=SIXTEEN_BIT[config.engine.dtype]))


def _with_format(config: BuildConfig, name: Format) -> BuildConfig:
    quantization = config.quantization.model_copy(update={"format": name})
    return config.model_copy(update={"quantization": quantization})
