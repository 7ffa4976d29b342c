"""A GGUF file becomes exactly the checkpoint it declares, or a BadGGUF that says why not."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipeline.checkpoints.gguf import import_gguf
from pipeline.checkpoints.gguf_file import read_gguf
from pipeline.checkpoints.gguf_layout import llama3_divisors, original_row_order
from pipeline.checkpoints.safetensors_index import read_checkpoint
from pipeline.core.progress import Silent
from pipeline.errors import BadGGUF, DiskFull, Unreadable
from tests.support.checkpoint_files import TinyGguf

pytestmark = pytest.mark.fast

Scalars = NDArray[np.float32]


def imported(tmp_path: Path, model: TinyGguf, **options: Any) -> Path:
    """Write the model, import it and return the checkpoint directory."""
    out = tmp_path / "out"
    import_gguf(model.write(tmp_path / "model.gguf"), out, Silent(), **options)
    return out


def tensor(directory: Path, name: str) -> Scalars:
    """Read one float32 tensor back."""
    entry = read_checkpoint(directory)[name]
    raw = entry.file.read_bytes()[entry.start : entry.end]
    return np.frombuffer(raw, np.float32).reshape(entry.shape)


def config(directory: Path) -> dict[str, Any]:
    """Read config.json."""
    return dict(json.loads((directory / "config.json").read_text()))


# Scalar readings of ggml's block formats, written from the format descriptions; one block -> its values.


def f16(block: bytes, at: int) -> np.float32:
    """Read a half at byte `at`."""
    return np.float32(np.frombuffer(block[at : at + 2], np.float16)[0])


def read_q4_0(block: bytes) -> list[np.float32]:
    """D * (q - 8), low nibbles first."""
    d, q = f16(block, 0), block[2:]
    return [d * np.float32((b & 15) - 8) for b in q] + [d * np.float32((b >> 4) - 8) for b in q]


def read_q4_1(block: bytes) -> list[np.float32]:
    """D * q + m, low nibbles first."""
    d, m, q = f16(block, 0), f16(block, 2), block[4:]
    return [d * np.float32(b & 15) + m for b in q] + [d * np.float32(b >> 4) + m for b in q]


def read_q8_0(block: bytes) -> list[np.float32]:
    """D * q with signed bytes."""
    return [f16(block, 0) * np.float32(q) for q in np.frombuffer(block[2:], np.int8)]


def read_q4_k(block: bytes) -> list[np.float32]:
    """Eight groups of 32 with six-bit scales and minima packed in twelve bytes."""
    d, low, packed, q = f16(block, 0), f16(block, 2), block[4:16], block[16:]

    def scale_and_min(j: int) -> tuple[int, int]:
        if j < 4:
            return packed[j] & 63, packed[j + 4] & 63
        return (packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4, (packed[j + 4] >> 4) | (packed[j] >> 6) << 4

    values: list[np.float32] = []
    for group in range(8):
        scale, minimum = scale_and_min(group)
        part = q[group // 2 * 32 : group // 2 * 32 + 32]
        nibbles = [b >> 4 if group % 2 else b & 15 for b in part]
        values += [d * np.float32(scale) * np.float32(n) - low * np.float32(minimum) for n in nibbles]
    return values


def read_q6_k(block: bytes) -> list[np.float32]:
    """Sixteen groups of 16 with signed scales; low four and high two bits apart."""
    low, high, scales, d = block[:128], block[128:192], np.frombuffer(block[192:208], np.int8), f16(block, 208)
    values = [np.float32(0)] * 256
    for half in range(2):
        for at in range(32):
            for part in range(4):
                nibble = low[64 * half + at + 32 * (part % 2)] >> (4 if part >= 2 else 0) & 15
                q = (nibble | (high[32 * half + at] >> (2 * part) & 3) << 4) - 32
                scale = np.float32(scales[8 * half + at // 16 + 2 * part])
                values[128 * half + at + 32 * part] = d * scale * np.float32(q)
    return values


@pytest.mark.parametrize(
    ("kind", "block", "halves", "read"),
    [
        (GGMLQuantizationType.Q4_0, 18, (0,), read_q4_0),
        (GGMLQuantizationType.Q4_1, 20, (0, 2), read_q4_1),
        (GGMLQuantizationType.Q8_0, 34, (0,), read_q8_0),
        (GGMLQuantizationType.Q4_K, 144, (0, 2), read_q4_k),
        (GGMLQuantizationType.Q6_K, 210, (208,), read_q6_k),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_blocks_are_dequantized_by_ggmls_formula(
    tmp_path: Path,
    kind: GGMLQuantizationType,
    block: int,
    halves: tuple[int, ...],
    read: Callable[[bytes], list[np.float32]],
) -> None:
    """Every value of random blocks equals the scalar reading, bit for bit."""
    model = TinyGguf(hidden=256, heads=4, kv_heads=2)
    per_row = 256 // len(read(bytes(block)))
    random = np.random.default_rng(1)
    packed = random.integers(0, 256, (128, per_row, block), dtype=np.uint8)
    for at in halves:
        packed[..., at : at + 2] = random.standard_normal((128, per_row, 1)).astype(np.float16).view(np.uint8)
    model.tensors["blk.0.attn_v.weight"] = packed.reshape(128, per_row * block)
    model.packed["blk.0.attn_v.weight"] = kind
    got = tensor(imported(tmp_path, model), "model.layers.0.self_attn.v_proj.weight")
    wanted = np.array([read(bytes(one)) for one in packed.reshape(-1, block)], np.float32).reshape(128, 256)
    assert got.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("kind", [GGMLQuantizationType.F16, GGMLQuantizationType.BF16])
def test_sixteen_bit_weights_are_widened_without_loss(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    """A half or bfloat16 value is the same number in float32."""
    from gguf import quants

    model = TinyGguf()
    exact = quants.dequantize(quants.quantize(model.tensors["output_norm.weight"].reshape(1, -1), kind), kind)
    model.tensors["output_norm.weight"] = quants.quantize(exact, kind).reshape(-1)
    model.packed["output_norm.weight"] = kind
    assert np.array_equal(tensor(imported(tmp_path, model), "model.norm.weight"), exact.reshape(-1))


@given(heads=st.integers(1, 8), half=st.integers(1, 16), position=st.integers(0, 500), seed=st.integers(0, 99))
def test_row_order_gives_the_same_attention_under_both_rope_layouts(
    heads: int, half: int, position: int, seed: int
) -> None:
    """Rotating neighbours of the stored rows scores as rotating halves of the reordered rows does."""
    random = np.random.default_rng(seed)
    angles = position * 10000.0 ** (-np.arange(half) / half)
    cos, sin = np.cos(angles), np.sin(angles)
    query, key = random.standard_normal((2, heads * 2 * half))
    order = original_row_order(heads * 2 * half, heads)

    def neighbours(rows: NDArray[np.float64]) -> NDArray[np.float64]:
        even, odd = rows.reshape(heads, half, 2)[..., 0], rows.reshape(heads, half, 2)[..., 1]
        rotated = np.stack([even * cos - odd * sin, even * sin + odd * cos], -1)
        return np.asarray(rotated.reshape(heads, -1), np.float64)

    def halves(rows: NDArray[np.float64]) -> NDArray[np.float64]:
        first, second = rows.reshape(heads, 2, half)[:, 0], rows.reshape(heads, 2, half)[:, 1]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    stored = (neighbours(query) * key.reshape(heads, -1)).sum(-1)
    original = (halves(query[order]) * key[order].reshape(heads, -1)).sum(-1)
    assert np.allclose(stored, original)


def test_only_query_and_key_rows_are_reordered(tmp_path: Path) -> None:
    """The other matrices keep the rows of the file."""
    model = TinyGguf()
    out = imported(tmp_path, model)
    assert np.array_equal(tensor(out, "model.layers.0.self_attn.v_proj.weight"), model.tensors["blk.0.attn_v.weight"])
    assert np.array_equal(
        tensor(out, "model.layers.0.self_attn.k_proj.weight"),
        model.tensors["blk.0.attn_k.weight"][original_row_order(16, 2)],
    )


def test_config_holds_what_the_metadata_says(tmp_path: Path) -> None:
    """Sizes, rope base, epsilon and ids come from the file; absent output.weight means tied embeddings."""
    found = config(imported(tmp_path, TinyGguf()))
    wanted = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": 8,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "bos_token_id": 1,
    }
    assert {key: found[key] for key in wanted} == wanted


def test_an_output_matrix_makes_an_untied_lm_head(tmp_path: Path) -> None:
    """output.weight becomes lm_head.weight."""
    model = TinyGguf()
    model.tensors["output.weight"] = np.ones((8, 32), np.float32)
    out = imported(tmp_path, model)
    assert config(out)["tie_word_embeddings"] is False
    assert np.array_equal(tensor(out, "lm_head.weight"), model.tensors["output.weight"])


def test_llama_3_rope_factors_become_its_parameters(tmp_path: Path) -> None:
    """The stored divisors identify the published scaling."""
    model = TinyGguf()
    model.metadata["llama.rope.freq_base"] = 500000.0
    model.tensors["rope_freqs.weight"] = llama3_divisors(500000.0, 8, 32.0).astype(np.float32)
    scaling = config(imported(tmp_path, model))["rope_scaling"]
    assert (scaling["rope_type"], scaling["factor"]) == ("llama3", 32.0)


def test_unknown_rope_factors_are_refused(tmp_path: Path) -> None:
    """Divisors of no published model are not approximated."""
    model = TinyGguf()
    model.tensors["rope_freqs.weight"] = np.array([1, 2, 3, 5], np.float32)
    with pytest.raises(BadGGUF, match="rope factors"):
        imported(tmp_path, model)


def test_stop_ids_include_the_declared_end_of_turn(tmp_path: Path) -> None:
    """generation_config.json lists eos and eot."""
    model = TinyGguf()
    model.metadata["tokenizer.ggml.eos_token_id"] = 0
    model.metadata["tokenizer.ggml.eot_token_id"] = 2
    out = imported(tmp_path, model)
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [0, 2]


def test_stop_ids_include_the_end_of_turn_of_the_chat_template(tmp_path: Path) -> None:
    """A file that declares only the base model's eos still stops after an answer."""
    model = TinyGguf()
    model.metadata["tokenizer.ggml.eos_token_id"] = 0
    out = imported(tmp_path, model)
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [0, 2]


