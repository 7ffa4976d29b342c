"""The table of images and versions, and whether a machine can run them."""

from __future__ import annotations

import pytest

from pipeline.config.keys import KEYS
from pipeline.errors import ConfigError
from pipeline.targets.tensorrt_llm.toolchains import by_tag, check_host, find, is_model, table
from tests.support.trtllm_building import NO_GPU, host

pytestmark = pytest.mark.fast


# Rows of the compatibility matrix, copied by hand (trtllm.md 1.2).
@pytest.mark.parametrize(
    ("tag", "tensorrt_llm", "tensorrt", "cuda", "driver"),
    [
        ("26.07", "1.2.1", "10.14.1.48", "13.1.0.036", "590.44.01"),
        ("26.05", "1.2.1", "10.14.1.48", "13.1.0.036", "590.44.01"),
        ("26.03", "1.2.0", "10.14.1.48", "13.1.0.036", "590.44.01"),
        ("25.12", "1.1.0", "10.13.3.9", "13.0.2.006", "580.95.05"),
        ("25.10", "1.0.0", "10.11.0.33", "12.9.1.010", "575.57.08"),
        ("25.05", "0.19.0", "10.9.0.34", "12.8.1.012", "570.124.06"),
        ("24.12", "0.16.0", "10.7.0", "12.6.3", "560.35.05"),
        ("24.08", "0.12.0", "10.3.0", "12.5.1.007", "555.42.06"),
    ],
)
def test_a_row_says_what_the_compatibility_matrix_says(
    tag: str, tensorrt_llm: str, tensorrt: str, cuda: str, driver: str
) -> None:
    """Versions and driver of an image are those of trtllm.md 1.2."""
    row = by_tag(tag)
    assert (row.tensorrt_llm, row.tensorrt, row.cuda, row.driver) == (tensorrt_llm, tensorrt, cuda, driver)


def test_the_table_has_every_release_from_24_08_to_26_07() -> None:
    """24 months of images, none twice."""
    tags = [row.tag for row in table().toolchains]
    months = [f"{year}.{month:02}" for year in (24, 25, 26) for month in range(1, 13)]
    assert sorted(tags) == [month for month in months if "24.08" <= month <= "26.07"]


def test_the_default_image_of_1_2_1_is_26_05() -> None:
    """The reference is NVIDIA's, with the suffix of the TensorRT-LLM variant."""
    assert find("1.2.1").image == "nvcr.io/nvidia/tritonserver:26.05-trtllm-python-py3"


def test_the_toolchains_of_the_config_are_those_that_have_a_default_image_and_a_status() -> None:
    """Schema and table agree, and each version says when it ends."""
    assert set(KEYS["engine.toolchain"].choices) == set(table().default)
    assert {row.tensorrt_llm for row in table().releases} == set(table().default)
    assert all(row.ends and row.source for row in table().releases)


@pytest.mark.parametrize("version", ["1.3.0", "1.3.0rc7", "1.3", "1.4.0rc1", "2.0"])
def test_a_version_without_the_engine_path_is_refused_with_the_reason(version: str) -> None:
    """trtllm.md 1.1: treat every 1.3.x and later as without trtllm-build."""
    with pytest.raises(ConfigError, match="has no trtllm-build") as caught:
        find(version)
    assert "tensorrt_llm_llmapi" in caught.value.hint


def test_a_tag_beyond_the_table_is_refused() -> None:
    """trtllm.md 1.2: what 26.08 carries could not be read; 1.2.1 must not be assumed."""
    with pytest.raises(ConfigError, match=r"'26\.08' is not in the table of toolchains, which ends at 26\.07"):
        find("1.2.1", "26.08")


def test_a_tag_of_another_version_is_refused_with_the_fitting_tags() -> None:
    """25.10 carries 1.0.0."""
    with pytest.raises(ConfigError, match=r"'25\.10' carries TensorRT-LLM 1\.0\.0") as caught:
        find("1.2.1", "25.10")
    assert "26.07, 26.06, 26.05, 26.04" in caught.value.hint


def test_a_digest_pins_the_image() -> None:
    """Once it is filled in, the reference carries it."""
    row = find("1.2.1").model_copy(update={"digest": "sha256:ab"})
    assert row.image.endswith("26.05-trtllm-python-py3@sha256:ab")


@pytest.mark.parametrize(
    ("driver", "version", "expected"),
    [
        ("590.44.01", "1.2.1", ""),
        ("580.65.06", "1.2.1", ""),  # CUDA 13 needs R580 or newer
        ("575.57.08", "1.2.1", "engine.toolchain: 1.0.0 (image 25.10)"),  # R575: last usable tag 25.10
        ("575.57.08", "1.0.0", ""),
        ("570.124.06", "1.0.0", "The last image that starts with this one is 25.05 with TensorRT-LLM 0.19.0"),
    ],
)
def test_a_driver_is_compared_with_the_branch_that_the_image_needs(driver: str, version: str, expected: str) -> None:
    """trtllm.md 1.2: R580 for CUDA 13, last usable tags 25.10 for R575 and 25.05 for R570."""
    problems = check_host(host(driver=driver), find(version), "H100")
    assert bool(problems) == bool(expected)
    assert expected in " ".join(str(problem) for problem in problems)


def test_another_gpu_than_the_config_names_is_an_error() -> None:
    """An engine for SM 90 cannot be built on SM 80."""
    (problem,) = check_host(host("NVIDIA A100-SXM4-80GB", 80), find("1.2.1"), "H100")
    assert problem.severity == "error"
    assert "for H100 (SM 90), and this machine has NVIDIA A100-SXM4-80GB" in problem.message


def test_another_model_of_the_same_sm_is_a_warning() -> None:
    """Tactics are timed on the build GPU; the engine would run."""
    (problem,) = check_host(host("NVIDIA H200", 90), find("1.2.1"), "H100")
    assert problem.severity == "warning"


def test_a_machine_without_gpu_is_told_that_the_node_builds() -> None:
    """It is a warning, because everything before the build runs."""
    (problem,) = check_host(NO_GPU)
    assert (problem.severity, "built on the GPU node" in problem.message) == ("warning", True)


@pytest.mark.parametrize(
    ("name", "gpu", "same"),
    [
        ("NVIDIA L40S", "L4", False),
        ("NVIDIA L4", "L4", True),
        ("NVIDIA A100-SXM4-40GB", "A100", True),
        ("NVIDIA H100 PCIe", "H100", True),
        ("NVIDIA H200", "H100", False),
    ],
)
def test_names_of_nvidia_smi_are_matched_by_whole_words(name: str, gpu: str, *, same: bool) -> None:
    """L4 is no L40S."""
    assert is_model(name, gpu) is same
