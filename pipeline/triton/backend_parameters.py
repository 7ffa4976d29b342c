"""What config.pbtxt tells TensorRT-LLM's Triton backend: the config's wishes, and what the engine decides for the rest.

A parameter that nobody set is left out, and the backend takes its own default; three have to exist all the same.
Meaning and defaults: NVIDIA/TensorRT-LLM triton_backend/inflight_batcher_llm/src/model_instance_state.cc@0c8de69
(every other parameter is read in a try block, so a missing one is its default).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pipeline.config.deployment import ServingConfig
from pipeline.errors import Problem

CORE_MODEL: Final = "tensorrt_llm"
# Read without a guard: the model does not load without the key (getGuidedDecodingConfigFromParams there).
MUST_EXIST: Final = ("guided_decoding_backend", "tokenizer_dir", "xgrammar_tokenizer_info_path")
# Options of BackendParameters that are fields of the model configuration, not parameters.
FIELDS: Final = (
    "triton_max_batch_size",
    "decoupled_mode",
    "max_queue_delay_microseconds",
    "encoder_input_features_data_type",
    "prompt_embedding_table_data_type",
    "logits_datatype",
)
# Options whose parameter has another name.
RENAMED: Final = {"batching_strategy": "gpt_model_type", "encoder_engine_dir": "encoder_model_path"}
LOGITS_TYPES: Final = {"float32": "TYPE_FP32", "float16": "TYPE_FP16"}
# speculative_decoding_mode of the engine (IntFlag) -> decoding_mode; an external draft needs none.
DECODING_MODES: Final = {4: "medusa", 8: "lookahead", 16: "redrafter", 32: "eagle"}
_LOOKAHEAD: Final = ("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size")
_LORA: Final = (
    "lora_cache_optimal_adapter_size",
    "lora_cache_max_adapter_size",
    "lora_cache_gpu_memory_fraction",
    "lora_cache_host_memory_bytes",
    "lora_prefetch_dir",
)
# The backend's own highest adapter rank.
_LORA_RANK: Final = 64
_GIB: Final = 2**30
_KV_BYTES: Final = {"FP8": 1, "INT8": 1}
_16_BIT: Final = 2

Value = str | int | float | bool


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One parameter: upstream's key, the value, and why when it was not written in the config."""

    key: str
    value: Value
    why: str = ""

    @property
    def text(self) -> str:
        """The value as the backend parses it."""
        return str(self.value).lower() if isinstance(self.value, bool) else str(self.value)


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """What an engine is, as far as the server goes by it.

    engine: engine.json of a `tensorrt_llm` engine.
    pretrained: pretrained_config of the engine's config.json, or the checkpoint's config.json when it is not built.
    """

    engine: Mapping[str, Any]
    pretrained: Mapping[str, Any]

    @property
    def plugins(self) -> Mapping[str, Any]:
        """plugin_config of the build."""
        plugins: Mapping[str, Any] = self.engine["build_config"].get("plugin_config", {})
        return plugins

    @property
    def paged_context_fmha(self) -> bool:
        """Whether block reuse and chunked context are possible."""
        return bool(self.plugins.get("use_paged_context_fmha"))

    @property
    def logits_type(self) -> str:
        """Triton type of the engine's logits."""
        return LOGITS_TYPES[str(self.engine["logits_dtype"])]

    @property
    def speculative_mode(self) -> int:
        """IntFlag of speculative_decoding_mode; 1 is none."""
        return int(self.engine["build_config"].get("speculative_decoding_mode") or 1)

    @property
    def has_lora(self) -> bool:
        """Whether adapters can be used."""
        return bool(self.plugins.get("lora_plugin"))

    @property
    def max_lora_rank(self) -> int:
        """Highest adapter rank of the build."""
        ranks = [choice["value"] for choice in self.engine["choices"] if choice["what"] == "max_lora_rank"]
        return int(ranks[0]) if ranks else _LORA_RANK

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token in the KV cache of one rank: key and value, of every layer and KV head there."""
        model = self.pretrained
        heads = model.get("num_key_value_heads") or model["num_attention_heads"]
        head_size = model.get("head_size") or model["hidden_size"] // model["num_attention_heads"]
        layers = -(-model["num_hidden_layers"] // self.engine["pp"])
        size = _KV_BYTES.get(str(self.engine["quantization"].get("kv_cache_quant_algo")), _16_BIT)
        return int(2 * layers * max(1, heads // self.engine["tp"]) * head_size * size)


def decide(facts: EngineFacts, serving: ServingConfig, *, version_directory: str) -> tuple[Decision, ...]:
    """Return every parameter that is written, sorted by key.

    Args:
        facts: the engine.
        serving: the config; `serving.tensorrt_llm` goes before everything that is derived.
        version_directory: the model's version directory as the server sees it.
    """
    decisions = {
        decision.key: decision for decision in _derived(facts, serving, version_directory) if decision.value is not None
    }
    for option, value in serving.tensorrt_llm.model_dump(exclude_none=True).items():
        if option not in FIELDS:
            key = RENAMED.get(option, option)
            decisions[key] = Decision(key=key, value=value)
    for key in MUST_EXIST:
        decisions.setdefault(key, Decision(key=key, value="", why="empty: not used, and the backend reads the key."))
    decisions["gpt_model_path"] = Decision(
        key="gpt_model_path", value=f"{version_directory}/engine", why="an absolute path inside the container."
    )
    return tuple(decisions[key] for key in sorted(decisions))


def _derived(facts: EngineFacts, serving: ServingConfig, version_directory: str) -> Iterator[Decision]:
    engine = facts.engine
    yield Decision(
        key="max_beam_width", value=engine["limits"]["max_beam_width"], why="the engine's: engine.max_beam_width."
    )
    yield Decision(
        key="exclude_input_in_output",
        value=serving.exclude_input_in_output,
        why="serving.exclude_input_in_output.",
    )
    yield from _derived_cache(facts)
    mode = DECODING_MODES.get(facts.speculative_mode)
    if mode is not None:
        yield Decision(key="decoding_mode", value=mode, why="the engine's speculative_decoding_mode.")
    if serving.launch_mode == "orchestrator_no_spawn":
        ids = ",".join(str(rank) for rank in range(1, engine["world_size"] + 1))
        yield Decision(key="participant_ids", value=ids, why="without spawning it is mandatory; rank 0 orchestrates.")
    if facts.has_lora and facts.max_lora_rank > _LORA_RANK:
        why = f"the engine takes adapters of rank {facts.max_lora_rank}; the backend's default is {_LORA_RANK}."
        yield Decision(key="lora_cache_max_adapter_size", value=facts.max_lora_rank, why=why)
    if serving.tensorrt_llm.guided_decoding_backend is not None:
        yield Decision(
            key="xgrammar_tokenizer_info_path",
            value=f"{version_directory}/xgrammar_tokenizer_info.json",
            why="written here from the tokenizer.",
        )


def _derived_cache(facts: EngineFacts) -> Iterator[Decision]:
    cache = facts.engine["kv_cache"]
    renamed = {
        "free_gpu_memory_fraction": "kv_cache_free_gpu_mem_fraction",
        "host_memory_bytes": "kv_cache_host_memory_bytes",
    }
    for name, key in renamed.items():
        if cache[name] is not None:
            yield Decision(key=key, value=cache[name], why=f"engine.kv_cache.{name}.")
    if cache["size_gib"] is not None:
        tokens = int(cache["size_gib"] * _GIB) // facts.kv_bytes_per_token
        why = f"engine.kv_cache.size_gib {cache['size_gib']:g} at {facts.kv_bytes_per_token} bytes a token and rank."
        yield Decision(key="max_tokens_in_paged_kv_cache", value=tokens, why=why)
    wishes = {
        "enable_kv_cache_reuse": (cache["enable_block_reuse"], "engine.kv_cache.enable_block_reuse"),
        "enable_chunked_context": (facts.engine["enable_chunked_context"], "engine.enable_chunked_context"),
    }
    for key, (wish, source) in wishes.items():
        if wish and not facts.paged_context_fmha:
            yield Decision(key=key, value=False, why=f"{source} asks for it, and {_no_paged_attention(facts)}")
        else:
            yield Decision(key=key, value=wish, why=f"{source}.")


def _no_paged_attention(facts: EngineFacts) -> str:
    choice = next((each for each in facts.engine["choices"] if each["what"] == "use_paged_context_fmha"), None)
    reset = next((each for each in facts.engine.get("resets", ()) if each["option"] == "use_paged_context_fmha"), None)
    why = reset["why"] if reset else choice["why"] if choice else ""
    return f"the engine has no paged context FMHA: {why}".rstrip(": ")


def find_conflicts(facts: EngineFacts, serving: ServingConfig) -> list[Problem]:
    """Return every wish of `serving` that this engine, this repository or the backend cannot honour."""
    return [
        Problem(where=f"serving.{key}", message=message, hint=hint)
        for rule in (_of_shapes, _of_attention, _of_decoding, _of_memory, _of_models)
        for key, message, hint in rule(facts, serving)
    ]


Conflict = tuple[str, str, str]


def _of_shapes(facts: EngineFacts, serving: ServingConfig) -> Iterator[Conflict]:
    wishes, limits = serving.tensorrt_llm, facts.engine["limits"]
    pairs = {"triton_max_batch_size": "max_batch_size", "max_beam_width": "max_beam_width"}
    for option, limit in pairs.items():
        value = getattr(wishes, option)
        if value is not None and value > limits[limit]:
            message = f"{value} is more than the engine's {limit} {limits[limit]}."
            yield f"tensorrt_llm.{option}", message, f"Write {limits[limit]} or less, or raise engine.{limit}."
    if wishes.logits_datatype not in (None, facts.logits_type):
        message = f"{wishes.logits_datatype}, and the engine's logits are {facts.logits_type}."
        yield "tensorrt_llm.logits_datatype", message, "Leave it empty, or change engine.build.logits_dtype."


def _of_attention(facts: EngineFacts, serving: ServingConfig) -> Iterator[Conflict]:
    for option in ("enable_kv_cache_reuse", "enable_chunked_context"):
        if getattr(serving.tensorrt_llm, option) and not facts.paged_context_fmha:
            # tensorrtllm_backend#271, #251, #323: the model does not load.
            message = f"true, and {_no_paged_attention(facts)}"
            yield f"tensorrt_llm.{option}", message, "Leave it empty, or change what turns paged attention off."


def _of_decoding(facts: EngineFacts, serving: ServingConfig) -> Iterator[Conflict]:
    wishes = serving.tensorrt_llm
    built = DECODING_MODES.get(facts.speculative_mode)
    mode = wishes.decoding_mode or built
    if wishes.decoding_mode in DECODING_MODES.values() and wishes.decoding_mode != built:
        message = f"{wishes.decoding_mode}, and the engine was built for {built or 'none of its kind'}."
        yield "tensorrt_llm.decoding_mode", message, "Set engine.build.speculative_decoding_mode, or leave it empty."
    elif built is not None and wishes.decoding_mode not in (None, built):
        message = f"{wishes.decoding_mode}, and the engine was built for {built}."
        yield "tensorrt_llm.decoding_mode", message, "Leave it empty."
    missing = [option for option in _LOOKAHEAD if getattr(wishes, option) is None]
    if mode == "lookahead" and missing:
        message = "is empty, and lookahead decoding does not load without it."
        for option in missing:
            yield f"tensorrt_llm.{option}", message, "Write a number that the engine's max_draft_len covers."
    if wishes.speculative_decoding_fast_logits and serving.launch_mode != "orchestrator_no_spawn":
        message = f"needs processes that are not spawned, and serving.launch_mode is {serving.launch_mode}."
        hint = "Set serving.launch_mode: orchestrator_no_spawn, or remove it."
        yield "tensorrt_llm.speculative_decoding_fast_logits", message, hint


def _of_memory(facts: EngineFacts, serving: ServingConfig) -> Iterator[Conflict]:
    wishes = serving.tensorrt_llm
    streamed = wishes.gpu_weights_percent is not None and wishes.gpu_weights_percent < 1
    if streamed and not facts.engine["build_config"].get("weight_streaming"):
        message = f"{wishes.gpu_weights_percent:g}, and the engine cannot stream weights."
        yield "tensorrt_llm.gpu_weights_percent", message, "Set engine.build.weight_streaming: true, or leave it empty."
    for option in _LORA:
        if getattr(wishes, option) is not None and not facts.has_lora:
            message = "is about LoRA adapters, and the engine has no lora_plugin."
            yield f"tensorrt_llm.{option}", message, "Set engine.build.lora_plugin: auto, or remove it."
    longest = facts.engine["limits"]["max_seq_len"]
    if wishes.max_tokens_in_paged_kv_cache is not None and wishes.max_tokens_in_paged_kv_cache < longest:
        message = f"{wishes.max_tokens_in_paged_kv_cache} tokens do not hold one sequence of max_seq_len {longest}."
        yield "tensorrt_llm.max_tokens_in_paged_kv_cache", message, f"Write {longest} or more, or lower max_seq_len."
    if (wishes.cross_kv_cache_fraction is None) != (wishes.encoder_engine_dir is None):
        message = "cross_kv_cache_fraction and encoder_engine_dir belong together (encoder-decoder models)."
        yield "tensorrt_llm.cross_kv_cache_fraction", message, "Write both or none."


def _of_models(facts: EngineFacts, serving: ServingConfig) -> Iterator[Conflict]:
    del facts
    if serving.tensorrt_llm.decoupled_mode is False:
        message = "the models of this repository answer through streams; 'stream: false' asks for one response."
        yield "tensorrt_llm.decoupled_mode", message, "Leave it empty."
    named = {
        "bls.tensorrt_llm_draft_model_name": serving.bls.tensorrt_llm_draft_model_name,
        "bls.multimodal_encoders_name": serving.bls.multimodal_encoders_name,
    }
    for key, value in named.items():
        if value is not None:
            message = (
                f"'{value}' cannot be called: tensorrt_llm_bls of this repository asks one engine, with text only."
            )
            yield key, message, "Leave it empty."
    if serving.bls.tensorrt_llm_model_name != CORE_MODEL:
        message = f"'{serving.bls.tensorrt_llm_model_name}' is not the engine's model of this repository."
        yield "bls.tensorrt_llm_model_name", message, f"Write {CORE_MODEL}."
