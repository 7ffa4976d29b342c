"""Every kind of damage to a real export is caught, its layer named and its cause found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.config.schema import Format
from pipeline.core.progress import Silent
from pipeline.errors import BadSafetensors, VerificationError
from pipeline.quantize.reference import pack_int4, unpack_int4
from pipeline.quantize.verify import verify
from tests.support.quantized import held_text, tiny_quantized, tiny_source
from tests.support.tensor_edits import edit_tensor

pytestmark = pytest.mark.heavy

Q = "model.layers.1.self_attn.q_proj"
O = "model.layers.0.self_attn.o_proj"  # noqa: E741 - the projection's name
DOWN = "model.layers.0.mlp.down_proj"
NORM = "model.layers.1.input_layernorm"


def findings(format_: Format, tmp_path: Path, damage: Callable[[Path], None]) -> dict[str, str]:
    """Damage a fresh copy and return what verification says: layer -> message and cause."""
    quantized = tiny_quantized(format_, tmp_path / "quantized")
    damage(quantized.path / "hf")
    with pytest.raises(VerificationError) as caught:
        verify(tiny_source(), quantized, held_text(), out=tmp_path, progress=Silent())
    assert not json.loads((tmp_path / "report.json").read_text())["passed"]
    return {problem.where: f"{problem.message} {problem.hint}" for problem in caught.value.problems}


def edited(name: str, edit: Callable[[Any], Any]) -> Callable[[Path], None]:
    """A damage: replace one tensor of model.safetensors."""
    return lambda directory: edit_tensor(directory / "model.safetensors", name, edit)


def transpose_square(weight: torch.Tensor) -> torch.Tensor:
    """Exchange rows and columns in a 16 x 16 block of codes."""
    changed = weight.view(torch.int8).clone()
    changed[16:32, 32:48] = weight.view(torch.int8)[16:32, 32:48].T
    return changed.view(weight.dtype)


def transpose_unpacked(weight: torch.Tensor) -> torch.Tensor:
    """The same on int4 numbers."""
    numbers = unpack_int4(weight.numpy())
    numbers[16:32, 32:48] = numbers[16:32, 32:48].T.copy()
    return torch.from_numpy(pack_int4(numbers))


def swap_two_rows(weight: torch.Tensor) -> torch.Tensor:
    """Exchange rows 3 and 40 of codes."""
    order = torch.arange(len(weight))
    order[3], order[40] = 40, 3
    return weight.view(torch.int8)[order].view(weight.dtype)


def at(index: tuple[int, ...], value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Set one element."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor[index] = value
        return tensor

    return change


CASES: list[Any] = [
    ("fp8", Q, edited(f"{Q}.weight_scale", lambda s: s * 2), "weight_scale (the scalar) times 0.5 "),
    ("int8_sq", Q, edited(f"{Q}.weight_scale", lambda s: s * 2), "weight_scale (128 of 128 values, first at [0])"),
    ("int4_awq", Q, edited(f"{Q}.weight_scale", lambda s: s * 2), "times 0.5 "),
    ("int8_sq", Q, edited(f"{Q}.weight_scale", at((7,), 1.0)), "weight_scale (1 of 128 values, first at [7])"),
    ("int4_awq", Q, edited(f"{Q}.weight_scale", at((7, 1), 1.0)), "weight_scale (1 of 256 values, first at [7, 1])"),
    ("int8_sq", Q, edited(f"{Q}.weight_scale", torch.ones_like), "scale not applied"),
    ("fp8", Q, edited(f"{Q}.weight_scale", lambda s: s * 0), "corrupted scale"),
    ("int8_sq", Q, edited(f"{Q}.weight_scale", at((0,), float("nan"))), "corrupted scale"),
    ("int8_sq", Q, edited(f"{Q}.weight_scale", lambda s: -s), "corrupted scale"),
    ("int8_sq", Q, edited(f"{Q}.input_scale", lambda s: s * 2), "input_scale times 0.5 repairs"),
    ("int8_sq", Q, edited(f"{Q}.input_scale", lambda s: s * 4), "input_scale times 0.25 repairs"),
    ("fp8", Q, edited(f"{Q}.input_scale", lambda s: s / 64), "input_scale times"),
    ("int4_awq", Q, edited(f"{Q}.weight", lambda w: (w << 4) | (w >> 4)), "swapped nibble order"),
    ("fp8_rowwise", Q, edited(f"{Q}.weight_scale", at((7,), 1e-3)), "weight_scale"),
    ("fp8_rowwise", Q, edited(f"{Q}.weight", swap_two_rows), "permuted rows: row 40 of the file is row 3"),
    ("fp8", Q, edited(f"{Q}.weight", transpose_square), "transposed block: rows 16 to 31, columns 32 to 47"),
    ("int8_sq", Q, edited(f"{Q}.weight", transpose_square), "transposed block: rows 16 to 31, columns 32 to 47"),
    ("int4_awq", Q, edited(f"{Q}.weight", transpose_square), "transposed block"),
    ("int4_awq", Q, edited(f"{Q}.weight", transpose_unpacked), "transposed block: rows 16 to 31, columns 32 to 47"),
    ("fp8", Q, edited(f"{Q}.weight", lambda w: w.T), "transposed block: rows 0 to 127, columns 0 to 127"),
    ("fp8", Q, edited(f"{Q}.weight", swap_two_rows), "permuted rows: row 40 of the file is row 3"),
    ("int8_sq", Q, edited(f"{Q}.weight", swap_two_rows), "permuted rows: row 40 of the file is row 3"),
    ("fp8", Q, edited(f"{Q}.weight", lambda w: at((5, 9), 0x7F)(w.view(torch.uint8)).view(w.dtype)), "not finite"),
    ("int8_sq", Q, edited(f"{Q}.weight", lambda w: w.roll(64, 0)), "permuted rows"),
    ("int8_sq", Q, edited(f"{Q}.weight", at((5, 9), 100)), "rows 5 to 5, columns 9 to 9"),
    ("int8_sq", O, edited(f"{O}.pre_quant_scale", lambda p: 1 / p), "pre-quant scale inverted"),
    ("int4_awq", O, edited(f"{O}.pre_quant_scale", at((17,), 9.0)), "pre-quant scale wrong: 1 inputs, first 17"),
    ("int4_awq", DOWN, edited(f"{DOWN}.pre_quant_scale", lambda p: 1 / p), "pre-quant scale inverted"),
    ("int4_awq", DOWN, edited(f"{DOWN}.pre_quant_scale", lambda _p: None), "pre-quant scale missing"),
    ("int8_sq", DOWN, edited(f"{DOWN}.pre_quant_scale", lambda _p: None), "is missing"),
    ("int4_awq", Q, edited(f"{NORM}.weight", at((3,), 9.0)), "pre-quant scale wrong: 1 inputs, first 3"),
    ("fp8", NORM, edited(f"{NORM}.weight", at((3,), 9.0)), "1 of 128 values differ"),
    ("int4_awq", NORM, edited(f"{NORM}.weight", at((3,), -1.0)), "not finite and positive"),
    ("fp8", "lm_head", edited("lm_head.weight", at((3, 4), float("nan"))), "1 of 65536 values differ"),
    ("bf16", Q, edited(f"{Q}.weight", lambda w: w.T), "the tensor is transposed"),
    ("bf16", Q, edited(f"{Q}.weight", lambda w: w.half()), "is F16, BF16 was expected"),
    ("fp8", Q, edited(f"{Q}.weight", lambda _w: None), "tensor model.layers.1.self_attn.q_proj.weight is missing"),
    ("int8_wo", Q, edited(f"{Q}.weight_scale", at((7,), 1.0)), "weight_scale (1 of 128 values, first at [7])"),
    ("int8_wo", Q, edited(f"{Q}.weight", transpose_square), "transposed block: rows 16 to 31, columns 32 to 47"),
    ("int8_wo", NORM, edited(f"{NORM}.weight", at((3,), 9.0)), "1 of 128 values differ"),
    ("int4_wo", Q, edited(f"{Q}.weight_scale", at((7, 1), 1.0)), "weight_scale (1 of 256 values, first at [7, 1])"),
    ("int4_wo", Q, edited(f"{Q}.weight", lambda w: (w << 4) | (w >> 4)), "swapped nibble order"),
    ("int4_wo", Q, edited(f"{Q}.weight_scale", lambda s: s[:, :1]), "wrong group size: 64 is declared"),
    ("int4_wo", NORM, edited(f"{NORM}.weight", at((3,), 9.0)), "1 of 128 values differ"),
    ("fp8", Q, edited(f"{Q}.input_scale", lambda _s: None), "input_scale is missing"),
    ("fp8", Q, edited(f"{Q}.weight", lambda w: w.to(torch.bfloat16)), "is BF16, F8_E4M3 was expected"),
    ("int8_sq", Q, edited(f"{Q}.weight_scale", lambda s: s.double().to(torch.float16)), "is F16, F32 was expected"),
    ("int4_awq", Q, edited(f"{Q}.weight_scale", lambda s: s[:, :1]), "wrong group size: 64 is declared"),
    ("int8_sq", Q, edited(f"{Q}.weight_scale", lambda s: s[:-1]), "[127], [128] was expected"),
]  # fmt: skip


@pytest.mark.parametrize(("format_", "layer", "damage", "said"), CASES)
def test_damage_is_named_by_layer_with_its_cause(
    format_: Format, layer: str, damage: Callable[[Path], None], said: str, tmp_path: Path
) -> None:
    """The damaged layer is named, with the change that would repair it."""
    found = findings(format_, tmp_path, damage)
    assert said in found[layer], found


def test_only_the_damaged_layer_is_named(tmp_path: Path) -> None:
    """A healthy layer next to a broken one is not accused."""
    found = findings("int8_sq", tmp_path, edited(f"{Q}.weight_scale", lambda s: s * 2))
    assert set(found) == {Q}


def test_a_tensor_of_no_layer_is_named(tmp_path: Path) -> None:
    """A tensor that the source and the format do not explain is reported by name."""

    def add(directory: Path) -> None:
        edit_tensor(directory / "model.safetensors", "model.norm.weight", lambda w: w)
        from safetensors.torch import load_file, save_file

        tensors = load_file(directory / "model.safetensors")
        save_file(tensors | {"model.stray.weight": torch.ones(2)}, directory / "model.safetensors")

    assert "model.stray.weight belongs to no layer" in findings("fp8", tmp_path, add)["model.stray"]


def test_changed_rope_base_is_named(tmp_path: Path) -> None:
    """A config field that an engine reads must be the source's."""

    def change(directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | {"rope_theta": 10000.0}))

    assert "rope_theta is 10000.0, the source says 100000.0" in findings("fp8", tmp_path, change)["model"]


def test_exclude_list_that_contradicts_the_tensors_is_named(tmp_path: Path) -> None:
    """An over-broad exclude pattern would make an engine load codes as 16-bit weights."""

    def change(directory: Path) -> None:
        file = directory / "hf_quant_config.json"
        config = json.loads(file.read_text())
        config["quantization"]["exclude_modules"].append("model.layers.1*")
        file.write_text(json.dumps(config))

    assert "exclude list too wide" in findings("fp8", tmp_path, change)[Q]


def test_truncated_shard_is_an_integrity_error(tmp_path: Path) -> None:
    """A shard that ends early is refused with its name and both sizes."""
    quantized = tiny_quantized("fp8", tmp_path / "quantized")
    file = quantized.path / "hf" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(BadSafetensors, match=r"model\.safetensors is truncated: \d+ bytes, its tensors need \d+"):
        verify(tiny_source(), quantized, held_text(), out=tmp_path, progress=Silent())