def test_two_imports_write_the_same_bytes(tmp_path: Path) -> None:
    """Nothing but the file decides the output."""
    file = TinyGguf().write(tmp_path / "model.gguf")
    for name in ("one", "two"):
        import_gguf(file, tmp_path / name, Silent())
    one, two = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("one", "two"))
    assert one == two
    assert "model.safetensors" in one


def test_shards_hold_every_tensor_once(tmp_path: Path) -> None:
    """A small shard size splits the file without changing a tensor."""
    whole = imported(tmp_path, TinyGguf())
    parts = tmp_path / "parts"
    import_gguf(tmp_path / "model.gguf", parts, Silent(), shard_bytes=8000)
    assert len(list(parts.glob("model-*.safetensors"))) > 2
    assert read_checkpoint(parts).keys() == read_checkpoint(whole).keys()
    for name in read_checkpoint(whole):
        assert np.array_equal(tensor(parts, name), tensor(whole, name))


def test_a_file_cut_at_any_header_byte_is_refused(tmp_path: Path) -> None:
    """No truncation of the header escapes as anything but BadGGUF."""
    file = TinyGguf().write(tmp_path / "model.gguf")
    content = file.read_bytes()
    first_tensor = min(entry.offset for entry in read_gguf(file).tensors.values())
    cut = tmp_path / "cut.gguf"
    for length in range(first_tensor + 1):
        cut.write_bytes(content[:length])
        with pytest.raises(BadGGUF):
            read_gguf(cut)


