"""Every format and every layout on every target: produced, or refused with a reason; no cell is empty."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import get_args

import pytest

from pipeline.config import legality
from pipeline.config.deployment import TargetName
from pipeline.config.schema import LayerFormat
from pipeline.coverage import HEADER, layouts, rows
from tests.support.commands import trtpipe

pytestmark = pytest.mark.fast


def test_every_cell_is_decided_and_every_refusal_says_why() -> None:
    """The product of formats and layouts with the targets, once each."""
    found = rows()
    cells = {(row.source, row.format, row.target) for row in found}
    expected = (len(get_args(LayerFormat)) + len(layouts())) * len(get_args(TargetName))
    assert len(found) == len(cells) == expected > 100
    for row in found:
        assert row.verdict != "refused" or len(row.why) > 20, row
        assert len(row.cells()) == len(HEADER)


def test_every_source_is_taken_by_some_target() -> None:
    """What nobody takes would not be read at all."""
    taken = {(row.source, row.format) for row in rows() if row.verdict != "refused"}
    assert taken == {(row.source, row.format) for row in rows()}


def test_every_layout_of_the_table_is_one_that_is_shown() -> None:
    """But for variants of a shown one: other scales with the same kernel."""
    table = {str(kind) for row in legality.table().passed_on for kind in row.when["layout"]}  # type: ignore[union-attr]
    variants = {
        "gptq int8 act-order",
        "pack-quantized int4 channel 16 bit",
        "int-quantized int8 tensor static",
        "int-quantized int8 tensor dynamic",
        "float-quantized e4m3 tensor dynamic",
        "modelopt INT4_AWQ",
    }
    assert table - variants <= set(layouts())


def test_a_gpu_without_fp8_loses_the_fp8_formats() -> None:
    """A100: what needs SM 89 is refused on the GPU targets and stays on the CPU."""
    refused = {(row.format, row.target) for row in rows("A100") if row.verdict == "refused"}
    assert {("fp8", "vllm"), ("fp8", "tensorrt_llm"), ("fp8_rowwise", "tensorrt_llm_llmapi")} <= refused
    assert ("fp8", "openvino") not in refused
    assert Counter(row.verdict for row in rows("A100"))["made"] < Counter(row.verdict for row in rows())["made"]


def test_the_command_shows_it(tmp_path: Path) -> None:
    """`trtpipe matrix --sources`, narrowed to a format and a target."""
    outcome = trtpipe("matrix", "--sources", "--format", "int8_sq", "--target", "vllm", cwd=tmp_path)
    assert "refused" in outcome.stdout
    assert "no place for one" in outcome.stdout
