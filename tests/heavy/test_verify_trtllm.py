"""TensorRT-LLM checkpoints compute what their source computes, on any number of ranks; damage is caught and named."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pipeline.core.progress import Silent
from pipeline.errors import IntegrityError, VerificationError
from pipeline.quantize import probes
from pipeline.quantize.fake_quant import build_model
from pipeline.quantize.readers import read_quantized
from pipeline.quantize.verify import verify
from tests.support.families import copy_of, held, quantize_family, tiny_family
from tests.support.tensor_edits import edit_tensor

pytestmark = pytest.mark.heavy

LAYER = "transformer.layers.0"
# Of the recombined checkpoint's logits against the fake-quantized model that was exported, relative L2. Weight-only
# formats compute the same formula; activations that lie between two codes round differently now and then.
LOGITS_LIMIT = {"bf16": 1e-5, "fp8": 2e-2, "int8_sq": 2e-2, "int4_awq": 1e-4, "w4a8_awq": 2e-2}

HEALTHY: list[tuple[str, str, tuple[int, int], dict[str, Any]]] = [
    ("Llama", "bf16", (2, 2), {}),
    ("Llama", "fp16", (2, 1), {}),
    ("Llama", "fp8", (2, 2), {"kv_cache": "fp8"}),
    ("Llama", "int8_sq", (2, 2), {"kv_cache": "int8"}),
    ("Llama", "int4_awq", (2, 2), {}),
    ("Llama", "w4a8_awq", (2, 2), {"kv_cache": "fp8"}),
    ("Llama", "int8_wo", (2, 2), {}),
    ("Llama", "int4_wo", (2, 2), {}),
    ("Llama", "fp8", (4, 1), {}),  # more ranks than KV heads
    ("Llama", "int4_awq", (4, 1), {"group_size": 32}),
    ("Mistral", "fp8", (2, 1), {}),
    ("Qwen2", "bf16", (2, 2), {}),
    ("Qwen2", "fp8", (2, 2), {}),
    ("Qwen2", "int8_sq", (2, 1), {}),
    ("Qwen2", "w4a8_awq", (1, 2), {}),
    ("Qwen3", "fp8", (2, 1), {}),
    ("Qwen3", "int4_awq", (2, 2), {}),
    ("Gemma", "bf16", (2, 2), {}),
    ("Gemma", "fp8", (2, 2), {}),
    ("Gemma", "int8_sq", (1, 2), {}),
    ("Gemma", "int4_awq", (2, 1), {}),
    ("Phi3", "bf16", (2, 2), {}),
    ("Phi3", "int4_wo", (2, 1), {}),
    ("Mixtral", "bf16", (2, 2), {}),
    ("Mixtral", "int8_wo", (2, 1), {}),
]


@pytest.mark.parametrize(("name", "form", "ranks", "more"), HEALTHY)
def test_a_real_export_passes_on_its_ranks(
    name: str, form: str, ranks: tuple[int, int], more: dict[str, Any], tmp_path: Path
) -> None:
    """Structure, weights, recorded layers and predictions of the recombined ranks agree with the source."""
    tp, pp = ranks
    made = copy_of(name, tmp_path / "made", tp=tp, pp=pp, format=form, **more)
    verify(tiny_family(name), made, held(tiny_family(name)), out=tmp_path, progress=Silent())
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["passed"]
    assert report["format"] == form
    quantized = form not in {"bf16", "fp16", "int8_wo", "int4_wo"}
    assert report["summary"]["quantized_layers"] == (14 if quantized else 0)


@pytest.mark.parametrize("form", list(LOGITS_LIMIT))
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2)])
def test_logits_equal_those_of_the_model_that_was_exported(
    form: str, tp: int, pp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole recombined model gives what ModelOpt's fake-quantized layers, put together, gave before the export."""
    source, ids = tiny_family("Llama", dtype="bfloat16"), torch.arange(3, 67)[None]
    layers: list[torch.nn.Module] = []
    record = probes.record

    def spy(live: Any, *rest: Any) -> Any:
        layers.extend(copy.deepcopy(layer).float() for layer in live.model.layers)
        return record(live, *rest)

    monkeypatch.setattr(probes, "record", spy)
    made = quantize_family(source, tmp_path / "made", tp=tp, pp=pp, format=form)
    whole: Any = AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32).eval()
    if form != "bf16":
        assert len(layers) == len(whole.model.layers)
        whole.model.layers = torch.nn.ModuleList(layers)
    model = build_model(source.path, read_quantized(made.path), resident=True)
    with torch.no_grad():
        logits, expected = (each(ids, use_cache=False).logits for each in (model, whole))
    assert float((logits - expected).norm() / expected.norm()) < LOGITS_LIMIT[form]


