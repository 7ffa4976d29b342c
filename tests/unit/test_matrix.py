"""The compatibility matrix: what the tables say per combination, filters, and agreement with the checks of a build."""

from __future__ import annotations

from typing import get_args

import pytest

from pipeline.config import legality
from pipeline.config.schema import LayerFormat
from pipeline.errors import ConfigError
from pipeline.targets.tensorrt_llm import toolchains
from pipeline.targets.tensorrt_llm.matrix import HEADER, TARGETS, Filters, Row, architectures, rows
from pipeline.targets.tensorrt_llm.models import models

pytestmark = pytest.mark.fast


def one(**filters: str) -> Row:
    """The single row that the filters leave, for TensorRT-LLM 1.2.1."""
    (row,) = rows(Filters(toolchains=["1.2.1"], **{f"{name}s": [value] for name, value in filters.items()}))
    return row


# NVIDIA/TensorRT-LLM docs/source/legacy/reference/precision.md@b2ae043: precision by GPU generation.
@pytest.mark.parametrize(
    ("gpu", "form", "kv_caches"),
    [
        ("A100", "bf16", ("auto", "int8")),
        ("A100", "int8_sq", ("auto", "int8")),
        ("A100", "int4_awq", ("auto", "int8")),
        ("A100", "int8_wo", ("auto", "int8")),
        ("A100", "fp8", ()),
        ("A100", "w4a8_awq", ()),
        ("L4", "fp8", ("auto", "fp8", "int8")),
        ("L40S", "int4_awq", ("auto", "fp8", "int8")),
        ("H100", "fp8", ("auto", "fp8", "int8")),
        ("H200", "w4a8_awq", ("auto", "fp8", "int8")),
    ],
)
def test_precision_follows_the_gpu_generation(gpu: str, form: str, kv_caches: tuple[str, ...]) -> None:
    """Upstream's table of precisions by SM, for an architecture that has every format."""
    row = one(architecture="LlamaForCausalLM", target="tensorrt_llm", gpu=gpu, format=form)
    assert row.kv_caches == kv_caches
    assert (row.verdict == "no") == (not kv_caches)


# Rules 8 and 9 of the build: which KV formats keep paged context attention.
@pytest.mark.parametrize(
    ("form", "reusable"),
    [("fp8", ("auto", "fp8")), ("w4a8_awq", ("auto", "fp8")), ("int4_awq", ("auto",)), ("bf16", ("auto",))],
)
def test_block_reuse_follows_the_kv_format(form: str, reusable: tuple[str, ...]) -> None:
    """INT8 KV never keeps block reuse, FP8 KV only with FP8 activations."""
    row = one(architecture="LlamaForCausalLM", target="tensorrt_llm", gpu="H100", format=form)
    assert row.reusable == reusable


def test_int8_lives_in_the_engine_lane_only() -> None:
    """The LLM API has no SmoothQuant, so INT8 on A100 means engines."""
    assert one(architecture="LlamaForCausalLM", target="tensorrt_llm", gpu="A100", format="int8_sq").verdict != "no"
    row = one(architecture="LlamaForCausalLM", target="tensorrt_llm_llmapi", gpu="A100", format="int8_sq")
    assert row.verdict == "no"
    assert "engine path" in row.why[0]


def test_architecture_without_engine_path_has_the_other_lane() -> None:
    """DeepSeek V3 is served by the LLM API alone."""
    engine = one(architecture="DeepseekV3ForCausalLM", target="tensorrt_llm", gpu="H100", format="bf16")
    api = one(architecture="DeepseekV3ForCausalLM", target="tensorrt_llm_llmapi", gpu="H100", format="bf16")
    assert (engine.verdict, api.verdict) == ("no", "yes")


def test_upstreams_table_of_precisions_is_read_per_format() -> None:
    """Yes, a note, a gap and no row are told apart; 16 bit is yes for every family."""
    assert models().support("GPTNeoXForCausalLM", "fp8") == ("no", "")
    assert models().support("Qwen2ForCausalLM", "fp8")[0] == "noted"
    assert models().support("LlamaForCausalLM", "bf16") == ("yes", "")
    assert models().support("NoSuchModel", "fp8") == ("unlisted", "")


def test_lane_without_evidence_is_unknown_and_not_yes() -> None:
    """Nothing read says that the LLM API serves Arctic."""
    row = one(architecture="ArcticForCausalLM", target="tensorrt_llm_llmapi", gpu="H100", format="bf16")
    assert row.verdict == "unknown"
    assert row.why


