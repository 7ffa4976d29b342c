"""Parameters of one model: leftovers of a template, keys that must exist, unknown names, values that do not parse."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from pydantic import ValidationError

from pipeline.config.trtllm_options import BackendParameters
from pipeline.triton.backend_parameters import FIELDS, MUST_EXIST, RENAMED
from pipeline.triton.check_load import Finding, Model, Repository, error, warning
from pipeline.triton.launch import ENGINE_BACKEND

_OPTIONS: Final = {
    RENAMED.get(option, option): option for option in BackendParameters.model_fields if option not in FIELDS
}
# Read, but not options of ours.
_ALSO_KNOWN: Final = ("FORCE_CPU_ONLY_INPUT_TENSORS", "exclude_input_in_output", "tokenizer_dir")
# Names of older templates and guides -> what is written instead.
_REMOVED: Final = {
    "worker_path": "Write executor_worker_path; the backend refuses the old name.",
    "enable_trt_overlap": "Remove it; it is deprecated.",
    "max_num_sequences": "Remove it; the engine's max_batch_size rules.",
    "tokenizer_type": "Remove it; the tokenizer is recognised by its files.",
    "max_kv_cache_length": "Write max_attention_window_size.",
    "kv_cache_free_gpu_memory_fraction": "Write kv_cache_free_gpu_mem_fraction.",
    "engine_dir": "Write gpt_model_path.",
    "batching_strategy": "Write gpt_model_type.",
}
_IN_FLIGHT: Final = ("inflight_fused_batching", "inflight_batching")
_BOOLEANS: Final = {"True": "true", "TRUE": "true", "1": "true", "False": "false", "FALSE": "false", "0": "false"}
_PLACEHOLDER: Final = re.compile(r"\$\{\w+\}")
_TEXT_MODELS: Final = ("preprocessing", "postprocessing", "tensorrt_llm_bls")
_XGRAMMAR_KEYS: Final = ("encoded_vocab", "tokenizer_str", "stop_token_ids")


def check(model: Model, repository: Repository) -> Iterator[Finding]:
    """Yield what is wrong with the parameters of a model."""
    is_engine = model.config.backend == ENGINE_BACKEND
    yield from _leftovers(model, is_engine=is_engine)
    if is_engine:
        yield from _must_exist(model)
        yield from _names(model)
        yield from _values(model)
        yield from _batching(model)
        yield from _guided_decoding(model, repository)
        yield from _pairs(model)
    elif model.name in _TEXT_MODELS:
        for key in model.config.parameters:
            if key in _REMOVED:
                yield warning("TL52", model.place(key), f"parameter '{key}' has no effect.", _REMOVED[key])


def _leftovers(model: Model, *, is_engine: bool) -> Iterator[Finding]:
    """An unfilled optional parameter is its default; an unfilled required one is a broken path."""
    for key, value in sorted(model.config.parameters.items()):
        text = value.string_value
        needed = key in ("gpt_model_path", "gpt_model_type") if is_engine else key == "tokenizer_dir"
        if _PLACEHOLDER.search(text) and needed:
            yield error("TL39", model.place(key), f"parameter '{key}' is still '{text}'.", "Write the value.")
        elif _PLACEHOLDER.search(text) and not (is_engine and key in MUST_EXIST):
            message = f"parameter '{key}' is still '{text}'; the backend takes its default."
            yield warning("TL39", model.place(key), message, "Write the value, or remove the block.")
        if re.search(r"\\[:,]", text):
            # fill_template.py splits at ':' and ','; a backslash that came through is part of the value.
            plain = re.sub(r"\\([:,])", r"\1", text)
            yield error("TL40", model.place(key), f"parameter '{key}' has a backslash: '{text}'.", f"Write '{plain}'.")


def _must_exist(model: Model) -> Iterator[Finding]:
    for key in MUST_EXIST:
        if key not in model.config.parameters:
            message = f"parameter '{key}' is missing, and the backend does not load without it."
            hint = f'Add parameters {{ key: "{key}" value {{ string_value: "" }} }}; empty is fine.'
            yield error("TL43", model.place(), message, hint)


def _names(model: Model) -> Iterator[Finding]:
    for key in sorted(model.config.parameters):
        if key in _OPTIONS or key in _ALSO_KNOWN or key == "gpt_model_path":
            continue
        if key in _REMOVED:
            yield error("TL52", model.place(key), f"parameter '{key}' is none of this backend's.", _REMOVED[key])
            continue
        nearest = difflib.get_close_matches(key, [*_OPTIONS, "gpt_model_path"], n=1)
        hint = f"Write {nearest[0]}." if nearest else "Remove it."
        yield error("TL52", model.place(key), f"parameter '{key}' is unknown, so nothing reads it.", hint)


def _values(model: Model) -> Iterator[Finding]:
    """A value that does not parse is silently the default (model_instance_state.cc@0c8de69)."""
    for key, option in _OPTIONS.items():
        text = model.parameter(key)
        if not text or key == "gpt_model_type":
            continue
        field = BackendParameters.model_fields[option]
        value: Any = _BOOLEANS.get(text, text) if "bool" in str(field.annotation) else text
        if "str" in str(field.annotation) or "Literal" in str(field.annotation):
            value = text
        try:
            BackendParameters.model_validate_strings({option: value})
        except ValidationError as problem:
            message = f"parameter '{key}' is '{text}': {problem.errors()[0]['msg'].lower()}; the default would apply."
            yield error("TL52", model.place(key), message, f"{field.description}")


def _batching(model: Model) -> Iterator[Finding]:
    kind = model.parameter("gpt_model_type")
    if kind.upper() == "V1":
        message = "static batching (V1) was removed."
        yield error("TL57", model.place("gpt_model_type"), message, f"Write {_IN_FLIGHT[0]}.")
    elif kind not in _IN_FLIGHT and "gpt_model_type" in model.config.parameters and kind:
        message = f"'{kind}' is no batching strategy."
        yield error("TL57", model.place("gpt_model_type"), message, f"Write {' or '.join(_IN_FLIGHT)}.")
    elif not kind:
        yield error("TL57", model.place(), "parameter 'gpt_model_type' is missing.", f"Write {_IN_FLIGHT[0]}.")


def _guided_decoding(model: Model, repository: Repository) -> Iterator[Finding]:
    backend, path = model.parameter("guided_decoding_backend"), model.parameter("xgrammar_tokenizer_info_path")
    if bool(backend) != bool(path):
        missing = "xgrammar_tokenizer_info_path" if backend else "guided_decoding_backend"
        message = f"guided decoding is off: '{missing}' is empty, and guided requests will fail."
        yield error("TL67", model.place(missing), message, "Fill both, or empty both.")
    if not (backend and path):
        return
    file = repository.locate(model, path)
    if not file.is_file():
        return  # reported as a path
    try:
        info = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as problem:
        yield error("TL67", str(file), f"is not JSON: {problem}", "Generate it again.")
        return
    absent = [key for key in _XGRAMMAR_KEYS if not isinstance(info, Mapping) or key not in info]
    if absent:
        yield error("TL67", str(file), f"lacks {', '.join(absent)}.", "Generate it with the tokenizer of this model.")


def _pairs(model: Model) -> Iterator[Finding]:
    """Parameters that only make sense together."""
    cross, encoder = model.parameter("cross_kv_cache_fraction"), model.parameter("encoder_model_path")
    if cross and not encoder:
        message = "is for encoder-decoder models, and there is no encoder."
        yield error("TL53", model.place("cross_kv_cache_fraction"), message, "Remove it.")
    if encoder and model.parameter("gpt_model_path") and not cross:
        message = "an encoder-decoder model needs cross_kv_cache_fraction."
        yield error("TL53", model.place("encoder_model_path"), message, "Write a share, such as 0.5.")
    sizes = ("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size")
    missing = [key for key in sizes if not model.parameter(key)]
    if model.parameter("decoding_mode") == "lookahead" and missing:
        message = f"lookahead decoding does not load without {', '.join(missing)}."
        yield error("TL52", model.place("decoding_mode"), message, "Write them.")
