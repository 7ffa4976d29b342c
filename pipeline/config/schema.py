"""The build configuration: frozen models, unknown keys forbidden, names the field already uses.

The sections `engine` and `serving` are in config/deployment.py. Config is pure data. It is validated once, in
config/load.py, and nothing in it reads the environment. Laws between fields are in config/rules.py; whether a legal
config is also *possible* (format x target x GPU x shape) is judged by config/legality.py, because that needs facts
about the checkpoint. A field's `title` is the noun of its error messages ("'fp88' is not a format").
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from pipeline.config.deployment import EngineConfig, ServingConfig
from pipeline.config.section import Section

LayerFormat = Literal["bf16", "fp16", "fp8", "fp8_rowwise", "int8_sq", "int4_awq", "w4a8_awq", "int8_wo", "int4_wo"]
# What a config may ask for: auto is the format of no layer, but a choice among others for each.
Format = Literal[LayerFormat, "auto"]
ScoreMethod = Literal["gradient", "kl_div"]
KVCacheFormat = Literal["auto", "fp8", "int8"]


class SourceConfig(Section):
    """Where the Hugging Face checkpoint comes from. Exactly one of `path`, `hub`, `gguf`, `package`."""

    path: Path | None = Field(default=None, description="Directory with config.json, tokenizer and safetensors.")
    hub: str | None = Field(default=None, description="Hub id 'owner/name'; the local cache is honoured.")
    revision: str | None = Field(
        default=None, description="Commit of the hub id (40 hex digits) so that a rebuild means the same weights."
    )
    gguf: Path | None = Field(default=None, description="A GGUF file; weights are dequantized exactly.")
    package: str | None = Field(
        default=None, description="Installed Python distribution that ships the checkpoint (with `file`)."
    )
    file: str | None = Field(default=None, description="Path of the file or directory inside `package`.")
    trust_remote_code: bool = Field(
        default=False, description="Allow the checkpoint's own Python code to run. Off unless you say so."
    )


class LayerOverride(Section):
    """Layers that take another format than the rest."""

    layers: str = Field(description="Glob of module names, for example '*.mlp.down_proj'.")
    format: LayerFormat = Field(
        title="format",
        description="Format of these layers; bf16 or fp16, whichever is engine.dtype, keeps them at 16 bit.",
    )

    def __str__(self) -> str:
        """As a person says it."""
        return f"{self.format} in {self.layers}"


class AutoConfig(Section):
    """Automatic mixed precision: each layer gets the candidate, or 16 bit, that the budget serves best."""

    effective_bits: float | None = Field(
        default=None,
        gt=0,
        le=16,
        description="Bits per weight that may be spent on average, over all linear layers that 'exclude' and "
        "'overrides' do not keep at 16 bit; scales do not count. Required by format auto.",
    )
    candidates: tuple[LayerFormat, ...] = Field(
        default=(),
        title="format",
        description="Formats that a layer may get, for example [int4_awq, int8_wo]; 16 bit always is one.",
    )
    method: ScoreMethod = Field(
        default="gradient",
        title="method",
        description="How the loss is estimated: gradient (one backward pass over the text) or kl_div (measured; one "
        "pass over the text for each group of layers and candidate: hundreds of times as long).",
    )
    num_score_samples: int | None = Field(
        default=None,
        ge=1,
        description="Sequences of the calibration text that calibrate and score the candidates; empty is 16, and 2 for "
        "kl_div.",
    )


class QuantizationConfig(Section):
    """What ModelOpt does to the weights, activations and KV cache."""

    format: Format = Field(
        default="bf16",
        title="format",
        description="bf16/fp16 (no quantization), fp8 (E4M3, W8A8 per tensor), "
        "fp8_rowwise (E4M3, a scale per output and per token), int8_sq (W8A8 SmoothQuant), "
        "int4_awq (W4A16, group-wise), w4a8_awq (INT4 weights, FP8 activations), int8_wo (per output) and int4_wo "
        "(group-wise) round weights and calibrate nothing; auto chooses for each layer, see quantization.auto.",
    )
    group_size: Literal[32, 64, 128] = Field(
        default=128,
        title="group size",
        description="Weights that share one scale along the input axis (int4_awq, w4a8_awq, and int4_wo on the CPU).",
    )
    awq: Literal["lite", "clip", "full"] = Field(
        default="lite",
        title="AWQ method",
        description="How int4_awq looks for its scales: lite scales inputs by their activations, clip cuts the largest "
        "weights of a group, full does both (minutes more for a model of 135M parameters).",
    )
    kv_cache: KVCacheFormat = Field(
        default="auto", title="KV cache format", description="KV cache format; auto is the 16-bit model dtype."
    )
    smoothquant_alpha: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Share of the quantization difficulty moved from activations to weights (int8_sq).",
    )
    exclude: tuple[str, ...] = Field(
        default=("lm_head",), description="Globs of module names that stay at 16 bit, for example '*.mlp.down_proj'."
    )
    overrides: tuple[LayerOverride, ...] = Field(
        default=(),
        description="Layers that take another format, each {layers: glob, format: name}. The last one that matches "
        "decides; an exclude decides before all of them.",
    )
    auto: AutoConfig = Field(default_factory=AutoConfig)


TOKENS_PER_PASS = 2048
"""Enough for a CPU's or GPU's full speed in a matrix product, and few enough for the logits of a large vocabulary."""


class CalibrationSet(Section):
    """One of several texts: a file, or a file of a data set on the hub."""

    path: Path | None = Field(default=None, description="JSONL or plain text file.")
    hub: str | None = Field(default=None, description="Hub id 'owner/name' of a data set (with file and revision).")
    revision: str | None = Field(default=None, description="Commit of the hub id (40 hex digits).")
    file: str | None = Field(default=None, description="Path of the JSONL or text file inside the data set.")
    weight: float = Field(default=1.0, gt=0, description="Share of the sequences, relative to the other sets'.")


class CalibrationConfig(Section):
    """The text that the observers see."""

    dataset: Path | None = Field(
        default=None, description="JSONL (text, prompt or messages) or plain text; empty uses the shipped sample."
    )
    datasets: tuple[CalibrationSet, ...] = Field(
        default=(),
        description="Several texts instead of `dataset`, each {path: file, weight: 1} or {hub: owner/name, "
        "revision: commit, file: path in it, weight: 1}; they share the sequences by weight.",
    )
    num_samples: int = Field(default=64, ge=1, description="Sequences fed.")
    max_seq_len: int = Field(default=512, ge=8, description="Tokens per sequence; longer text is cut.")
    batch_size: int | None = Field(
        default=None,
        ge=1,
        description="Sequences per forward pass; empty takes as many as have 2048 tokens, on any machine. A pass that "
        "does not fit into memory is halved.",
    )
    seed: int = Field(default=0, ge=0, lt=2**32, description="Seed of the sampling.")

    @property
    def sequences_per_pass(self) -> int:
        """`batch_size`, or what it is where it is empty: of the config alone, so that every machine feeds the same."""
        return self.batch_size or max(1, TOKENS_PER_PASS // self.max_seq_len)


class SparsityConfig(Section):
    """Two zeros in every four weights along the input axis, before anything is quantized."""

    method: Literal["none", "magnitude", "sparsegpt"] = Field(
        default="none",
        title="sparsity method",
        description="How the zeros are chosen: magnitude takes the smallest weights; sparsegpt weighs them by the "
        "inputs that the calibration text gives.",
    )
    pattern: Literal["2:4"] = Field(
        default="2:4", title="sparsity pattern", description="Zeros per neighbouring weights; GPUs execute 2:4 alone."
    )
    exclude: tuple[str, ...] = Field(
        default=("lm_head",), description="Globs of module names that stay dense, for example '*.mlp.down_proj'."
    )


class FinetuneConfig(Section):
    """Training through the rounding, for when calibration alone is not good enough."""

    method: Literal["none", "qat", "qad"] = Field(
        default="none",
        title="training method",
        description="qad: the 16-bit model teaches, the loss is the KL divergence of the logits; qat: the loss is that "
        "of the next token of the text.",
    )
    dataset: Path | None = Field(
        default=None,
        description="Text like calibration.dataset; empty uses the shipped sample. Repeated as often as steps need.",
    )
    steps: int = Field(default=100, ge=1, description="Optimizer steps.")
    batch_size: int = Field(default=2, ge=1, description="Sequences per forward pass.")
    gradient_accumulation: int = Field(default=1, ge=1, description="Forward passes per step.")
    max_seq_len: int = Field(default=256, ge=8, description="Tokens per sequence.")
    learning_rate: float = Field(
        default=5e-5, gt=0, lt=1, description="Peak of the learning rate, which falls to 0 along a cosine."
    )
    warmup_steps: int = Field(default=5, ge=0, description="Steps in which the learning rate rises to its peak.")
    seed: int = Field(default=0, ge=0, lt=2**32, description="Seed of the order of the text and of lora_rank.")
    lora_rank: int | None = Field(
        default=None,
        ge=1,
        description="Train an addition of this rank to each quantized layer in place of its weight: a fraction of the "
        "memory, merged afterwards; it wants a learning rate about ten times as high.",
    )
    save_every: int | None = Field(
        default=50, ge=1, description="Steps between the states that an interrupted training goes on from."
    )


class VerifyConfig(Section):
    """Limits of the proof. An empty limit takes the format's own."""

    dataset: Path | None = Field(
        default=None, description="Held text for the end-to-end check; empty uses the shipped one."
    )
    num_tokens: int = Field(default=2048, ge=64, description="Tokens of held text scored end to end.")
    reference: Path | None = Field(
        default=None,
        description="16-bit checkpoint to score against when the source is quantized already; empty leaves that out.",
    )
    max_layer_error: float | None = Field(default=None, gt=0, description="Relative L2 error allowed per layer.")
    max_kl: float | None = Field(default=None, gt=0, description="Mean KL divergence of the logits allowed, in nats.")
    min_top1_agreement: float | None = Field(
        default=None, ge=0, le=1, description="Share of equal top-1 tokens required."
    )
    max_perplexity_increase: float | None = Field(
        default=None, gt=0, description="Relative increase of perplexity allowed, for example 0.1 for 10 %."
    )


