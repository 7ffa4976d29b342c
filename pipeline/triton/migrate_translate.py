"""What an engine repository becomes for the LLM API: keys of a build config, keys of model.yaml, and what is lost.

Nothing is written here. Each step adds to a draft, and says where a value came from. Whether a format exists in the
LLM API's lane is judged by config/legality.py; a refused one is lost with that reason.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from pipeline.config import legality
from pipeline.config.formats import SIXTEEN_BIT
from pipeline.config.keys import KEYS
from pipeline.config.schema import BuildConfig
from pipeline.errors import Problem
from pipeline.triton.migrate_old import OldEngine, OldModel, OldRepository
from pipeline.triton.migrate_table import Carry, table, value_of

TARGET: Final = "tensorrt_llm_llmapi"
ASSUMED_GPU: Final = "H100"
NO_SOURCE: Final = "checkpoint"
_DEVICES = re.compile(r"\d+(,\d+)*(;\d+(,\d+)*)*")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_GROUP_SIZES: Final = (32, 64, 128)


@dataclass(frozen=True, kw_only=True)
class Carried:
    """A setting that goes on: where it was, what it said, and where it is now ("" when not there)."""

    where: str
    old: str
    config: str
    yaml: str
    value: object


@dataclass(frozen=True, kw_only=True)
class Lost:
    """A setting that cannot go on, why, and what to do instead."""

    where: str
    old: str
    reason: str
    instead: str


@dataclass(frozen=True, kw_only=True)
class TensorChange:
    """A request input: its new name, or why there is none."""

    old: str
    new: str
    reason: str


@dataclass(kw_only=True)
class Draft:
    """What is known so far.

    Attributes:
        config: key path of the build config -> value.
        origin: key path -> where the value came from, for a comment.
        yaml: model.yaml, nested.
        device_ids: parameter gpu_device_ids, "" for none.
        instances: instance count of the model.
    """

    config: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)
    yaml: dict[str, Any] = field(default_factory=dict)
    device_ids: str = ""
    instances: int = 1
    decoupled: bool = False
    carried: list[Carried] = field(default_factory=list)
    lost: list[Lost] = field(default_factory=list)
    tensors: list[TensorChange] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def put(self, config: str, yaml: str, value: object, origin: str) -> None:
        """Set a value on both sides."""
        if config:
            self.config[config] = value
            self.origin[config] = origin
        if yaml:
            place = self.yaml
            *sections, name = yaml.split(".")
            for section in sections:
                place = place.setdefault(section, {})
            place[name] = value

    def carry(self, where: str, old: object, config: str, yaml: str, value: object) -> None:
        """Set a value on both sides and list it."""
        self.put(config, yaml, value, where)
        self.carried.append(Carried(where=where, old=str(old), config=config, yaml=yaml, value=value))

    def warn(self, where: str, message: str, hint: str = "") -> None:
        """Note something that the reader should look at."""
        self.problems.append(Problem(where=where, message=message, hint=hint, severity="warning"))


def translate(old: OldRepository, *, name: str, source: Path | None, gpu: str | None) -> Draft:
    """Translate a repository.

    Args:
        old: what was read.
        name: name of the new build.
        source: the Hugging Face checkpoint; None takes what tokenizer_dir says.
        gpu: the GPU that serves; None takes what lies beside the engine.
    """
    draft = Draft(problems=list(old.problems))
    draft.put("name", "", name, "")
    _take_source(draft, old, source)
    draft.put("engine.target", "", TARGET, "the lane that goes on after TensorRT-LLM 1.2")
    draft.put("", "backend", "pytorch", "")
    _take_gpu(draft, old.engine, gpu)
    _take_engine(draft, old)
    for model in old.models.values():
        _take_parameters(draft, old, model)
    _take_defaults(draft, old)
    _take_fields(draft, old)
    _take_tensors(draft, old)
    _settle_lengths(draft)
    _settle_formats(draft)
    _name_what_a_build_forgets(draft)
    return draft


def _take_source(draft: Draft, old: OldRepository, source: Path | None) -> None:
    first = sorted(old.models.values(), key=lambda model: model.name != "preprocessing")
    named = next((model.parameters["tokenizer_dir"] for model in first if "tokenizer_dir" in model.parameters), "")
    if source is not None:
        draft.put("source.path", "model", str(source.resolve()), "as asked for")
        return
    if not named:
        message = "no model names a tokenizer_dir, so the Hugging Face checkpoint is not known"
        hint = "Set source in the config and model in model.yaml, or migrate again with the checkpoint named."
        draft.problems.append(Problem(where="source", message=message, hint=hint))
    elif not Path(named).is_absolute() and _HUB_ID.fullmatch(named):
        hint = f"Write source: {{hub: {named}, revision: <commit>}} in place of path."
        draft.warn("source", f"tokenizer_dir is the hub id '{named}', which is not pinned to a commit", hint)
    else:
        message = f"taken from tokenizer_dir '{named}'; the repository itself does not hold the weights' source"
        draft.warn("source", message, "Check that it is the Hugging Face checkpoint, with weights.")
    draft.put("source.path", "model", named or NO_SOURCE, "tokenizer_dir; the engine does not hold its source")


def _take_gpu(draft: Draft, engine: OldEngine | None, gpu: str | None) -> None:
    known = KEYS["engine.gpu"].choices
    stated = gpu or (engine.gpu if engine is not None else None)
    if stated in known:
        draft.put("engine.gpu", "", stated, "as asked for" if gpu else "engine.json beside the engine")
        return
    what = f"'{stated}' is not a GPU of the config" if stated else "an engine does not record its GPU"
    draft.warn("engine.gpu", f"{what}; {ASSUMED_GPU} is assumed", f"Set it to one of {', '.join(map(str, known))}.")
    draft.put("engine.gpu", "", ASSUMED_GPU, "assumed: the engine does not record it")


def _take_engine(draft: Draft, old: OldRepository) -> None:
    engine = old.engine
    if engine is None:
        draft.put("quantization.format", "", "bf16", "not known: the engine is not here")
        draft.put("engine.dtype", "dtype", "bfloat16", "not known: the engine is not here")
        if old.core.config.max_batch_size > 0:
            where = f"{old.core.name} max_batch_size"
            size = old.core.config.max_batch_size
            draft.carry(where, size, "engine.max_batch_size", "max_batch_size", size)
        return
    _take_precision(draft, engine)
    sizes = {"tp_size": "tensor", "pp_size": "pipeline", "cp_size": "context"}
    for key, word in sizes.items():
        size = _whole(engine.mapping.get(key))
        if size is not None and (size > 1 or word != "context"):
            option = f"{word}_parallel_size"
            draft.carry(f"engine mapping.{key}", size, f"engine.{option}", option, size)
    for key in ("max_batch_size", "max_num_tokens", "max_seq_len"):
        value = _whole(engine.build.get(key))
        if value is None:
            draft.warn(f"engine build_config.{key}", "is not stated; the config's default is taken")
        else:
            draft.carry(f"engine build_config.{key}", value, f"engine.{key}", key, value)
    block = _whole(engine.plugins.get("tokens_per_block"))
    if block is not None:
        where = "engine plugin_config.tokens_per_block"
        draft.carry(where, block, "engine.kv_cache.tokens_per_block", "kv_cache_config.tokens_per_block", block)


def _take_precision(draft: Draft, engine: OldEngine) -> None:
    dtype = str(engine.pretrained.get("dtype", ""))
    if dtype not in SIXTEEN_BIT:
        draft.warn("engine pretrained_config.dtype", f"'{dtype}' is no 16-bit type; bfloat16 is taken")
        dtype = "bfloat16"
    draft.put("engine.dtype", "dtype", dtype, "engine pretrained_config.dtype")
    plain = SIXTEEN_BIT[dtype]
    algo = engine.quantization.get("quant_algo")
    form = plain if algo in (None, "NO_QUANT") else table().quant_algo.get(str(algo))
    where = "engine quantization.quant_algo"
    if form is None:
        reason = f"no format of trtpipe is called {algo}"
        draft.lost.append(
            Lost(where=where, old=str(algo), reason=reason, instead=f"{plain} is written; pick a format.")
        )
        form = plain
    draft.put("quantization.format", "", form, where)
    group = engine.quantization.get("group_size")
    if form in ("int4_awq", "w4a8_awq") and group in _GROUP_SIZES:
        draft.put("quantization.group_size", "", group, "engine quantization.group_size")
    cache = engine.quantization.get("kv_cache_quant_algo")
    if cache is not None:
        word = table().kv_cache_quant_algo.get(str(cache))
        where = "engine quantization.kv_cache_quant_algo"
        if word is None:
            draft.lost.append(Lost(where=where, old=str(cache), reason="no KV format of trtpipe", instead="16 bit."))
        else:
            draft.put("quantization.kv_cache", "", word, where)


def _take_parameters(draft: Draft, old: OldRepository, model: OldModel) -> None:
    role = "tensorrt_llm" if model is old.core else model.name
    carries = {row.key: row for row in table().carry if row.model == role}
    drops = {row.key: row for row in table().drop if row.model == role}
    for key, text in sorted(model.parameters.items()):
        where = f"{model.name} {key}"
        if key in carries:
            _carry(draft, carries[key], where, text)
        elif key in drops:
            if text.lower() not in {value.lower() for value in drops[key].harmless}:
                row = drops[key]
                draft.lost.append(Lost(where=where, old=text, reason=row.reason, instead=row.instead))
        elif key == "gpu_device_ids":
            _take_devices(draft, where, text)
        elif key not in table().replaced and not _repeats(old, model, key):
            reason = "not a parameter that is known here"
            draft.lost.append(Lost(where=where, old=text, reason=reason, instead="Look what read it."))


def _repeats(old: OldRepository, model: OldModel, key: str) -> bool:
    """Whether a helper model repeats a parameter that is judged at the core model."""
    return model is not old.core and key in old.core.config.parameters


def _carry(draft: Draft, row: Carry, where: str, text: str) -> None:
    try:
        value = value_of(row, text)
    except ValueError as error:
        goes_on = f"the backend goes on with {row.default or 'its default'}, and so does this"
        draft.warn(where, f"'{text}' cannot be read as {row.type} ({error}); {goes_on}")
        return
    draft.carry(where, text, row.config, row.yaml, value)


def _take_defaults(draft: Draft, old: OldRepository) -> None:
    """Write what the C++ backend did for parameters that are not set."""
    for row in table().carry:
        if row.default is None or any(each.where.endswith(f" {row.key}") for each in draft.carried):
            continue
        value = value_of(row, row.default)
        draft.put(row.config, row.yaml, value, f"{old.core.name} {row.key} is not set; this is the backend's default")


def _take_devices(draft: Draft, where: str, text: str) -> None:
    if _DEVICES.fullmatch(text):
        draft.device_ids = text
        draft.carried.append(Carried(where=where, old=text, config="", yaml="parameter gpu_device_ids", value=text))
    else:
        draft.warn(where, f"'{text}' is no list of GPUs; it is left out", "Write 0,1 or 0,1;2,3.")


def _take_fields(draft: Draft, old: OldRepository) -> None:
    """Settings that are fields of config.pbtxt and not parameters."""
    core = old.core.config
    draft.decoupled = core.model_transaction_policy.decoupled
    draft.carry(f"{old.core.name} decoupled", draft.decoupled, "", "triton_config.decoupled", draft.decoupled)
    draft.put("", "triton_config.max_batch_size", 0, "")
    policy = core.dynamic_batching.default_queue_policy
    if policy.max_queue_size:
        where = f"{old.core.name} max_queue_size"
        draft.carry(where, policy.max_queue_size, "serving.max_queue_size", "", policy.max_queue_size)
    count = max([1, *(group.count for group in core.instance_group)])
    if count > 1:
        draft.instances = count
        where = f"{old.core.name} instance_group.count"
        draft.carried.append(Carried(where=where, old=str(count), config="", yaml="instance_group.count", value=count))
    delay = core.dynamic_batching.max_queue_delay_microseconds
    waits = [(f"{old.core.name} max_queue_delay_microseconds", delay, "the LLM API batches in flight, Triton does not")]
    helpers = {name: _instances(model) for name, model in old.models.items() if model is not old.core}
    reason = "one model takes text and gives text; there are no helper models"
    waits += [(f"{name} instance_group.count", count, reason) for name, count in helpers.items() if count > 1]
    for where, value, why in waits:
        if value:
            draft.lost.append(Lost(where=where, old=str(value), reason=why, instead="Nothing."))


def _instances(model: OldModel) -> int:
    return sum(group.count for group in model.config.instance_group)


def _take_tensors(draft: Draft, old: OldRepository) -> None:
    """Inputs that clients of the old repository could send to the models that take text."""
    entries = [old.models[name] for name in ("ensemble", "tensorrt_llm_bls") if name in old.models]
    sent = dict.fromkeys(tensor.name for model in entries or [old.core] for tensor in model.config.input)
    known = {name: row for row in table().tensor for name in row.old}
    for name in sent:
        row = known.get(name)
        reason = row.reason if row is not None else "not an input that is known here"
        draft.tensors.append(TensorChange(old=name, new=row.new if row is not None else "", reason=reason))


def _settle_lengths(draft: Draft) -> None:
    """Make lengths fit that the old side accepted or refused at run time."""
    config = draft.config
    batch, tokens = (
        config.get(path, KEYS[path].default) for path in ("engine.max_batch_size", "engine.max_num_tokens")
    )
    if tokens < batch:
        draft.warn("engine.max_num_tokens", f"{tokens} cannot hold one token of {batch} sequences; raised to {batch}")
        draft.put("engine.max_num_tokens", "max_num_tokens", batch, "raised to max_batch_size")
        tokens = batch
    longest = config.get("engine.max_seq_len")
    if longest is None:
        return
    if tokens < longest and not config["engine.enable_chunked_context"]:
        message = f"the old engine refused prompts above {tokens} tokens (max_num_tokens); the new one splits them"
        draft.warn("engine.enable_chunked_context", message, "Limit prompts in front of the server if that was meant.")
        draft.put("engine.enable_chunked_context", "enable_chunked_prefill", True, "prompts above max_num_tokens")
    if KEYS["serving.default_max_tokens"].default >= longest:
        draft.put("serving.default_max_tokens", "", max(1, longest // 4), "the default does not fit into max_seq_len")


def _settle_formats(draft: Draft) -> None:
    """Fall back to 16 bit where the LLM API's lane has no such format on this GPU."""
    fallbacks = {
        "quantization.format": SIXTEEN_BIT[draft.config["engine.dtype"]],
        "quantization.kv_cache": "auto",
        "quantization.group_size": 128,
    }
    for key, fallback in fallbacks.items():
        refused = [problem for problem in _judge(draft) if problem.where == key and problem.severity == "error"]
        if refused and draft.config.get(key) not in (None, fallback):
            old = str(draft.config[key])
            instead = f"{fallback} is written. {refused[0].hint}"
            draft.lost.append(Lost(where=key, old=old, reason=refused[0].message.rstrip("."), instead=instead))
            draft.put(key, "", fallback, f"{old} does not exist in this lane")
    draft.problems += _judge(draft)
    if draft.config["quantization.format"] not in SIXTEEN_BIT.values():
        message = (
            f"the engine's {draft.config['quantization.format']} weights cannot be taken out of it; model.yaml names "
            "the 16-bit source"
        )
        draft.warn("model.yaml model", message, "`trtpipe build` of the config makes the quantized checkpoint.")


def _name_what_a_build_forgets(draft: Draft) -> None:
    alone = [each.yaml for each in draft.carried if not each.config and each.yaml != "triton_config.decoupled"]
    if alone:
        message = f"only here, since the build config has no key for it: {', '.join(alone)}"
        draft.warn("model.yaml", message, "Write it into model.yaml again after `trtpipe build`.")


def _judge(draft: Draft) -> list[Problem]:
    try:
        return legality.check(BuildConfig.model_validate(nested(draft.config)), None)
    except ValidationError:
        return []  # said in full when the written file is loaded


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Key paths to nested mappings."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        place = tree
        *sections, name = path.split(".")
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return tree


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
