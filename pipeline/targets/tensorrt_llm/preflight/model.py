"""What can be said from the architecture alone: upstream's class, precision by family, rope, tied embeddings."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.config.formats import UNQUANTIZED, formats_of
from pipeline.targets.tensorrt_llm.budget_constants import constants
from pipeline.targets.tensorrt_llm.models import models
from pipeline.targets.tensorrt_llm.preflight.finding import Case, Finding, error, warning

# RotaryScalingType of NVIDIA/TensorRT-LLM tensorrt_llm/functional.py (another name raises), and the older
# name of longrope, which converters accept.
ROPE_TYPES = frozenset({"linear", "dynamic", "longrope", "llama3", "yarn", "mrope", "su"})


def check(case: Case) -> Iterator[Finding]:
    """Yield what speaks against the architecture on the engine path."""
    yield from _class(case)
    yield from _precision(case)
    yield from _rope(case)
    yield from _tied(case)


def _class(case: Case) -> Iterator[Finding]:
    """trtllm-build looks the architecture up in MODEL_MAP (NVIDIA/TensorRT-LLM#2141)."""
    name, toolchain = case.model.architecture, case.config.engine.toolchain
    if models().model_class(name) is not None:
        return
    if name in models().unsettled:
        message = (
            f"{name} is in one version of upstream's MODEL_MAP and not in another; the image of {toolchain} decides."
        )
        hint = "On the GPU node look for it in tensorrt_llm/models/__init__.py, or set it to tensorrt_llm_llmapi."
        yield warning("TL26", "engine.target", message, hint)
        return
    reason = "only the LLM API serves it" if name in models().llm_api_only else "trtllm-build stops with a KeyError"
    message = f"{name or 'an unnamed architecture'} is not in MODEL_MAP of TensorRT-LLM {toolchain}: {reason}."
    yield error("TL26", "engine.target", message, "Set it to tensorrt_llm_llmapi.")


def _precision(case: Case) -> Iterator[Finding]:
    """Upstream's table 'precision by model'; it lags behind upstream's examples, so a gap is a warning."""
    name = case.model.architecture
    for form in formats_of(case.config.quantization, case.model.linears):
        if models().model_class(name) is None or form in UNQUANTIZED:
            continue
        verdict, note = models().support(name, form)
        if verdict == "yes":
            continue
        unlisted = "the table has no row for it" if verdict == "unlisted" else "the table says no"
        said = f"it is {note}" if note else unlisted
        message = f"upstream does not list {form} for {name} on the engine path ({said})."
        hint = "Judge the verify report and the first answers on the GPU, or pick a listed format."
        yield warning("TL-5.2", "quantization.format", message, hint)


def _rope(case: Case) -> Iterator[Finding]:
    """An engine knows these rope types only (NVIDIA/TensorRT-LLM#2105, #2471)."""
    kind = case.model.rope.scaling.get("rope_type")
    if kind is None or kind in ROPE_TYPES:
        return
    message = f"rope_scaling of type '{kind}' is unknown to TensorRT-LLM {case.config.engine.toolchain}."
    known = ", ".join(sorted(ROPE_TYPES))
    yield error("TL16", "source", message, f"Use engine.target: tensorrt_llm_llmapi; engines know {known}.")


def _tied(case: Case) -> Iterator[Finding]:
    """A shared lm_head is missing on the last pipeline rank (NVIDIA/TensorRT-LLM#1733)."""
    shared = case.model.architecture in constants().shared_head.architectures
    if case.model.tie_word_embeddings and shared and case.config.engine.pipeline_parallel_size > 1:
        message = (
            f"{case.model.architecture} shares lm_head with the embedding and the checkpoint holds it once, on the "
            "first pipeline rank; the last one needs it."
        )
        yield error("TL23", "engine.pipeline_parallel_size", message, "Set it to 1 and use tensor_parallel_size.")