class QualityConfig(Section):
    """The quality gate before compiling; without a limit there is none. Each limit must be kept for certain."""

    max_perplexity_increase: float | None = Field(
        default=None, gt=0, description="Relative increase of perplexity allowed, for example 0.02 for 2 %."
    )
    max_kl: float | None = Field(default=None, gt=0, description="Mean KL divergence of the logits allowed, in nats.")
    min_top1_agreement: float | None = Field(
        default=None, ge=0, le=1, description="Share of equal top-1 tokens required."
    )
    tasks: tuple[Path, ...] = Field(
        default=(),
        description="JSONL files of your questions: prompt (or messages), answer, match (contains, exact or starts).",
    )
    min_task_score: float | None = Field(
        default=None, ge=0, le=1, description="Share of each task's questions that must be answered correctly."
    )
    max_task_drop: float | None = Field(
        default=None, ge=0, le=1, description="Loss against the source's share of correct answers allowed, per task."
    )
    confidence: float = Field(default=0.95, ge=0.5, lt=1, description="Confidence of each interval.")
    num_tokens: int = Field(default=4096, ge=64, description="Tokens of verify.dataset scored for the gate.")
    inconclusive: Literal["reject", "accept"] = Field(
        default="reject", title="word for this", description="What happens when the interval contains the limit."
    )

    @property
    def limited(self) -> bool:
        """Whether any limit is set."""
        limits = (
            self.max_perplexity_increase,
            self.max_kl,
            self.min_top1_agreement,
            self.min_task_score,
            self.max_task_drop,
        )
        return any(limit is not None for limit in limits)


class BuildConfig(Section):
    """One build: a source checkpoint, a format, an engine, a repository."""

    name: str = Field(
        pattern=r"^[a-z0-9][a-z0-9._-]*$",
        title="valid name",
        description="Name of the build and of its repository: lower-case letters, digits, '.', '_' and '-'.",
    )
    source: SourceConfig
    quantization: QuantizationConfig = Field(default_factory=QuantizationConfig)
    calibration: CalibrationConfig = Field(default_factory=CalibrationConfig)
    sparsity: SparsityConfig = Field(default_factory=SparsityConfig)
    finetune: FinetuneConfig = Field(default_factory=FinetuneConfig)
    verify: VerifyConfig = Field(default_factory=VerifyConfig)
    quality: QualityConfig = Field(default_factory=QualityConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    serving: ServingConfig = Field(default_factory=ServingConfig)
