"""What a config means for a checkpoint that is quantized already: its format is a fact, not a choice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, Protocol

from pipeline.config.load import DEFAULT
from pipeline.config.schema import BuildConfig
from pipeline.errors import Problem

_UNUSED_TOKENS = 8
# Targets that are given the checkpoint's codes in a layout of ours; runtimes of the others read its own files.
CONVERTED: Mapping[str, Literal["hf", "trtllm"]] = {"openvino": "hf", "tensorrt_llm": "trtllm"}


class MadeElsewhere(Protocol):
    """What was found in the checkpoint."""

    @property
    def method(self) -> str:
        """The tool's layout, for people."""
        ...

    @property
    def format(self) -> str:
        """As quantization.format names it."""
        ...

    @property
    def group_size(self) -> int | None:
        """Inputs per scale, None where there are no groups."""
        ...

    @property
    def dtype(self) -> str:
        """Of what is not quantized."""
        ...

    @property
    def passed_on(self) -> bool:
        """Whether the files stay as they are, for a runtime that reads them."""
        ...

    @property
    def note(self) -> str:
        """What of the checkpoint is not computed here; empty when nothing is left out."""
        ...


def adopt(config: BuildConfig, made: MadeElsewhere) -> BuildConfig:
    """Return the config with format, group size and dtype as the checkpoint has them, and no text to calibrate with."""
    quantization: dict[str, Any] = {"format": made.format, "overrides": ()}
    if made.group_size is not None:
        quantization["group_size"] = made.group_size
    return config.model_copy(
        update={
            "quantization": config.quantization.model_copy(update=quantization),
            "engine": config.engine.model_copy(update={"dtype": made.dtype}),
            # Nothing is calibrated, so no law about the text's length may stop the build.
            "calibration": config.calibration.model_copy(update={"max_seq_len": _UNUSED_TOKENS}),
        }
    )


def check(config: BuildConfig, made: MadeElsewhere, provenance: Mapping[str, str]) -> Iterator[Problem]:
    """Yield what the config, as written, asks for and the checkpoint is not.

    Args:
        config: as loaded, before `adopt`.
        made: what the checkpoint is.
        provenance: key path -> "file:line", or DEFAULT for a key that is not written (LoadedConfig.provenance).
    """
    facts: dict[str, tuple[object, object]] = {
        "quantization.format": (config.quantization.format, made.format),
        "quantization.group_size": (config.quantization.group_size, made.group_size),
        "engine.dtype": (config.engine.dtype, made.dtype),
    }
    for key, (asked, found) in facts.items():
        if provenance.get(key, DEFAULT) != DEFAULT and asked != found:
            message = (
                f"{asked} was asked for, and the checkpoint is {found or 'without groups'} already ({made.method})."
            )
            hint = "Remove the key: nothing is quantized again."
            yield Problem(where=f"{provenance[key]} {key}", message=message, hint=hint)
    if made.note:
        yield Problem(where="source", message=f"{made.method}: {made.note}.", severity="warning")
    yield from _kv_cache(config, made)
    if config.quantization.overrides:
        message = f"the checkpoint's layers have their formats already ({made.method})."
        hint = "Remove the key: nothing is quantized again."
        yield Problem(where="quantization.overrides", message=message, hint=hint)
    if config.sparsity.method != "none":
        message = "zeros are put into 16-bit weights, and this source is quantized already."
        yield Problem(where="sparsity.method", message=message, hint="Name the 16-bit checkpoint it was made from.")
    if config.finetune.method != "none":
        message = "training changes 16-bit weights, and this source is quantized already."
        yield Problem(where="finetune.method", message=message, hint="Name the 16-bit checkpoint it was made from.")
    if config.quality.limited and config.verify.reference is None:
        message = "the quality gate compares with the 16-bit model, and the source is quantized already."
        hint = "Set verify.reference to the 16-bit checkpoint."
        # Another step of a fallback may name one, so this alone stops nothing: see `Build.can_be_judged`.
        yield Problem(where="quality", message=message, hint=hint, severity="warning")


def _kv_cache(config: BuildConfig, made: MadeElsewhere) -> Iterator[Problem]:
    """A KV cache whose scales would come from a calibration, which there is none of."""
    asked, engine = config.quantization.kv_cache, config.engine.target == "tensorrt_llm"
    message, hint = "", "Set kv_cache: auto."
    if made.passed_on and asked != "auto":
        message = "the checkpoint is passed on as it is, and it has no scales of a KV cache."
    elif asked == "fp8":
        message = "the scales of an fp8 KV cache come from calibration, and nothing is calibrated here."
        hint = hint if engine else "Set kv_cache: auto or int8."
    elif asked == "int8" and engine:
        message = "an engine takes the scales of an int8 KV cache from calibration, and nothing is calibrated here."
    if message:
        yield Problem(where="quantization.kv_cache", message=message, hint=hint)
