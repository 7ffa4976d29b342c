"""What an engine will say about itself, and what a built one does say: options that the build resets.

`expect` applies the build's own rules to the flags, in the build's order, so that a plan can show the
result without a GPU; `compare` sets a real engine's config.json against it. Rules: NVIDIA/TensorRT-LLM
tensorrt_llm/builder.py@008b2b8, tensorrt_llm/_common.py (check_max_num_tokens); field names: the rendered
source of 1.2.1 (gh-pages@58fb435).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pipeline.targets.tensorrt_llm.choices import FP8_ATTENTION, FUSED_MLP, OFF, ON, REDUCE_FUSION, SM_ADA, Choice
from pipeline.targets.tensorrt_llm.facts import QuantFacts

Value = str | int | bool | None

# Flag -> field of build_config, where they differ; what is missing here has the flag's name.
_FIELDS: Final = {"strip_plan": "use_strip_plan"}
# Flags that config.json does not record as they are written.
_NOT_RECORDED: Final = ("workers", "log_level", "dry_run", "lora_ckpt_source", "max_lora_rank", "logits_dtype")
# IntFlag of speculative_decoding_mode in config.json.
SPECULATIVE: Final = {
    "draft_tokens_external": 2,
    "medusa": 4,
    "lookahead_decoding": 8,
    "explicit_draft_tokens": 16,
    "eagle": 32,
}
_BUILD_FIELDS: Final = frozenset(
    (
        "max_batch_size",
        "max_input_len",
        "max_seq_len",
        "max_beam_width",
        "max_num_tokens",
        "opt_num_tokens",
        "max_prompt_embedding_table_size",
        "max_encoder_input_len",
        "kv_cache_type",
        "gather_context_logits",
        "gather_generation_logits",
        "profiling_verbosity",
        "enable_debug_output",
        "max_draft_len",
        "speculative_decoding_mode",
        "weight_sparsity",
        "weight_streaming",
        "use_strip_plan",
        "monitor_memory",
    )
)


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The parallel mapping: tensor, pipeline and context parallel size."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1

    @property
    def world_size(self) -> int:
        """Ranks, and files rank<r>.engine."""
        return self.tensor * self.pipeline * self.context


@dataclass(frozen=True, kw_only=True)
class Reset:
    """An option that became something else than what was asked.

    option: upstream's name.
    asked, becomes: values as config.json has them.
    why: the build's rule; says so when no rule is known.
    """

    option: str
    asked: Value
    becomes: Value
    why: str


@dataclass(frozen=True, kw_only=True)
class Expected:
    """`build_config` of the engine's config.json as far as flags decide it, and what the build resets."""

    build_config: dict[str, Any]
    resets: tuple[Reset, ...]


@dataclass(kw_only=True)
class _State:
    values: dict[str, Value]
    quant: QuantFacts
    architecture: str
    sm: int
    ranks: Ranks
    resets: dict[str, Reset]

    def on(self, name: str) -> bool:
        return self.values.get(name) is True

    def number(self, name: str) -> int:
        value = self.values.get(name)
        return value if isinstance(value, int) else 0

    def become(self, name: str, value: Value, why: str) -> None:
        before = self.values.get(name)
        if before != value:
            asked = self.resets[name].asked if name in self.resets else before
            self.values[name] = value
            self.resets[name] = Reset(option=name, asked=asked, becomes=value, why=why)


def expect(choices: Iterable[Choice], *, quant: QuantFacts, architecture: str, sm: int, ranks: Ranks) -> Expected:
    """Apply the build's rules to the flags.

    Args:
        choices: the flags, from `choices.choose`.
        quant: quantization of the checkpoint.
        architecture: of the checkpoint's config.json.
        sm: compute capability of the GPU, 90 for Hopper.
        ranks: parallel mapping.
    """
    values = _recorded(choices, quant.dtype)
    state = _State(values=values, quant=quant, architecture=architecture, sm=sm, ranks=ranks, resets={})
    for rule in _RULES:
        rule(state)
    resets = tuple(reset for reset in state.resets.values() if reset.asked != reset.becomes)
    return Expected(build_config=nested(state.values), resets=resets)


def nested(values: Mapping[str, Value]) -> dict[str, Any]:
    """Put flat values where config.json has them: build_config fields, and the rest in plugin_config."""
    fields: dict[str, Any] = {name: value for name, value in values.items() if name in _BUILD_FIELDS}
    return fields | {"plugin_config": {name: value for name, value in values.items() if name not in _BUILD_FIELDS}}


def compare(choices: Iterable[Choice], expected: Expected, config: Mapping[str, Any], dtype: str) -> tuple[Reset, ...]:
    """Return every option of a built engine that is not what was asked.

    Args:
        choices: the flags that were given.
        expected: what the rules say, for the reasons.
        config: the engine's config.json.
        dtype: 16-bit type that "auto" stands for.
    """
    build = config.get("build_config", {})
    found = {**build.get("plugin_config", {}), **{name: build[name] for name in _BUILD_FIELDS if name in build}}
    reasons = {reset.option: reset for reset in expected.resets}
    resets = []
    for name, asked in _recorded(choices, dtype).items():
        becomes = _plain(found.get(name), dtype)
        if name not in found or becomes == asked:
            continue
        known = reasons.get(name)
        why = "no rule of the build that is known here does this."
        if known is not None and known.becomes == becomes:
            why = known.why
        resets.append(Reset(option=name, asked=asked, becomes=becomes, why=why))
    return tuple(resets)