def test_a_flipped_header_byte_is_refused_or_harmless(tmp_path: Path) -> None:
    """Any one damaged header byte gives BadGGUF or a checkpoint, never another error."""
    file = TinyGguf().write(tmp_path / "model.gguf")
    content = bytearray(file.read_bytes())
    first_tensor = min(entry.offset for entry in read_gguf(file).tensors.values())
    damaged = tmp_path / "damaged.gguf"
    refused = 0
    for at in range(first_tensor):
        mask = 0xFF if at % 2 else 1 << at // 2 % 8
        content[at] ^= mask
        damaged.write_bytes(content)
        content[at] ^= mask
        try:
            import_gguf(damaged, tmp_path / "out", Silent())
        except BadGGUF:
            refused += 1
    assert refused > first_tensor // 2


def test_a_missing_tail_is_named_with_its_tensor(tmp_path: Path) -> None:
    """Truncated weights name the tensor that is cut."""
    file = TinyGguf().write(tmp_path / "model.gguf")
    file.write_bytes(file.read_bytes()[:-64])
    with pytest.raises(BadGGUF, match=r"tensor 'blk\.0\.ffn_down\.weight' ends at byte .* truncated"):
        read_gguf(file)


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (b"", "not a GGUF file"),
        (b"PK\x03\x04" + bytes(60), "not a GGUF file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "at byte 4: version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "at byte 8: tensor count"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "at byte 16: metadata count"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62) + bytes(8), "needs 4611686018427387904 bytes"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 99) + bytes(8), "value type 99"),
    ],
)
def test_a_foreign_or_broken_start_says_what_was_expected(tmp_path: Path, start: bytes, words: str) -> None:
    """Each kind of wrong header has its own words, with the offset."""
    file = tmp_path / "model.gguf"
    file.write_bytes(start)
    with pytest.raises(BadGGUF, match=words):
        read_gguf(file)