@pytest.mark.parametrize(
    ("changes", "form"),
    [
        ({"tie_word_embeddings": True}, "fp8"),
        ({"attention_bias": True, "mlp_bias": True}, "int8_sq"),
        ({"vocab_size": 500}, "int4_awq"),  # padded to 512 by ModelOpt
        ({"vocab_size": 501}, "fp8"),  # padded to 502 for two ranks
    ],
)
def test_variants_of_a_llama_pass(changes: dict[str, Any], form: str, tmp_path: Path) -> None:
    """Tied head, biases and vocabularies that need padding."""
    source = tiny_family("Llama", **changes)
    made = quantize_family(source, tmp_path / "made", tp=2, pp=2, format=form)
    verify(source, made, held(source), out=tmp_path, progress=Silent())


@pytest.mark.parametrize(
    ("form", "kv_cache", "said"),
    [("int4_wo", "auto", ["the rounding to int4_wo"]), ("fp8", "fp8", ["the FP8 KV cache"]), ("fp8", "auto", [])],
)
def test_the_report_says_what_was_not_run(form: str, kv_cache: str, said: list[str], tmp_path: Path) -> None:
    """A pass must not be read as more than it is."""
    made = copy_of("Llama", tmp_path / "made", tp=2, format=form, kv_cache=kv_cache)
    verify(tiny_family("Llama"), made, held(tiny_family("Llama")), out=tmp_path, progress=Silent())
    not_run = json.loads((tmp_path / "report.json").read_text())["not_run"]
    assert [words.split(":")[0] for words in not_run] == said


def test_an_excluded_layer_stays_at_16_bit(tmp_path: Path) -> None:
    """On every pipeline rank, and the exclude list names it as the rank's own layer."""
    source = tiny_family("Llama")
    made = quantize_family(source, tmp_path / "made", pp=2, format="fp8", exclude=("lm_head", "*.down_proj"))
    verify(source, made, held(source), out=tmp_path, progress=Silent())
    excluded = json.loads((made.path / "trtllm" / "config.json").read_text())["quantization"]["exclude_modules"]
    assert "transformer.layers.0.mlp.proj" in excluded
    assert not any("layers.1" in name for name in excluded)


Damage = Callable[[Path], None]


def edited(name: str, edit: Callable[[Any], Any], rank: int = 0) -> Damage:
    """Replace a tensor of one rank."""
    return lambda directory: edit_tensor(directory / f"rank{rank}.safetensors", name, edit)


def swapped(first: str, second: str) -> Damage:
    """Exchange every tensor of two modules on rank 0."""

    def change(directory: Path) -> None:
        file = directory / "rank0.safetensors"
        names = {first: second, second: first}
        tensors = load_file(file)
        save_file(
            {re.sub(f"({first}|{second})(?=[.])", lambda m: names[m[1]], name): t for name, t in tensors.items()}, file
        )

    return change


