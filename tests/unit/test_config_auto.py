"""quantization.format auto: its laws, and that every candidate is judged as a format of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.config.formats import formats_of
from pipeline.config.legality import check
from pipeline.config.load import load
from pipeline.config.schema import BuildConfig
from pipeline.config.variants import planned, variants
from pipeline.errors import ConfigError
from pipeline.planner.needs import checkpoint_bytes, needs, parameters
from tests.support.architectures import LLAMA_8B

pytestmark = pytest.mark.fast

H100 = {"target": "tensorrt_llm", "gpu": "H100"}


def config(auto: dict[str, object], **sections: object) -> BuildConfig:
    """A config with format auto, groups of 128 and a budget of 6 bits unless told otherwise."""
    quantization = {"format": "auto", "auto": {"effective_bits": 6.0, **auto}}
    return BuildConfig.model_validate({"name": "a", "source": {"path": "m"}, "quantization": quantization} | sections)


def judge(auto: dict[str, object], **engine: object) -> list[str]:
    """What speaks against a build for Llama 8B."""
    found = check(config(auto, engine=engine), LLAMA_8B)
    return [str(problem) for problem in found if problem.severity == "error"]


@pytest.mark.parametrize(
    ("auto", "expected"),
    [
        (
            "effective_bits: 6",
            "candidates: format auto needs formats to choose from. Add candidates, for example [",
        ),
        (
            "candidates: [int4_awq]",
            "effective_bits: format auto needs a budget, and none is written. Add",
        ),
        (
            "{effective_bits: 6, candidates: [fp8, int8_wo]}",
            "effective_bits: 6 bits are less than the 8 of fp8, the narrowest candidate. Raise it to 8 or more",
        ),
        ("{effective_bits: 17, candidates: [fp8]}", "effective_bits: 17 is not a number above 0 and at most 16"),
        ("{effective_bits: 9, candidates: [fp8, fp8]}", "candidates: 'fp8' is named twice. Remove fp8."),
        ("{effective_bits: 9, candidates: [fp8, bf16]}", "candidates: 16 bit always is a candidate. Remove bf16."),
        ("{effective_bits: 9, candidates: [fp88]}", "candidates: 'fp88' is not a format. Did you mean 'fp8'?"),
        ("{effective_bits: 9, candidates: [auto]}", "candidates: 'auto' is not a format. Valid: bf16, fp16, fp8"),
        (
            "{effective_bits: 9, candidates: fp8}",
            "candidates: 'fp8' is not a list of formats. Write candidates: [\"fp8\"]",
        ),
        (
            "{effective_bits: 9, candidates: [fp8], num_score_samples: 65}",
            "num_score_samples: 65 sequences are more than calibration.num_samples, 64. Lower it",
        ),
        (
            "{effective_bits: 9, candidates: [fp8], method: hessian}",
            "method: 'hessian' is not a method. Valid:",
        ),
    ],
)
def test_a_search_that_makes_no_sense_is_refused(tmp_path: Path, auto: str, expected: str) -> None:
    """With the key to change and what to write."""
    path = tmp_path / "x.yaml"
    auto = auto if auto.startswith("{") else f"{{{auto}}}"
    path.write_text(f"name: a\nsource: {{path: m}}\nquantization: {{format: auto, auto: {auto}}}\n")
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert f"quantization.auto.{expected}" in "\n".join(map(str, caught.value.problems))


def test_it_is_not_for_vllm(tmp_path: Path) -> None:
    """Whose checkpoints are written with one format for all."""
    path = tmp_path / "x.yaml"
    auto = "auto: {effective_bits: 9, candidates: [fp8]}"
    engine = "engine: {target: vllm, gpu: H100}"
    path.write_text(f"name: a\nsource: {{path: m}}\nquantization: {{format: auto, {auto}}}\n{engine}\n")
    with pytest.raises(ConfigError, match=r"quantization\.format: a choice for each layer is not written for vLLM"):
        load(path)


def test_without_format_auto_its_section_has_no_effect(tmp_path: Path) -> None:
    """Each key that is written is named."""
    path = tmp_path / "x.yaml"
    path.write_text("name: a\nsource: {path: m}\nquantization: {format: fp8, auto: {effective_bits: 6}}\n")
    (warning,) = load(path).warnings
    assert "quantization.auto.effective_bits: has no effect with format fp8." in str(warning)


def test_an_override_cannot_be_auto(tmp_path: Path) -> None:
    """It names the format of certain layers, and auto is the format of none."""
    path = tmp_path / "x.yaml"
    overrides = "overrides: [{layers: '*.o_proj', format: auto}]"
    path.write_text(f"name: a\nsource: {{path: m}}\nquantization: {{format: fp8, {overrides}}}\n")
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert "'auto' is not a format" in str(caught.value)


def test_every_candidate_is_judged_on_its_target() -> None:
    """A candidate that the target cannot run, or whose groups do not fit, is refused as a format of the config is."""
    assert judge({"candidates": ["int4_awq", "int8_wo"]}) == []
    (refused,) = judge({"candidates": ["int4_awq", "w4a8_awq"]})
    assert refused.startswith("quantization.auto.candidates: w4a8_awq")
    assert judge({"candidates": ["int4_awq", "fp8"]}, target="tensorrt_llm", gpu="A100")[0].startswith(
        "quantization.auto.candidates: fp8 needs SM 89 or newer"
    )


def test_candidates_are_the_formats_in_use() -> None:
    """With those of the overrides."""
    overridden = config({"candidates": ["int4_awq", "int8_wo"]}).quantization.model_copy(
        update={"overrides": BuildConfig.model_validate(OVERRIDDEN).quantization.overrides}
    )
    assert formats_of(overridden) == ("int4_awq", "int8_wo", "fp8")


OVERRIDDEN = {
    "name": "a",
    "source": {"path": "m"},
    "quantization": {"overrides": [{"layers": "*.o_proj", "format": "fp8"}]},
}


def test_plans_count_the_budget_and_never_too_little() -> None:
    """The checkpoint by the budget's bits; an engine by the narrowest candidate that has as many."""
    searched = config({"candidates": ["int4_awq", "fp8"]}, engine=H100)
    assert [each.quantization.format for each in variants(searched)] == ["int4_awq", "fp8"]
    assert planned(searched).quantization.format == "fp8"
    assert planned(config({"candidates": ["int4_awq"]})).quantization.format == "bf16"
    narrow, wide = (checkpoint_bytes(LLAMA_8B, each) for each in variants(searched))
    assert narrow < checkpoint_bytes(LLAMA_8B, searched) < wide


