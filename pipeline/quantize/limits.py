"""How far a quantized checkpoint may be from its source, per format: data, each with its reason.

Measured on SmolLM2-135M-Instruct (source dequantized from Q4_1), the smallest model that is served here,
210 quantized layers, 2044 tokens of the shipped held text, perplexity of the source 17.19:

                              fp8              int8_sq          int8_wo          int4_awq (64)    int4_wo (64)
    weight step error, max    0.500001         0.500013         0.500002         0.500001         0.500000
    weight error, med / max   0.0265 / 0.0267  0.0108 / 0.0523  0.0083 / 0.0116  0.124 / 0.199    0.112 / 0.139
    fake quant error, max     0.0040           0.0008           3e-7             0.0008           3e-7
    layer error, med / max    0.033 / 0.048    0.021 / 0.103    0.0075 / 0.020   0.092 / 0.160    0.099 / 0.264
    KL, nats                  0.037            0.273            0.0032           0.289            0.552
    top-1 agreement           0.894            0.735            0.972            0.726            0.629
    perplexity                +2.7 %           +26 %            +0.5 %           +30 %            +54 %

- Step error: rounding to the nearest code gives 0.5 exactly, the rest is float32 arithmetic. It needs no
  model and no margin.
- Fake quantization: both sides compute the same formula; what is left are activations that lie between two
  codes. A wrong input scale of int8 shows from 0.01 on. Weight-only formats have no activation to round.
- Weight, layer and end to end: about two to three times what was measured. A model of 135M parameters has
  little redundancy and loses most; larger ones lose less. These limits catch a broken checkpoint of any
  size; a release that wants a tighter promise for its model sets `verify.*` in the config.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from pipeline.config.schema import VerifyConfig
from pipeline.quantize.reference import LinearFormat


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Largest (min_: smallest) values allowed.

    Attributes:
        max_step_error: distance of each weight to the source's, in rounding steps of its format.
        max_weight_error: relative L2 error of a weight against the source's.
        max_fake_quant_error: relative L2 error of a layer against what ModelOpt computed for it.
        max_layer_error: relative L2 error of a layer against the source's layer.
        max_clip: how far a weight may lie beyond the largest code, as a multiple of it; 1 where nothing is clipped.
        max_kl: mean KL divergence of the predictions in nats.
        min_top1_agreement: share of equal most likely tokens.
        max_perplexity_increase: relative, 0.1 is 10 %.
    """

    max_step_error: float
    max_weight_error: float
    max_fake_quant_error: float
    max_layer_error: float
    max_kl: float
    min_top1_agreement: float
    max_perplexity_increase: float
    max_clip: float = 1.0


# The smallest share of a group's range that ModelOpt 0.47 tries is 0.5 (awq_clip's min_clip_ratio).
CLIPPED = 2.0

LIMITS: Mapping[LinearFormat, Limits] = {
    "float": Limits(
        max_step_error=0.0, max_weight_error=0.0, max_fake_quant_error=0.0, max_layer_error=0.0, max_kl=1e-9,
        min_top1_agreement=1.0, max_perplexity_increase=1e-9,
    ),
    "fp8": Limits(
        max_step_error=0.51, max_weight_error=0.05, max_fake_quant_error=2e-2, max_layer_error=0.15, max_kl=0.15,
        min_top1_agreement=0.8, max_perplexity_increase=0.1,
    ),
    "fp8_rowwise": Limits(
        max_step_error=0.51, max_weight_error=0.05, max_fake_quant_error=2e-2, max_layer_error=0.15, max_kl=0.15,
        min_top1_agreement=0.8, max_perplexity_increase=0.1,
    ),
    "int8_sq": Limits(
        max_step_error=0.51, max_weight_error=0.15, max_fake_quant_error=5e-3, max_layer_error=0.3, max_kl=0.8,
        min_top1_agreement=0.6, max_perplexity_increase=0.7,
    ),
    "int8_wo": Limits(
        max_step_error=0.51, max_weight_error=0.05, max_fake_quant_error=1e-3, max_layer_error=0.06, max_kl=0.02,
        min_top1_agreement=0.9, max_perplexity_increase=0.03,
    ),
    "int4_wo": Limits(
        max_step_error=0.51, max_weight_error=0.35, max_fake_quant_error=1e-3, max_layer_error=0.6, max_kl=1.2,
        min_top1_agreement=0.45, max_perplexity_increase=1.2,
    ),
    "int4_awq": Limits(
        max_step_error=0.51, max_weight_error=0.35, max_fake_quant_error=1e-3, max_layer_error=0.4, max_kl=0.8,
        min_top1_agreement=0.6, max_perplexity_increase=0.7,
    ),
    "w4a8_awq": Limits(
        max_step_error=0.51, max_weight_error=0.35, max_fake_quant_error=2e-2, max_layer_error=0.4, max_kl=1.0,
        min_top1_agreement=0.5, max_perplexity_increase=0.9,
    ),
}  # fmt: skip


def limits_for(format_: LinearFormat, config: VerifyConfig) -> Limits:
    """The limits of a format, with those that `config` sets in their place."""
    return _with_chosen(LIMITS[format_], config)


def limits_of_mix(formats: Iterable[LinearFormat], config: VerifyConfig) -> Limits:
    """The limits of a checkpoint whose layers have these formats; a layer's own are those of its format.

    End to end each limit is that of the format that is allowed most: a mixture is between its parts, and how far
    depends on which layers are which. It catches what is broken; `verify.*` makes a tighter promise.
    """
    parts = [LIMITS[form] for form in formats]
    whole = replace(
        max(parts, key=lambda part: part.max_kl),
        min_top1_agreement=min(part.min_top1_agreement for part in parts),
        max_perplexity_increase=max(part.max_perplexity_increase for part in parts),
    )
    return _with_chosen(whole, config)


def _with_chosen(limits: Limits, config: VerifyConfig) -> Limits:
    chosen = {
        "max_layer_error": config.max_layer_error,
        "max_kl": config.max_kl,
        "min_top1_agreement": config.min_top1_agreement,
        "max_perplexity_increase": config.max_perplexity_increase,
    }
    return replace(limits, **{name: value for name, value in chosen.items() if value is not None})