def test_an_unknown_tensor_type_is_named(tmp_path: Path) -> None:
    """A type that cannot be dequantized exactly is refused with the list of those that can."""
    model = TinyGguf()
    model.tensors["blk.0.attn_v.weight"] = np.zeros((16, 32), np.int8)
    file = model.write(tmp_path / "model.gguf")
    with pytest.raises(BadGGUF, match=r"tensor 'blk\.0\.attn_v\.weight' has type 24, .*Q4_1"):
        read_gguf(file)


@pytest.mark.parametrize(
    "key",
    [
        "llama.block_count",
        "llama.context_length",
        "llama.attention.head_count",
        "llama.attention.layer_norm_rms_epsilon",
        "tokenizer.ggml.model",
    ],
)
def test_a_missing_metadata_key_is_named(tmp_path: Path, key: str) -> None:
    """What the model cannot be built without is asked for by name."""
    model = TinyGguf()
    del model.metadata[key]
    with pytest.raises(BadGGUF, match=f"metadata key '{key}' is missing"):
        imported(tmp_path, model)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    """A layer without one of its matrices is refused."""
    model = TinyGguf()
    del model.tensors["blk.0.ffn_up.weight"]
    with pytest.raises(BadGGUF, match=r"tensor 'blk\.0\.ffn_up\.weight' is missing"):
        imported(tmp_path, model)


def test_a_tensor_without_a_place_is_named(tmp_path: Path) -> None:
    """A tensor that the model would ignore is refused."""
    model = TinyGguf()
    model.tensors["blk.0.attn_sinks.weight"] = np.zeros(4, np.float32)
    with pytest.raises(BadGGUF, match=r"tensor 'blk\.0\.attn_sinks\.weight' has no place"):
        imported(tmp_path, model)


def test_a_wrong_shape_is_named(tmp_path: Path) -> None:
    """A matrix that does not fit the metadata is refused with both shapes."""
    model = TinyGguf()
    model.tensors["blk.0.attn_k.weight"] = np.zeros((32, 32), np.float32)
    with pytest.raises(BadGGUF, match=r"attn_k\.weight' has shape \[32, 32\], expected \[16, 32\]"):
        imported(tmp_path, model)


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    """NaN in the weights names the tensor."""
    model = TinyGguf()
    model.tensors["blk.0.attn_v.weight"][3, 3] = np.nan
    with pytest.raises(BadGGUF, match=r"attn_v\.weight' holds values that are not finite"):
        imported(tmp_path, model)


def test_an_unsupported_architecture_is_refused_by_name(tmp_path: Path) -> None:
    """The message lists what is supported."""
    model = TinyGguf()
    model.architecture = "mamba"
    with pytest.raises(BadGGUF, match=r"architecture 'mamba' is not supported\. Supported: llama, qwen2, qwen3"):
        imported(tmp_path, model)


def test_mixtures_of_experts_are_refused_by_name(tmp_path: Path) -> None:
    """Mixtral says llama and expert_count."""
    model = TinyGguf()
    model.metadata["llama.expert_count"] = 8
    with pytest.raises(BadGGUF, match="mixture-of-experts"):
        imported(tmp_path, model)


def test_an_unreadable_file_is_said_to_be(tmp_path: Path) -> None:
    """A path that cannot be opened as a file is Unreadable, not a traceback."""
    with pytest.raises(Unreadable, match="cannot be read"):
        read_gguf(tmp_path)


def test_a_full_disk_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The room for the float32 weights is checked before anything is written."""
    file = TinyGguf().write(tmp_path / "model.gguf")
    monkeypatch.setattr("shutil.disk_usage", lambda _path: type("Usage", (), {"free": 0, "total": 1, "used": 1})())
    with pytest.raises(DiskFull):
        import_gguf(file, tmp_path / "out", Silent())
    assert not list((tmp_path / "out").iterdir())