def test_plans_say_what_scoring_takes() -> None:
    """One float32 copy of the model, and logits by the batch."""
    small, large = (
        next(need for need in needs(LLAMA_8B, with_batch(size)) if need.what == "score memory") for size in (1, 4)
    )
    tables = 4 * 3 * 512 * LLAMA_8B.vocab_size * 4
    assert large.n_bytes - small.n_bytes > tables
    assert small.n_bytes > 4 * sum(parameters(LLAMA_8B))


def with_batch(size: int) -> BuildConfig:
    """A config of format auto whose calibration feeds so many sequences at once."""
    return config({"candidates": ["int4_awq", "int8_wo"]}, calibration={"batch_size": size}, engine=H100)


def test_experts_are_scored_by_measuring() -> None:
    """The gradient method gives them no score, which would make the narrowest format look free."""
    mixture = replace(
        LLAMA_8B,
        architecture="MixtralForCausalLM",
        linears={"model.layers.0.block_sparse_moe.experts.0.w1": (14336, 4096)},
    )
    auto = {"candidates": ["fp8"], "effective_bits": 9.0}
    found = [str(problem) for problem in check(config(auto, engine=H100), mixture)]
    assert any("quantization.auto.method: 1 expert layers" in problem and "kl_div" in problem for problem in found)
    measured = [str(problem) for problem in check(config({**auto, "method": "kl_div"}, engine=H100), mixture)]
    assert not any("quantization.auto.method" in problem for problem in measured)
