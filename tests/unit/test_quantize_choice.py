"""From scores and a budget to formats: the optimum, always the same one, with reasons."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any, get_args
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config.schema import LayerFormat
from pipeline.errors import ConfigError
from pipeline.quantize import sensitivities
from pipeline.quantize.choice import Table, options, reasons
from pipeline.quantize.sensitivities import Group, Sensitivities
from pipeline.quantize.sensitivity_chart import COLOURS, html, svg

pytestmark = pytest.mark.fast

KINDS = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.o_proj",), ("mlp.down_proj",))


def scored(
    rows: list[tuple[int, float, float]],
    *,
    fixed: dict[str, Any] | None = None,
    names: list[tuple[str, ...]] | None = None,
) -> Sensitivities:
    """Groups of (weights, score of int4_awq, score of int8_wo), with an excluded head of 1000 weights."""
    names = names or [(f"model.layers.{number}.mlp.down_proj",) for number in range(len(rows))]
    groups = tuple(
        Group(layers=layers, weights=weights, scores={"int4_awq": four, "int8_wo": eight})
        for layers, (weights, four, eight) in zip(names, rows, strict=True)
    )
    layers = {name: group.weights // len(group.layers) for group in groups for name in group.layers}
    return Sensitivities(
        method="gradient",
        groups=groups,
        fixed=fixed or {},
        layers=layers | dict.fromkeys(fixed or {}, 100) | {"lm_head": 1000},
        parameters=sum(layers.values()) + 100 * len(fixed or {}) + 1500,
        text={"source": {"name": "shipped"}},
    )


def brute_force(known: Sensitivities, effective_bits: float) -> float:
    """The least loss of all combinations within the budget."""
    budget = effective_bits * sum(group.weights for group in known.groups) + 1e-6
    affordable = (
        sum(option.score for option in row)
        for row in itertools.product(*(options(group) for group in known.groups))
        if sum(option.bits for option in row) <= budget
    )
    return min(affordable)


SCORE = st.floats(0, 1, allow_subnormal=False)
ROW = st.tuples(st.integers(1, 40).map(lambda n: 64 * n), SCORE, SCORE)


@settings(max_examples=150, deadline=None)
@given(rows=st.lists(ROW, min_size=1, max_size=6), bits=st.floats(4, 16))
def test_no_combination_within_the_budget_is_better(rows: list[tuple[int, float, float]], bits: float) -> None:
    """The table against every combination there is; 16 bit and both candidates for each group."""
    known = scored(rows)
    choice = Table(known).choose(bits)
    assert choice.effective_bits <= bits + 1e-9
    assert choice.loss == pytest.approx(brute_force(known, bits), abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(ROW, min_size=1, max_size=20))
def test_less_budget_never_takes_more_bits_nor_loses_less(rows: list[tuple[int, float, float]]) -> None:
    """Along the whole curve."""
    table = Table(scored(rows))
    curve = [table.choose(4 + step / 4) for step in range(49)]
    for lower, higher in itertools.pairwise(curve):
        assert lower.effective_bits <= higher.effective_bits
        assert lower.loss >= higher.loss - 1e-12


def test_layer_sizes_without_a_common_factor_keep_the_budget() -> None:
    """The table then rounds up what a choice costs; 22 steps of 4/60 bits are still all that 1.5 bits can buy."""
    rows = [(100_003 + 17 * n, 0.1 / (n + 1), 0.001) for n in range(60)]
    choice = Table(scored(rows)).choose(5.5)
    assert choice.effective_bits <= 5.5
    assert [option.format for option in choice.taken] == ["int8_wo"] * 22 + ["int4_awq"] * 38


def test_of_equal_choices_the_narrower_and_then_the_first_is_taken() -> None:
    """Nothing is spent that gains nothing, and equal layers are told apart by their place alone."""
    equal = scored([(64, 0.0, 0.0), (64, 0.5, 0.25), (64, 0.5, 0.25)])
    assert Table(equal).choose(16).formats == {"model.layers.0.mlp.down_proj": "int4_awq"}
    first = Table(equal).choose(8.0).formats
    assert first == Table(scored([(64, 0.0, 0.0), (64, 0.5, 0.25), (64, 0.5, 0.25)])).choose(8.0).formats


def test_formats_come_in_model_order_with_overridden_layers_and_without_excluded_ones() -> None:
    """As if the config had named them one by one."""
    fixed = {"model.layers.1.mlp.down_proj": "fp8", "model.layers.2.mlp.down_proj": "bf16"}
    known = scored([(64, 0.1, 0.01)], fixed=fixed)
    assert Table(known).choose(16).formats == {"model.layers.1.mlp.down_proj": "fp8"}
    assert Table(known).choose(10.43).formats == {
        "model.layers.0.mlp.down_proj": "int4_awq",
        "model.layers.1.mlp.down_proj": "fp8",
    }


def test_bits_are_counted_three_ways() -> None:
    """Over what may be quantized, over all linear layers as ModelOpt does, and over the whole model."""
    choice = Table(scored([(1000, 0.1, 0.01), (1000, 0.2, 0.02)])).choose(6)
    assert choice.effective_bits == 6
    assert choice.effective_bits_of_all == pytest.approx((2000 * 6 + 1000 * 16) / 3000)
    assert choice.bits_per_parameter == pytest.approx((2000 * 6 + 1500 * 16) / 3500)


def test_a_budget_that_cannot_be_kept_names_the_lowest() -> None:
    """Overrides can make the lowest budget more than the narrowest candidate."""
    known = scored([(100, 0.1, 0.01)], fixed={"model.layers.1.mlp.down_proj": "fp8"})
    with pytest.raises(ConfigError, match=r"effective_bits: 5 cannot be kept; the lowest is 6"):
        Table(known).choose(5)
    assert Table(known).choose(6).effective_bits == 6


def test_every_group_says_why() -> None:
    """At 16 bit: what the narrower format would lose and save, against the dearest saving that was taken."""
    mib = 2**20
    choice = Table(scored([(mib, 0.4, 0.3), (mib, 0.01, 0.001)])).choose(10)
    assert [option.format for option in choice.taken] == ["16bit", "int4_awq"]
    stays, narrowest = reasons(choice)
    assert stays == (
        "int4_awq would add 0.4 nats and save 1.5 MiB: 0.27 nats per MiB, where the dearest that was taken costs 0.018"
    )
    assert narrowest == "the narrowest candidate, for 0.01 nats"
    document = choice.document()
    assert [group["format"] for group in document["groups"]] == ["16bit", "int4_awq"]
    assert document["excluded"] == ["lm_head"]


def test_what_is_written_is_read_back_the_same(tmp_path: Path) -> None:
    """sensitivity.json loses nothing, and is the same bytes again."""
    known = scored([(64, 1 / 3, 0.01), (128, 0.2, math.pi)], fixed={"model.layers.9.mlp.down_proj": "fp8"})
    sensitivities.write(tmp_path, known, {"torch": "2"})
    first = (tmp_path / sensitivities.FILE).read_bytes()
    assert sensitivities.read(tmp_path) == known
    sensitivities.write(tmp_path, sensitivities.read(tmp_path), {"torch": "2"})
    assert (tmp_path / sensitivities.FILE).read_bytes() == first


def test_the_chart_draws_one_bar_for_each_group_in_the_colour_of_its_format() -> None:
    """Well-formed XML, every bar named; a page that holds the same drawing."""
    names = [tuple(f"model.layers.{n}.{layer}" for layer in kind) for n in range(4) for kind in KINDS]
    known = scored([(300, 0.1 / (n + 1), 1e-5) for n in range(len(names))], names=names)
    table = Table(known)
    choice, curve = table.choose(6), [table.choose(bits) for bits in (4, 5, 8, 16)]
    root = ET.fromstring(svg(choice, curve, "a <title> & more"))  # noqa: S314 - our own document
    space = "{http://www.w3.org/2000/svg}"
    bars = [rect for rect in root.iter(f"{space}rect") if rect.find(f"{space}title") is not None]
    assert len(bars) == len(names)
    labels = [bar.findtext(f"{space}title") or "" for bar in bars]
    assert labels[0].startswith("model.layers.0.self_attn.q_proj+k_proj+v_proj: ")
    assert len({bar.get("fill") for bar in bars}) == len({option.format for option in choice.taken}) > 1
    assert all(float(bar.get("height", "0")) > 0 for bar in bars)
    assert len(list(root.iter(f"{space}circle"))) == 5
    assert set(get_args(LayerFormat)) < set(COLOURS)
    page = html(choice, curve, "a <title> & more")
    assert page.startswith("<!doctype html>")
    assert page.count("<rect") == svg(choice, curve, "x").count("<rect")


def test_a_group_of_many_layers_is_named_by_what_holds_them() -> None:
    """The experts of a decoder layer are one group."""
    layers = tuple(f"model.layers.0.mlp.experts.{n}.w1" for n in range(8))
    assert Group(layers=layers, weights=8, scores={}).name == "model.layers.0.mlp.experts (8 layers)"