def test_every_row_states_image_driver_and_end() -> None:
    """The toolchain table is in each row, with the end of the engine path."""
    found = rows(Filters(architectures=["LlamaForCausalLM"], formats=["bf16"], gpus=["A100"]))
    assert [(row.target, row.tensorrt_llm, row.image_tag, row.driver_branch) for row in found] == [
        ("tensorrt_llm", "1.2.1", "26.05", 580),
        ("tensorrt_llm", "1.0.0", "25.10", 575),
        ("tensorrt_llm_llmapi", "1.2.1", "26.05", 580),
        ("tensorrt_llm_llmapi", "1.0.0", "25.10", 575),
    ]
    assert "removed from 1.3 on (2026-07)" in found[0].ends
    assert "only lane from 1.3" in found[2].ends


def test_driver_leaves_out_newer_images() -> None:
    """With driver R575 TensorRT-LLM 1.2.1 does not start."""
    assert {row.tensorrt_llm for row in rows(Filters(architectures=["Mistral"], driver="575.57.08"))} == {"1.0.0"}
    assert rows(Filters(architectures=["Mistral"], driver="R550")) == []


def test_tag_picks_its_image() -> None:
    """An image tag is taken as it is, also one that builds are not offered for."""
    (row,) = rows(
        Filters(
            architectures=["LlamaForCausalLM"],
            formats=["fp8"],
            gpus=["H100"],
            targets=["tensorrt_llm"],
            toolchains=["25.05"],
        )
    )
    assert (row.tensorrt_llm, row.cuda) == ("0.19.0", "12.8.1.012")
    assert row.ends == "ended: not offered for engines any more"


def test_gpus_of_one_generation_share_a_row() -> None:
    """A row is a generation; a filter by GPU narrows the names in it."""
    found = rows(Filters(architectures=["LlamaForCausalLM"], formats=["fp8"], targets=["tensorrt_llm"]))
    assert {(row.sm, row.gpus) for row in found} == {(80, ("A100",)), (89, ("L40S", "L4")), (90, ("H100", "H200"))}


def test_family_stands_for_its_architectures() -> None:
    """'qwen' asks for every Qwen class."""
    found = {row.architecture for row in rows(Filters(architectures=["qwen"], gpus=["H100"]))}
    assert found == set(next(family.architectures for family in models().families if family.name == "Qwen"))


def test_refused_rows_can_be_left_out() -> None:
    """only_working drops what is refused and nothing else."""
    narrow = Filters(architectures=["LlamaForCausalLM"], gpus=["A100"])
    everything = rows(narrow)
    working = rows(Filters(architectures=["LlamaForCausalLM"], gpus=["A100"], only_working=True))
    assert working == [row for row in everything if row.verdict != "no"]
    assert 0 < len(working) < len(everything)


def test_matrix_covers_every_combination_once() -> None:
    """Unfiltered it is the product of its axes, without gaps or repeats."""
    found = rows()
    generations = {gpu.sm for gpu in legality.gpus().values()}
    formats = get_args(LayerFormat)
    expected = len(architectures()) * len(TARGETS) * len(toolchains.table().default) * len(generations) * len(formats)
    keys = {(row.architecture, row.target, row.tensorrt_llm, row.sm, row.format) for row in found}
    assert len(keys) == len(found) == expected > 3000


def test_what_is_refused_says_why_and_what_works_names_a_kv_format() -> None:
    """No verdict stands alone."""
    for row in rows(Filters(gpus=["A100", "H100"], toolchains=["1.2.1"])):
        assert row.why or row.verdict == "yes", row
        assert bool(row.kv_caches) == (row.verdict != "no"), row
        assert set(row.reusable) <= set(row.kv_caches), row


def test_text_has_one_cell_per_column() -> None:
    """Header and cells belong together, and no cell is empty."""
    for row in rows(Filters(architectures=["LlamaForCausalLM"])):
        assert len(row.cells()) == len(HEADER)
        assert all(row.cells())


@pytest.mark.parametrize(
    ("filters", "message", "hint"),
    [
        (Filters(architectures=["LamaForCausalLM"]), "no architecture 'LamaForCausalLM'", "'LlamaForCausalLM'"),
        (Filters(gpus=["V100"]), "no GPU 'V100'", "100"),
        (Filters(formats=["fp88"]), "no format 'fp88'", "'fp8'"),
        (Filters(toolchains=["1.3.0"]), "no toolchain '1.3.0'", "1."),
        (Filters(driver="new"), "'new' is not a driver version", "575.57.08"),
    ],
)
def test_unknown_words_are_refused_with_the_nearest_known(filters: Filters, message: str, hint: str) -> None:
    """A typing error is no empty matrix."""
    with pytest.raises(ConfigError, match=message) as caught:
        rows(filters)
    assert hint in caught.value.hint


def test_tables_of_architectures_agree() -> None:
    """What the precision table lists the map has (or leaves open), and no lane claims what the other denies."""
    table = models()
    listed = {name for family in table.families for name in family.architectures}
    assert [name for name in listed if table.model_class(name) is None and name not in table.unsettled] == []
    assert not table.llm_api_only & {name for names in table.classes.values() for name in names}
    assert set(table.columns) == set(get_args(LayerFormat)) - {"bf16", "fp16"}
