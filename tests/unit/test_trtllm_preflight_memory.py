"""Memory and the nearest feasible change, all findings together, and the list of known edges."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoints.architecture import Architecture
from pipeline.config import legality
from pipeline.host.probe import GpuProfile
from pipeline.targets.tensorrt_llm.budget import GIB, budget
from pipeline.targets.tensorrt_llm.preflight import preflight
from pipeline.targets.tensorrt_llm.preflight.coverage import coverage
from pipeline.targets.tensorrt_llm.preflight.finding import Case
from pipeline.targets.tensorrt_llm.preflight.memory import changed, nearest
from pipeline.targets.tensorrt_llm.preflight.rules import rules
from tests.support.trtllm_cases import H100, LLAMA_3_1_8B, LLAMA_3_3_70B, decoder, gpu_config, machine, said

pytestmark = pytest.mark.fast

B = "engine__build__"
S = "serving__tensorrt_llm__"
TP = "engine__tensor_parallel_size"
AWQ = {"quantization__format": "int4_awq"}
ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "pipeline/targets/tensorrt_llm/preflight"


# --- 45, 46: memory, and the nearest feasible change ---------------------------------------------------------------


def test_weights_above_the_gpu_are_named_with_ways_out() -> None:
    """Llama-3.3-70B at 16 bit on one H100: two GPUs, FP8 weights or an H200 have room for 8192 tokens."""
    (found,) = said("TL46", LLAMA_3_3_70B)
    assert found.startswith("error engine.gpu: weights and overhead take 135.3 GiB of each H100 with 93.0 GiB")
    assert "Nearest that fits: engine.tensor_parallel_size: 2" in found
    assert "quantization.format: fp8" in found


def test_pool_below_one_sequence_is_named_with_the_length_that_fits() -> None:
    """128k tokens of 70B FP8 on one 94 GB card."""
    values = {"quantization__format": "fp8", "engine__max_seq_len": 131072, "engine__max_num_tokens": 8192}
    (found,) = said("TL45", LLAMA_3_3_70B, **values)
    assert found.startswith("error engine.max_seq_len: the KV pool of each H100")
    assert "engine.tensor_parallel_size: 2" in found
    assert "engine.max_seq_len: " in found
    assert said("TL45", LLAMA_3_3_70B, **values, **{TP: 4}) == []


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"quantization__format": "fp8", "engine__max_seq_len": 131072},
        {"engine__gpu": "L4", "quantization__format": "int4_awq", TP: 4},
        {"engine__gpu": "A100", "quantization__format": "int8_sq"},
    ],
)
def test_every_offered_change_fits_and_adds_no_other_error(values: dict[str, Any]) -> None:
    """Each is counted and judged again, as a user would after writing it."""
    config, before = gpu_config(**values), LLAMA_3_3_70B
    case = Case(config=config, model=before)
    old = {problem.where for problem in legality.check(config, before) if problem.severity == "error"}
    offered = nearest(case, lambda other: not _new_errors(other, before) - old)
    assert offered
    for change in offered:
        other = changed(config, change.key, change.value)
        assert budget(other, before).fits
        assert not [one for one in preflight(other, before) if one.severity == "error"]
        assert not _new_errors(other, before) - old


def _new_errors(config: Any, architecture: Architecture) -> set[str]:
    return {problem.where for problem in legality.check(config, architecture) if problem.severity == "error"}


def test_nothing_is_offered_when_no_single_change_is_enough() -> None:
    """70B at 16 bit with 131072 tokens on one L4 needs several changes at once."""
    (found,) = said("TL46", LLAMA_3_3_70B, engine__gpu="L4", engine__max_seq_len=131072)
    assert "No single change fits" in found


def test_offered_length_is_the_longest_that_fits() -> None:
    """One block more does not fit."""
    values = {"quantization__format": "fp8", "engine__max_seq_len": 131072}
    case = Case(config=gpu_config(**values), model=LLAMA_3_3_70B)
    (change,) = [one for one in nearest(case, lambda _: True) if one.key == "engine.max_seq_len"]
    assert isinstance(change.value, int)
    assert not budget(changed(case.config, change.key, change.value + 32), LLAMA_3_3_70B).fits


def test_fp8_cache_is_offered_only_where_it_can_be_built() -> None:
    """On A100 there is none, so the KV cache stays as it is or becomes INT8 without reuse."""
    values = {"engine__gpu": "A100", "quantization__format": "int8_sq", "engine__max_seq_len": 65536}
    found = said("TL45", LLAMA_3_3_70B, **values) + said("TL46", LLAMA_3_3_70B, **values)
    assert len(found) == 1
    assert "kv_cache: fp8" not in found[0]
    assert "kv_cache: int8" not in found[0]


def test_variant_above_the_smallest_is_named() -> None:
    """A config for A100 that needs 80 GB says so."""
    (found,) = said("TL46", LLAMA_3_3_70B, engine__gpu="A100", **AWQ)
    assert found.startswith("warning engine.gpu: this needs the 80 GB variant")
    assert said("TL46", LLAMA_3_1_8B, engine__gpu="A100") == []


def test_memory_of_the_gpu_at_hand_is_judged_when_there_is_one() -> None:
    """A host with the config's GPU decides instead of the data sheet."""
    small = GpuProfile(name="NVIDIA H100 MIG", sm=90, memory_bytes=10 * GIB, driver="590.44.01")
    assert said("TL46", host=machine(small))[0].startswith("error engine.gpu: weights and overhead take 18.6 GiB")
    assert said("TL46", host=machine(H100)) == []