def _recorded(choices: Iterable[Choice], dtype: str) -> dict[str, Value]:
    """Return the flags as config.json records them: enable is true, disable of a plugin is null."""
    values: dict[str, Value] = {}
    for choice in choices:
        name = _FIELDS.get(choice.what, choice.what)
        if name in _NOT_RECORDED:
            continue
        if name == "kv_cache_type":
            values[name] = str(choice.value).upper()
        elif name == "speculative_decoding_mode":
            values[name] = SPECULATIVE[str(choice.value)]
        elif name == "fast_build":
            values["manage_weights"] = True
        elif name == "gather_all_token_logits":
            values |= {"gather_context_logits": True, "gather_generation_logits": True}
        else:
            plugin = name.endswith("_plugin") and name != "dora_plugin"  # DoRA's is a plain switch
            values[name] = True if choice.value is None else _plain(choice.value, dtype, plugin=plugin)
    return values


def _plain(value: Any, dtype: str, *, plugin: bool = False) -> Value:  # noqa: ANN401 - a value of JSON
    if value == ON:
        return True
    if value == OFF:
        return None if plugin else False
    if value == "auto":
        return dtype
    return value if isinstance(value, str | int | bool) else None


def _tokens(state: _State) -> None:
    longest, batch = state.number("max_seq_len"), state.number("max_batch_size")
    tokens = state.number("max_num_tokens")
    if not state.on("remove_input_padding"):
        state.become("max_num_tokens", batch * longest, "without packed input it is max_batch_size x max_seq_len.")
        return
    if tokens > batch * longest:
        state.become("max_num_tokens", batch * longest, "more than max_batch_size x max_seq_len cannot be in flight.")
    tokens = state.number("max_num_tokens")
    if not state.on("context_fmha") and tokens < state.number("max_input_len"):
        state.become(
            "max_num_tokens", state.number("max_input_len"), "without context_fmha a prompt runs in one piece."
        )
    elif state.on("context_fmha") and tokens < state.number("tokens_per_block"):
        state.become("max_num_tokens", state.number("tokens_per_block"), "an iteration takes at least one KV block.")
    if "opt_num_tokens" in state.values and state.number("opt_num_tokens") > state.number("max_num_tokens"):
        state.become("opt_num_tokens", state.number("max_num_tokens"), "it is at most max_num_tokens.")


def _fusions(state: _State) -> None:
    if state.on("reduce_fusion") and state.ranks.tensor == 1:
        state.become("reduce_fusion", False, "tensor_parallel_size is 1.")
    if state.on("reduce_fusion") and state.architecture not in REDUCE_FUSION:
        state.become("reduce_fusion", False, f"{state.architecture} is not one of {', '.join(REDUCE_FUSION)}.")
    fp8_llama = state.architecture == "LlamaForCausalLM" and state.quant.quant_algo == "FP8"
    if state.on("user_buffer") and not (state.on("reduce_fusion") and fp8_llama):
        state.become("user_buffer", False, "it needs reduce_fusion and an FP8 Llama.")
    nvfp4_llama = state.architecture == "LlamaForCausalLM" and state.quant.quant_algo == "NVFP4"
    if state.on("norm_quant_fusion") and not (nvfp4_llama and not state.on("reduce_fusion")):
        state.become("norm_quant_fusion", False, "it needs an NVFP4 Llama without reduce_fusion.")
    if state.on("use_fused_mlp") and state.quant.quant_algo not in FUSED_MLP:
        state.become("use_fused_mlp", False, f"quant_algo is {state.quant.quant_algo}.")


def _speculation(state: _State) -> None:
    draft = state.number("max_draft_len")
    mode = state.values.get("speculative_decoding_mode")
    if mode is None or draft == 0:
        return
    state.become("max_seq_len", state.number("max_seq_len") + draft, "max_draft_len is added for speculative decoding.")
    if mode == SPECULATIVE["eagle"]:
        state.become("use_paged_context_fmha", True, "Eagle needs it.")
    least = state.number("max_batch_size") * (draft + 1)
    if state.number("max_num_tokens") < least:
        state.become("max_num_tokens", least, "every sequence brings its draft: max_batch_size x (max_draft_len + 1).")


def _attention(state: _State) -> None:
    fp8_kv = state.quant.kv_cache_quant_algo == "FP8"
    if not state.on("context_fmha"):
        _off(state, "context_fmha is off.", "use_fp8_context_fmha", "use_paged_context_fmha")
    for applies, why in (
        (state.quant.quant_algo not in FP8_ATTENTION, f"quant_algo {state.quant.quant_algo} has no FP8 attention."),
        (state.sm < SM_ADA, f"FP8 attention needs SM 89 or newer (SM {state.sm})."),
    ):
        if applies:
            _off(state, why, "use_fp8_context_fmha")
            if fp8_kv:
                _off(state, f"with an FP8 KV cache: {why}", "use_paged_context_fmha")
    if state.on("use_paged_context_fmha") and state.on("use_fp8_context_fmha") and not fp8_kv:
        _off(state, "paged FP8 attention needs an FP8 KV cache.", "use_fp8_context_fmha")
    if state.on("use_paged_context_fmha") and fp8_kv:
        state.become("use_fp8_context_fmha", True, "paged attention over an FP8 KV cache runs in FP8.")
    if state.quant.kv_cache_quant_algo == "INT8":
        _off(state, "the KV cache is INT8.", "use_paged_context_fmha")


def _off(state: _State, why: str, *names: str) -> None:
    for name in names:
        if state.on(name):
            state.become(name, False, why)


def _communication(state: _State) -> None:
    if "nccl_plugin" in state.values:
        plugin = state.quant.dtype if state.ranks.world_size > 1 else None
        state.become("nccl_plugin", plugin, "the number of ranks decides.")


_RULES: Final[tuple[Callable[[_State], None], ...]] = (_tokens, _fusions, _speculation, _attention, _communication)
