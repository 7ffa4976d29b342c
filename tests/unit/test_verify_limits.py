"""Limits of checkpoints whose layers have several formats."""

from __future__ import annotations

import pytest

from pipeline.config.schema import VerifyConfig
from pipeline.quantize.limits import LIMITS, limits_for, limits_of_mix

pytestmark = pytest.mark.fast


def test_a_mixture_is_allowed_end_to_end_what_its_coarsest_format_is() -> None:
    """Each measure by the format that is allowed most of it."""
    whole = limits_of_mix(["fp8", "int4_wo", "w4a8_awq"], VerifyConfig())
    assert whole.max_kl == LIMITS["int4_wo"].max_kl
    assert whole.min_top1_agreement == LIMITS["int4_wo"].min_top1_agreement
    assert whole.max_perplexity_increase == LIMITS["int4_wo"].max_perplexity_increase


def test_a_mixture_of_one_is_that_format() -> None:
    """Nothing changes for a plain checkpoint."""
    for form in LIMITS:
        assert limits_of_mix([form], VerifyConfig()) == limits_for(form, VerifyConfig())


def test_limits_of_the_config_win_over_those_of_formats() -> None:
    """A user's promise holds for the whole."""
    assert limits_of_mix(["fp8", "int4_wo"], VerifyConfig(max_kl=0.01)).max_kl == 0.01
