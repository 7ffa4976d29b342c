"""The typed things that stages exchange: each is one immutable directory with a digest.

The layout on disk is the contract between rooms; a room that reads an artifact relies on what its
class says here and on nothing else. Besides what is listed, every artifact directory that the store
committed holds `manifest.json` (path -> size, sha256) and `provenance.json`; neither is part of the
digest.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """A directory of files and the digest of its content.

    `digest` is "sha256:<64 hex>" over the sorted relative POSIX paths, sizes and contents: never
    over times, owners or absolute paths.
    """

    kind: ClassVar[str] = "artifact"
    path: Path
    digest: str


@dataclass(frozen=True, kw_only=True)
class SourceCheckpoint(Artifact):
    """A Hugging Face checkpoint: what the user has.

    config.json, generation_config.json, tokenizer.json, tokenizer_config.json (chat template inside
    it or in chat_template.jinja), model.safetensors or shards with model.safetensors.index.json.
    One that a stage made also has sparsity.json (method, pattern, layers), where zeros were put into it, and
    training.json (settings, text, loss of every step), where it was trained; its trained weights are float32.
    """

    kind = "source"


@dataclass(frozen=True, kw_only=True)
class Sensitivities(Artifact):
    """sensitivity.json: what each candidate format costs each group of layers, whatever the budget."""

    kind = "sensitivities"


@dataclass(frozen=True, kw_only=True)
class FormatChoice(Artifact):
    """choice.json: the format of each layer under a budget, what it spends and loses, and why."""

    kind = "choice"


@dataclass(frozen=True, kw_only=True)
class Calibration(Artifact):
    """What a text and a source checkpoint gave ModelOpt, for any target: no rank, layout or dtype is in it.

    formats.json         quantized layer -> format
    calibration.json     source, digest of exactly the ids that were fed, token statistics
    state.safetensors    float32, by Hugging Face module name:
                           <layer>.input_amax       [in]  largest |x| of each input channel (static activations)
                           <layer>.pre_quant_scale  [in]  p that multiplies x, as ModelOpt found it for this layer
                           <layer>.clip             share of each group's range that is kept (awq clip and full)
                           <attention>.k_amax, .v_amax  [1]  largest |key| and |value|, where the KV cache is quantized
    inputs.safetensors   <layer>.input float32 [n, in]: rows of each quantized layer's input, for the probes
    """

    kind = "calibration"


@dataclass(frozen=True, kw_only=True)
class QuantizedCheckpoint(Artifact):
    """What ModelOpt made of a source checkpoint.

    hf/                  unified Hugging Face checkpoint (weights, config.json, hf_quant_config.json)
                         with the source's tokenizer files and generation_config.json; or
    trtllm/              TensorRT-LLM checkpoint (config.json, rank<r>.safetensors)
    quantization.json    format, group_size, kv_cache, quantized layers, excluded layers, versions
    calibration.json     source, digest of exactly the ids that were fed, token statistics
    probes.safetensors   per quantized layer: recorded input and fake-quantized output
    """

    kind = "quantized"

    @property
    def weight_bytes(self) -> int:
        """Size on disk of the weights alone, without probes and records."""
        return sum(path.stat().st_size for path in self.path.glob("*/*.safetensors"))


@dataclass(frozen=True, kw_only=True)
class VerificationReport(Artifact):
    """report.json: every check with its limit and value, per layer and end to end; scores by block of text."""

    kind = "verification"


@dataclass(frozen=True, kw_only=True)
class QualityVerdict(Artifact):
    """quality.json: what was measured beside its limits, and every step of the fallback that was rejected."""

    kind = "quality"


@dataclass(frozen=True, kw_only=True)
class Engine(Artifact):
    """What a target compiled: engine.json (target, limits, choices with reasons) and the target's files."""

    kind = "engine"


@dataclass(frozen=True, kw_only=True)
class ModelRepository(Artifact):
    """A Triton model repository: one directory per model, each config.pbtxt and 1/."""

    kind = "repository"
