"""Probing formats: NF4 of bitsandbytes, figures like verify's, and nothing left behind."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pipeline.config.schema import VerifyConfig
from pipeline.core.progress import Silent
from pipeline.errors import ConfigError, ToolError
from pipeline.quantize import rounding
from pipeline.quantize.trial import Trial, try_formats
from tests.support.checkpoints import tiny_llama
from tests.support.commands import CONFIG, trtpipe

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama in float32."""
    return tiny_llama(tmp_path_factory.mktemp("source") / "checkpoint")


@pytest.mark.parametrize("block_size", [32, 64, 128, 512])
@pytest.mark.parametrize("shape", [(96, 64), (3, 320), (64, 576)])
def test_nf4_is_bitsandbytes_bit_for_bit(block_size: int, shape: tuple[int, int]) -> None:
    """The formula of the paper and the library, on normal weights, outliers and zeros."""
    import torch
    from bitsandbytes import functional

    weight = np.random.default_rng(block_size).normal(size=shape).astype(np.float32)
    weight[0, :4] = (40, -40, 0, 1e-30)
    packed, state = functional.quantize_4bit(
        torch.from_numpy(weight.reshape(1, -1)), blocksize=block_size, quant_type="nf4"
    )
    made = functional.dequantize_4bit(packed, state).numpy().reshape(shape)
    assert np.array_equal(made, rounding.round_nf4(weight, block_size, double_quant=False))


def test_double_quantization_is_bitsandbytes() -> None:
    """Equal but for few scales, which the library rounds to the neighbour of the nearest 8-bit number."""
    import torch
    from bitsandbytes import functional

    weight = np.random.default_rng(2).normal(size=(256, 576)).astype(np.float32)
    packed, state = functional.quantize_4bit(
        torch.from_numpy(weight), blocksize=64, compress_statistics=True, quant_type="nf4"
    )
    made = functional.dequantize_4bit(packed, state).numpy()
    formula = rounding.round_nf4(weight, 64, double_quant=True)
    assert np.isclose(formula, made, rtol=1e-6, atol=1e-7).mean() > 0.99
    assert np.abs(formula - made).max() < rounding.TREE_STEP * np.abs(weight).max()
    np.testing.assert_allclose(rounding.dynamic_tree(), functional.create_dynamic_map().numpy(), rtol=0, atol=1e-7)


def test_a_library_that_rounds_otherwise_is_found_out(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer is compared with the formula."""
    monkeypatch.setattr(rounding, "NF4_QUANTILES", np.linspace(-1, 1, 16, dtype=np.float32))
    with pytest.raises(ToolError, match="another NF4"):
        try_formats(
            source,
            [Trial(format="nf4")],
            dtype="bfloat16",
            excluded=("lm_head",),
            limits=VerifyConfig(num_tokens=64),
            progress=Silent(),
        )


def test_fewer_bits_lose_more_and_excluded_layers_stay(source: Path) -> None:
    """Each format is scored against the 16-bit model on the same text."""
    trials = [
        Trial(format="int8_wo"),
        Trial(format="nf4"),
        Trial(format="nf4", double_quant=True),
        Trial(format="int3", block_size=32),
        Trial(format="int2", block_size=32),
    ]
    found = try_formats(
        source,
        trials,
        dtype="bfloat16",
        excluded=("lm_head", "*.down_proj"),
        limits=VerifyConfig(num_tokens=256),
        progress=Silent(),
    )
    kl = [each.scores.mean_kl for each in found]
    assert kl[0] < kl[1] < kl[3] < kl[4]
    assert kl[2] == pytest.approx(kl[1], rel=0.2)
    assert {name.rpartition(".")[2] for name in found[0].weight_error} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj")
    }


def test_blocks_that_do_not_fit_are_named_with_one_that_does(source: Path) -> None:
    """64 inputs have no groups of 128."""
    with pytest.raises(ConfigError, match="does not divide") as caught:
        try_formats(
            source,
            [Trial(format="int4_wo", block_size=96)],
            dtype="bfloat16",
            excluded=("lm_head",),
            limits=VerifyConfig(num_tokens=64),
            progress=Silent(),
        )
    assert caught.value.hint.startswith("Add --block-size")


def test_int8_is_close_to_what_verify_measures_of_the_built_format(source: Path, tmp_path: Path) -> None:
    """The command line: the probe's row, and below it the row of the checkpoint that was built before."""
    config = tmp_path / "tiny.yaml"
    config.write_text(CONFIG.format(source=source, format="int8_wo"))
    trtpipe("verify", config, cwd=tmp_path)
    artifacts = sorted(path.name for path in (tmp_path / ".trtpipe" / "objects").iterdir())
    document = trtpipe("probe", config, "--format", "int8_wo", "--format", "nf4", "--json", cwd=tmp_path).document
    (verified,) = document["verified"]
    assert [row["format"] for row in document["probed"]] == ["int8_wo", "nf4"]
    assert verified["mean_kl_nats"] == pytest.approx(document["probed"][0]["mean_kl_nats"], rel=0.3, abs=1e-5)
    assert sorted(path.name for path in (tmp_path / ".trtpipe" / "objects").iterdir()) == artifacts
    text = trtpipe("probe", config, cwd=tmp_path).stdout
    assert "nf4 (64 per scale)" in text
    assert "built, verified" in text
    assert json.loads(json.dumps(document))