def config_field(**fields: Any) -> Damage:
    """Overwrite fields of config.json; a dictionary is merged into the section."""

    def change(directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        for key, value in fields.items():
            config[key] = {**config[key], **value} if isinstance(value, dict) else value
        (directory / "config.json").write_text(json.dumps(config))

    return change


def key_first(weight: torch.Tensor) -> torch.Tensor:
    """Rows in the order k, q, v on a rank with 64 rows of q and 16 of k."""
    numbers = weight.view(torch.int8)
    return torch.cat([numbers[64:80], numbers[:64], numbers[80:]]).view(weight.dtype)


QKV, FC, PROJ = f"{LAYER}.attention.qkv", f"{LAYER}.mlp.fc", f"{LAYER}.mlp.proj"
GATE_PROJ, DOWN = "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.down_proj"
Q, K = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"
ATTENTION = "model.layers.1.self_attn"
KV_SCALE = "transformer.layers.1.attention.kv_cache_scaling_factor"

BROKEN: list[Any] = [
    ("fp8", GATE_PROJ, swapped(FC, f"{LAYER}.mlp.gate"), "weights are not the source's"),
    ("int4_awq", "model.layers.0.mlp.up_proj", swapped(FC, f"{LAYER}.mlp.gate"), "weights are not the source's"),
    ("bf16", GATE_PROJ, swapped(FC, f"{LAYER}.mlp.gate"), "values differ from the source"),
    ("int8_sq", K, edited(f"{QKV}.weight", key_first), "weights are not the source's"),
    ("fp8", Q, edited(f"{QKV}.weight", key_first), "weights are not the source's"),
    ("fp8", Q, edited(f"{QKV}.weights_scaling_factor", lambda s: s * 2, 1), "differs between rank 0 and rank 1"),
    ("int8_sq", DOWN, edited(f"{PROJ}.activation_scaling_factor", lambda s: s * 2, 1), "differs between rank 0"),
    ("int8_sq", Q, edited(f"{QKV}.weights_scaling_factor", lambda s: s * 2, 1), "weight_scale (64 of 128 values"),
    ("int4_awq", DOWN, edited(f"{PROJ}.weights_scaling_factor", lambda s: s * 2, 1), "256 of 512 values"),
    ("int4_awq", DOWN, edited(f"{PROJ}.prequant_scaling_factor", lambda p: p * 2, 1), "256 of 512 values"),
    ("w4a8_awq", Q, edited(f"{QKV}.weights_scaling_factor_2", lambda s: s * 3), "differs between rank 0 and rank 1"),
    ("w4a8_awq", Q, edited(f"{QKV}.weights_scaling_factor_2", lambda _s: None), "scaling_factor_2 is missing"),
    ("fp8", Q, edited(f"{QKV}.activation_scaling_factor", lambda _s: None), "rank 0: tensor"),
    ("fp8", DOWN, edited(f"{PROJ}.weight", lambda _w: None, 1), f"rank 1: tensor {PROJ}.weight is missing"),
    ("fp8", DOWN, edited(f"{PROJ}.weight", lambda w: w[:, :64], 1), "[128, 64], [128, 128] was expected"),
    ("int4_awq", Q, edited(f"{QKV}.weight", lambda w: w.view(torch.uint8)), "is U8, I8 was expected"),
    ("fp8", "lm_head", edited("lm_head.weight", lambda _w: None), "tensor lm_head.weight is missing"),
    ("fp8", "lm_head", edited("lm_head.weight", lambda w: w.roll(1, 0), 1), "values differ from the source"),
    ("fp8+kv", ATTENTION, edited(KV_SCALE, lambda _s: None), f"rank 0: tensor {KV_SCALE} is missing"),
    ("fp8+kv", ATTENTION, edited(KV_SCALE, lambda s: s / 4), "an FP8 KV scale is 0.25"),
    ("fp8+kv", "model", config_field(quantization={"kv_cache_quant_algo": None}), "is 16 bit, FP8 was asked for"),
    ("bf16", "model", config_field(quantization={"quant_algo": "W8A16"}), "is int8_wo, bf16 was asked for"),
    ("fp8", "model", config_field(rotary_base=10000.0), "rotary_base is 10000.0, the source says 50000.0"),
    ("fp8", "model", config_field(rotary_scaling=None), "rotary_scaling is None"),
    ("fp8", "model", config_field(vocab_size=1000), "vocab_size is 1000, the source says 512"),
    ("fp8", "model", config_field(attn_bias=True), "attn_bias is True, the source says False"),
    ("fp8", "model", config_field(quantization={"algorithm": "x"}), "quantization.algorithm is no field"),
    ("fp8", Q, config_field(quantization={"exclude_modules": ["lm_head", f"{LAYER}*"]}), "list says that it is not"),
]  # fmt: skip


@pytest.mark.parametrize(("form", "layer", "damage", "said"), BROKEN)
def test_damage_is_named_by_layer(form: str, layer: str, damage: Damage, said: str, tmp_path: Path) -> None:
    """Two tensor ranks; the layer is named by its Hugging Face module, the tensor by its rank."""
    word, _, kv = form.partition("+")
    made = copy_of("Llama", tmp_path / "made", tp=2, format=word, **({"kv_cache": "fp8"} if kv else {}))
    damage(made.path / "trtllm")
    with pytest.raises(VerificationError) as caught:
        verify(tiny_family("Llama"), made, held(tiny_family("Llama")), out=tmp_path, progress=Silent())
    found = {problem.where: f"{problem.message} {problem.hint}" for problem in caught.value.problems}
    assert said in found[layer], found
    assert not json.loads((tmp_path / "report.json").read_text())["passed"]


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    """The engine build stops at a bare assertion there."""
    made = copy_of("Llama", tmp_path / "made", tp=2, format="fp8")
    (made.path / "trtllm" / "rank1.safetensors").unlink()
    with pytest.raises(IntegrityError, match=r"rank1\.safetensors: its config\.json says 2 ranks"):
        verify(tiny_family("Llama"), made, held(tiny_family("Llama")), out=tmp_path, progress=Silent())


def test_layers_of_the_wrong_pipeline_rank_are_caught(tmp_path: Path) -> None:
    """Two stages exchanged."""
    made = copy_of("Llama", tmp_path / "made", pp=2, format="bf16")
    files = [made.path / "trtllm" / f"rank{rank}.safetensors" for rank in (0, 1)]
    first, second = (load_file(file) for file in files)
    for name in [name for name in first if name.startswith("transformer.layers")]:
        first[name], second[name] = second[name], first[name]
    save_file(first, files[0])
    save_file(second, files[1])
    with pytest.raises(VerificationError, match="values differ from the source"):
        verify(tiny_family("Llama"), made, held(tiny_family("Llama")), out=tmp_path, progress=Silent())


def test_copies_of_a_kv_head_must_be_equal(tmp_path: Path) -> None:
    """Four ranks and two KV heads: ranks 0 and 1 share one."""
    made = copy_of("Llama", tmp_path / "made", tp=4, format="fp8")
    edit = edited(f"{QKV}.weight", lambda w: w.view(torch.int8).roll(1, 0).view(w.dtype), 1)
    edit(made.path / "trtllm")
    with pytest.raises(VerificationError, match="share a KV head hold different keys or values"):
        verify(tiny_family("Llama"), made, held(tiny_family("Llama")), out=tmp_path, progress=Silent())


def test_a_norm_without_its_offset_is_caught(tmp_path: Path) -> None:
    """Gemma's norms are stored as 1 + weight."""
    made = copy_of("Gemma", tmp_path / "made", format="bf16")
    edited(f"{LAYER}.input_layernorm.weight", lambda w: w - 1)(made.path / "trtllm")
    with pytest.raises(VerificationError, match="input_layernorm"):
        verify(tiny_family("Gemma"), made, held(tiny_family("Gemma")), out=tmp_path, progress=Silent())


@pytest.mark.parametrize("name", ["Phi3", "Mixtral"])
def test_halves_of_a_gated_tensor_in_the_wrong_order_are_caught(name: str, tmp_path: Path) -> None:
    """The activated branch comes second."""
    made = copy_of(name, tmp_path / "made", format="bf16")
    edited(f"{FC}.weight", lambda w: w.roll(256, -2))(made.path / "trtllm")
    with pytest.raises(VerificationError, match="values differ from the source"):
        verify(tiny_family(name), made, held(tiny_family(name)), out=tmp_path, progress=Silent())