# --- the whole ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["bf16", "fp8", "int4_awq"])
@pytest.mark.parametrize("gpu", ["H100", "H200", "L40S"])
def test_common_deployments_have_no_finding(form: str, gpu: str) -> None:
    """Llama-3.1-8B in the usual formats."""
    assert preflight(gpu_config(quantization__format=form, engine__gpu=gpu), LLAMA_3_1_8B, machine()) == []


def test_llm_api_is_judged_by_memory_and_machine_only() -> None:
    """Engine options and MODEL_MAP are not its business."""
    values = {"engine__target": "tensorrt_llm_llmapi"}
    odd = decoder(architecture="GptOssForCausalLM")
    assert preflight(gpu_config(**values, **{f"{B}streamingllm": "enable"}), odd) == []
    assert len(said("TL46", LLAMA_3_3_70B, **values)) == 1


def test_other_targets_and_configs_without_a_gpu_are_left_to_others() -> None:
    """OpenVINO has no preflight here, and a missing GPU is reported by config/rules.py."""
    assert preflight(gpu_config(engine__target="openvino"), LLAMA_3_1_8B) == []
    assert preflight(gpu_config(engine__gpu=None), LLAMA_3_1_8B) == []


def test_findings_are_reported_together_errors_first_with_their_place() -> None:
    """Provenance says where a key was written."""
    values = {f"{B}streamingllm": "enable", f"{B}nccl_plugin": "float16", f"{S}max_beam_width": 9}
    found = preflight(gpu_config(**values), LLAMA_3_1_8B, None, {"engine.build.streamingllm": "a.yaml:7"})
    assert [one.severity for one in found] == ["error", "error", "warning"]
    assert "a.yaml:7 engine.build.streamingllm" in [one.where for one in found]


def test_every_known_edge_is_accounted_for_exactly_once() -> None:
    """Rows 1 to 69, in order, each with a reason."""
    assert [edge.row for edge in coverage()] == list(range(1, 70))
    assert all(edge.by and edge.what for edge in coverage())


def test_coverage_names_the_checks_that_exist() -> None:
    """An id in the table is one that the code uses, and the other way round."""
    source = "".join(path.read_text() for path in [*PACKAGE.glob("*.py")])
    used = {rule.id for rule in rules()} | {f"TL{n}" for n in range(1, 70) if f'"TL{n}"' in source}
    named = {name for edge in coverage() for name in edge.by if re.fullmatch(r"TL\d+", name)}
    assert used - {"TL-notes", "TL-5.2"} == named
    assert {f"TL{edge.row}" for edge in coverage() if edge.how == "preflight"} == named


def test_coverage_names_modules_that_exist() -> None:
    """Who is said to check an edge is there."""
    named = {path for edge in coverage() for text in edge.by for path in re.findall(r"pipeline/[\w/]+\.\w+", text)}
    assert len(named) > 10
    assert [path for path in sorted(named) if not (ROOT / path).is_file()] == []
