"""What a checkpoint made elsewhere is in our words, what is refused, and what a config may say about it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.checkpoints.packed import unpacked
from pipeline.checkpoints.safetensors_index import read_checkpoint
from pipeline.config import elsewhere
from pipeline.config.load import load
from pipeline.errors import ConfigError
from pipeline.quantize.foreign.convert import identify
from tests.support import foreign

pytestmark = pytest.mark.fast

ROWS, COLUMNS = 16, 128
RNG = np.random.default_rng(1)
WEIGHT = RNG.standard_normal((ROWS, COLUMNS))
CODES = RNG.integers(0, 0x7E, (ROWS, COLUMNS), np.uint8)
ONE = np.array(0.5, np.float32)
FP8 = {"quant_method": "fp8", "activation_scheme": "static"}


def _int(bits: int, group_size: int, *, symmetric: bool = True) -> foreign.Rounded:
    return foreign.round_matrix(WEIGHT, bits=bits, group_size=group_size, symmetric=symmetric)


def _packed_config(bits: int, strategy: str = "group") -> dict[str, Any]:
    groups = foreign.config_groups(bits, strategy=strategy, group_size=None)
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


CONVERTED = [
    (foreign.AWQ_CONFIG, foreign.awq("a", _int(4, 64)), ("int4_wo", 64)),
    (foreign.AWQ_CONFIG, foreign.awq("a", _int(4, 64, symmetric=False)), ("int4_wo", 64)),
    (foreign.GPTQ_CONFIG, foreign.gptq("a", _int(4, 32)), ("int4_wo", 32)),
    (foreign.GPTQ_CONFIG | {"bits": 8}, foreign.gptq("a", _int(8, COLUMNS)), ("int8_wo", None)),
    (_packed_config(4), foreign.packed("a", _int(4, 128)), ("int4_wo", 128)),
    (_packed_config(8, "channel"), foreign.packed("a", _int(8, COLUMNS)), ("int8_wo", None)),
    (FP8, {"a.weight": CODES, "a.weight_scale": ONE, "a.input_scale": ONE}, ("fp8", None)),
    (
        {"quant_method": "fp8"},
        {"a.weight": CODES, "a.weight_scale": np.full((ROWS, 1), 0.5, np.float32)},
        ("fp8_rowwise", None),
    ),
]


@pytest.mark.parametrize(("config", "tensors", "expected"), CONVERTED)
def test_what_a_layout_holds_exactly_has_a_format(
    tmp_path: Path, config: dict[str, Any], tensors: foreign.Tensors, expected: tuple[str, int | None]
) -> None:
    """The format's name and its group size."""
    made = identify(foreign.write_layers(tmp_path, config, tensors, float8=("a.weight",)))
    assert (made.format, made.group_size) == expected


_UNEQUAL = np.minimum(np.arange(COLUMNS) // 31, 3)
REFUSED = [
    (
        foreign.GPTQ_CONFIG | {"bits": 8},
        foreign.gptq("a", _int(8, COLUMNS, symmetric=False)),
        "zero points",
        "zero_point: false",
    ),
    (
        foreign.GPTQ_CONFIG,
        foreign.gptq("a", foreign.round_matrix(WEIGHT, bits=4, group_size=32, symmetric=True, group_of=_UNEQUAL)),
        "unequal size",
        "desc_act: false",
    ),
    (foreign.GPTQ_CONFIG | {"bits": 8}, foreign.gptq("a", _int(8, 32)), "int8 in groups of 32", "16-bit checkpoint"),
    (_packed_config(4), foreign.packed("a", _int(4, 16)), "one scale per 16 inputs", "16-bit checkpoint"),
    (
        {"quant_method": "fp8", "weight_block_size": [8, 64]},
        {"a.weight": CODES, "a.weight_scale_inv": np.ones((2, 2), np.float32)},
        "scale per block",
        "per tensor",
    ),
    (FP8, {"a.weight": CODES, "a.weight_scale": ONE}, "scaled at run time", "static activations"),
]


@pytest.mark.parametrize(("config", "tensors", "said", "hint"), REFUSED)
def test_what_would_have_to_be_rounded_again_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any], tensors: foreign.Tensors, said: str, hint: str
) -> None:
    """The layer, the reason and what to do."""
    foreign.write_layers(tmp_path, config, tensors, float8=("a.weight",))
    with pytest.raises(ConfigError) as caught:
        identify(tmp_path)
    assert said in str(caught.value)
    assert "a: " in str(caught.value)
    assert hint in str(caught.value)


@pytest.mark.parametrize(("config", "tensors"), [(config, tensors) for config, tensors, _ in CONVERTED])
def test_headers_give_the_shapes_of_the_16_bit_model(
    tmp_path: Path, config: dict[str, Any], tensors: foreign.Tensors
) -> None:
    """Packed words become (out, in), and what lies beside the weight is gone."""
    foreign.write_layers(tmp_path, config, tensors, float8=("a.weight",))
    entries = unpacked(read_checkpoint(tmp_path), {"quantization_config": config})
    assert {name: entry.shape for name, entry in entries.items()} == {"a.weight": (ROWS, COLUMNS)}


@dataclass(frozen=True)
class _Made:
    method: str = "GPTQ v1"
    format: str = "int4_wo"
    group_size: int | None = 64
    dtype: str = "float16"
    passed_on: bool = False
    note: str = ""


def _loaded(directory: Path, text: str) -> Any:
    (directory / "source").mkdir()
    file = directory / "config.yaml"
    file.write_text(f"name: a\nsource:\n  path: {directory / 'source'}\n{text}")
    return load(file)


def test_an_empty_config_takes_what_the_checkpoint_is(tmp_path: Path) -> None:
    """Format, group size and dtype are facts of the checkpoint."""
    loaded = _loaded(tmp_path, "")
    assert not list(elsewhere.check(loaded.config, _Made(), loaded.provenance))
    config = elsewhere.adopt(loaded.config, _Made())
    assert (config.quantization.format, config.quantization.group_size) == ("int4_wo", 64)
    assert config.engine.dtype == "float16"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("quantization:\n  format: int8_sq\n", "int8_sq was asked for, and the checkpoint is int4_wo already"),
        ("quantization:\n  format: int4_wo\n  group_size: 32\n", "32 was asked for, and the checkpoint is 64"),
        ("engine:\n  dtype: bfloat16\n", "the checkpoint is float16 already"),
        ("quality:\n  max_kl: 0.1\n", "quality gate"),
    ],
)
def test_a_key_that_contradicts_the_checkpoint_is_named(tmp_path: Path, text: str, said: str) -> None:
    """One problem, for the key that was written."""
    loaded = _loaded(tmp_path, text)
    problems = list(elsewhere.check(loaded.config, _Made(), loaded.provenance))
    assert [said in str(problem) for problem in problems] == [True]


def test_a_key_that_repeats_what_the_checkpoint_is_is_allowed(tmp_path: Path) -> None:
    """Naming the format is as good as leaving it out."""
    loaded = _loaded(tmp_path, "quantization:\n  format: int4_wo\n  group_size: 64\n")
    assert not list(elsewhere.check(loaded.config, _Made(), loaded.provenance))
