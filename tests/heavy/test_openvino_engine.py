"""The OpenVINO engine holds ModelOpt's own integers and computes what the dequantized model computes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.config.deployment import EngineConfig
from pipeline.config.schema import CalibrationConfig, QuantizationConfig
from pipeline.core.artifacts import QuantizedCheckpoint, SourceCheckpoint
from pipeline.core.progress import Silent
from pipeline.errors import IntegrityError, ToolError
from pipeline.quantize.formats import WantedCheckpoint
from pipeline.targets.openvino import compile_engine, describe
from pipeline.targets.openvino import graph as openvino_graph
from pipeline.targets.openvino.choices import EXACT_PROPERTIES
from pipeline.targets.openvino.weights import Checkpoint
from tests.support.checkpoints import tiny_llama
from tests.support.making import make_quantized

pytestmark = pytest.mark.heavy

FORMATS = ("bf16", "fp8", "fp8_rowwise", "int8_sq", "int8_wo", "int4_awq", "int4_wo", "mixed")
QUANTIZED = FORMATS[1:]
# A format for each kind of layer, and two layers at 16 bit.
MIXED = {
    "format": "int4_awq",
    "overrides": (
        {"layers": "*.self_attn", "format": "int8_sq"},
        {"layers": "model.layers.0.self_attn", "format": "fp8"},
        {"layers": "*.down_proj", "format": "int8_wo"},
        {"layers": "model.layers.1.mlp.[gu]*_proj", "format": "int4_wo"},
        {"layers": "model.layers.1.mlp.down_proj", "format": "bf16"},
        {"layers": "model.layers.1.self_attn.o_proj", "format": "bf16"},
    ),
}
CODES = {"fp8": "f8e4m3", "fp8_rowwise": "f8e4m3", "int8_sq": "i8", "int8_wo": "i8", "int4_awq": "i4", "int4_wo": "i4"}
Fixture = Callable[[str], Any]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> SourceCheckpoint:
    """A tiny Llama with random weights."""
    path = tiny_llama(tmp_path_factory.mktemp("source") / "tiny", hidden_size=128)
    return SourceCheckpoint(path=path, digest="sha256:" + "0" * 64)


@pytest.fixture(scope="module")
def quantized(source: SourceCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Fixture:
    """Quantize to a format, once."""
    made: dict[str, QuantizedCheckpoint] = {}

    def make(name: str) -> QuantizedCheckpoint:
        if name not in made:
            out = tmp_path_factory.mktemp("quantized") / name
            make_quantized(
                source,
                QuantizationConfig.model_validate(
                    {**(MIXED if name == "mixed" else {"format": name}), "group_size": 64}
                ),
                CalibrationConfig(num_samples=4, max_seq_len=32, batch_size=2),
                WantedCheckpoint(export="hf"),
                out,
            )
            made[name] = QuantizedCheckpoint(path=out, digest="sha256:" + "1" * 64)
        return made[name]

    return make


@pytest.fixture(scope="module")
def engine(quantized: Fixture, tmp_path_factory: pytest.TempPathFactory) -> Fixture:
    """Compile a format, once."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            out = tmp_path_factory.mktemp("engine") / name
            compile_engine(quantized(name), EngineConfig(max_batch_size=4), out=out, progress=Silent())
            made[name] = out
        return made[name]

    return make


def constants(engine: Path) -> dict[str, Any]:
    """Every constant of the engine's graph by name."""
    import openvino as ov

    model = ov.Core().read_model(engine / "openvino_model.xml")
    return {node.get_friendly_name(): node for node in model.get_ops() if node.get_type_name() == "Constant"}


def formats_of(checkpoint: Path) -> dict[str, str]:
    """The format of each quantized layer."""
    record = json.loads((checkpoint / "quantization.json").read_text())
    return record.get("formats") or dict.fromkeys(record["quantized_layers"], record["format"])


def modelopt_codes(checkpoint: Path, layer: str, name: str) -> np.ndarray:
    """The integers of one layer [out, in], unpacked from ModelOpt's tensor by the documented formula, row by row."""
    import torch
    from safetensors import safe_open

    with safe_open(checkpoint / "hf" / "model.safetensors", framework="pt") as opened:
        weight = opened.get_tensor(f"{layer}.weight")
    if CODES[name] == "i8":
        return weight.numpy()
    if CODES[name] == "f8e4m3":
        return weight.view(torch.uint8).numpy()
    packed = weight.numpy()
    codes = np.empty((2 * packed.shape[0], packed.shape[1]), np.int8)
    for row in range(packed.shape[0]):
        for half, nibble in enumerate((packed[row] & 15, packed[row] >> 4)):
            codes[2 * row + half] = np.where(nibble > 7, nibble.astype(np.int8) - 16, nibble)
    return codes


def stored_codes(constant: Any, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The integers of a constant [out, in]; OpenVINO keeps the even int4 in the low nibble."""
    if CODES[name] != "i4":
        return np.asarray(constant.data).reshape(shape)
    packed = np.asarray(constant.data).view(np.uint8)
    nibbles = np.stack([packed & 15, packed >> 4], axis=-1).reshape(shape).astype(np.int8)
    return np.where(nibbles > 7, nibbles - 16, nibbles)


@pytest.mark.parametrize("name", QUANTIZED)
def test_every_quantized_weight_is_modelopts_own_integers(quantized: Fixture, engine: Fixture, name: str) -> None:
    """Bit for bit, for every layer that quantization.json lists."""
    checkpoint = quantized(name).path
    formats = formats_of(checkpoint)
    found = constants(engine(name))
    assert len(formats) == (12 if name == "mixed" else 14)
    assert len(set(formats.values())) == (5 if name == "mixed" else 1)
    for layer, form in formats.items():
        constant = found[f"{layer}.weight"]
        assert constant.output(0).get_element_type().to_string() == CODES[form]
        codes = modelopt_codes(checkpoint, layer, form)
        np.testing.assert_array_equal(stored_codes(constant, form, codes.shape), codes, err_msg=layer)


@pytest.mark.parametrize("name", QUANTIZED)
def test_every_scale_is_modelopts_own_float32(quantized: Fixture, engine: Fixture, name: str) -> None:
    """Scales are neither rounded nor reordered, and pre-quant scales are all there."""
    from safetensors import safe_open

    found = constants(engine(name))
    with safe_open(quantized(name).path / "hf" / "model.safetensors", framework="pt") as opened:
        scales = {key: opened.get_tensor(key) for key in opened.keys() if key.endswith(".weight_scale")}  # noqa: SIM118
    assert len(scales) == len(formats_of(quantized(name).path))
    for key, scale in scales.items():
        assert found[key].output(0).get_element_type().to_string() == "f32"
        np.testing.assert_array_equal(np.asarray(found[key].data).ravel(), scale.float().numpy().ravel(), err_msg=key)


def reference_logits(checkpoint: Path, ids: list[int]) -> np.ndarray:
    """Logits [n, vocab] of float32 torch over the dequantized weights with pre-quant scales."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    exported = Checkpoint(checkpoint / "hf")
    raw = json.loads((checkpoint / "hf" / "config.json").read_text())
    raw.pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**raw), dtype=torch.float32).eval()
    model.load_state_dict(dict(exported.plain_tensors(torch.float32)))
    for layer in exported.quantized_layers:
        scale = exported.read_layer(layer).pre_quant_scale
        if scale is not None:
            p = torch.from_numpy(scale)
            model.get_submodule(layer).register_forward_pre_hook(lambda _module, args, p=p: (args[0] * p,))
    with torch.no_grad():
        logits: np.ndarray = model(torch.tensor([ids])).logits[0].numpy()
    return logits


def engine_logits(engine: Path, ids: list[int], properties: dict[str, Any]) -> np.ndarray:
    """Logits [n, vocab] of the engine's graph."""
    import openvino as ov

    compiled = ov.Core().compile_model(engine / "openvino_model.xml", "CPU", properties)
    n = len(ids)
    answer = compiled(
        {
            "input_ids": np.array([ids]),
            "attention_mask": np.ones((1, n), np.int64),
            "position_ids": np.arange(n)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
    )
    return np.array(answer["logits"])[0]


@pytest.mark.parametrize("name", FORMATS)
def test_logits_equal_the_dequantized_torch_model(quantized: Fixture, engine: Fixture, name: str) -> None:
    """With exact device properties only the order of float32 sums differs."""
    ids = np.random.default_rng(3).integers(3, 512, 40).tolist()
    expected = reference_logits(quantized(name).path, ids)
    found = engine_logits(engine(name), ids, EXACT_PROPERTIES)
    assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < 2e-5


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_generates_through_continuous_batching(engine: Fixture, name: str) -> None:
    """The directory alone, with the settings of engine.json, answers two requests at once."""
    answers = generate(engine(name), [[5, 6, 7, 8], [9, 10, 11]], new_tokens=6)
    assert [len(answer) for answer in answers] == [6, 6]
    assert all(0 <= token < 512 for answer in answers for token in answer)


def generate(engine: Path, prompts: list[list[int]], *, new_tokens: int) -> list[list[int]]:
    """Greedy ids of all prompts, run together as a server would."""
    import openvino as ov
    import openvino_genai as genai

    facts = describe(engine)
    scheduler = genai.SchedulerConfig()
    for key, value in facts["scheduler"].items():
        setattr(scheduler, key, value)
    pipe = genai.ContinuousBatchingPipeline(str(engine), scheduler, "CPU", facts["plugin_config"])
    config = genai.GenerationConfig(max_new_tokens=new_tokens, ignore_eos=True)
    handles = [pipe.add_request(n, ov.Tensor(np.array([ids], np.int64)), config) for n, ids in enumerate(prompts)]
    while pipe.has_non_finished_requests():
        pipe.step()
    return [handle.read_all()[0].generated_ids for handle in handles]


@pytest.mark.parametrize("name", [name for name in QUANTIZED if CODES.get(name) in {"i4", "i8"}])
def test_integer_weights_stay_compressed_when_executed(engine: Fixture, name: str) -> None:
    """The CPU plugin multiplies with the integers instead of unpacking them to floats at load."""
    import openvino as ov

    path, code = engine(name), CODES[name]
    compiled = ov.Core().compile_model(path / "openvino_model.xml", "CPU", describe(path)["plugin_config"])
    kinds = [
        node.input(1).get_source_output().get_node().get_rt_info()["outputPrecisions"].value
        for node in compiled.get_runtime_model().get_ops()
        if node.get_rt_info()["layerType"].value == "FullyConnected"
    ]
    assert kinds.count(code) >= 8
    assert set(kinds) <= {code, "bf16", "f32", "f16"}


def test_greedy_ids_of_a_mixed_engine_are_the_torch_models(quantized: Fixture, tmp_path: Path) -> None:
    """Without dynamic quantization, through continuous batching and its paged cache; scored in one pass."""
    options = EngineConfig(max_batch_size=4, dynamic_quantization=False)
    compile_engine(quantized("mixed"), options, out=tmp_path / "engine", progress=Silent())
    prompts = [[5, 6, 7, 8], [9, 10, 11], [44, 3, 210, 17, 8]]
    answers = generate(tmp_path / "engine", prompts, new_tokens=8)
    for prompt, answer in zip(prompts, answers, strict=True):
        logits = reference_logits(quantized("mixed").path, [*prompt, *answer])
        assert answer == logits[len(prompt) - 1 : -1].argmax(axis=1).tolist()


def test_an_engine_of_mixed_layers_says_what_it_holds(engine: Fixture) -> None:
    """engine.json counts layers by format, constants by type, and has a deviation for each format."""
    facts = describe(engine("mixed"))
    assert facts["format"] == "mixed"
    assert facts["formats"] == {"fp8": 4, "int4_awq": 2, "int4_wo": 2, "int8_sq": 3, "int8_wo": 1}
    assert [facts["weights"][kind]["tensors"] for kind in ("f8e4m3", "i4", "i8")] == [4, 4, 4]
    assert {words.partition(":")[0] for words in facts["deviations"]} == set(facts["formats"])


@pytest.mark.parametrize("name", ["bf16", "int4_awq"])
def test_equal_inputs_give_equal_bytes(quantized: Fixture, engine: Fixture, tmp_path: Path, name: str) -> None:
    """Nothing in an engine depends on time, path or what the process did before."""
    compile_engine(quantized(name), EngineConfig(max_batch_size=4), out=tmp_path / "again", progress=Silent())
    first = {path.relative_to(engine(name)): path.read_bytes() for path in engine(name).rglob("*") if path.is_file()}
    again = {p.relative_to(tmp_path / "again"): p.read_bytes() for p in (tmp_path / "again").rglob("*") if p.is_file()}
    assert sorted(first) == sorted(again)
    assert [str(path) for path in first if first[path] != again[path]] == []


def test_engine_json_holds_stop_ids_limits_and_words(engine: Fixture) -> None:
    """Stop ids are generation_config.json's list; limits, choices and deviations are what serving reads."""
    facts = describe(engine("int4_awq"))
    assert facts["eos_token_ids"] == [2, 0]
    assert facts["pad_token_id"] == 0
    assert facts["limits"] == {"max_batch_size": 4, "max_num_tokens": 2048, "max_seq_len": 256, "vocab_size": 512}
    assert all(choice["why"] for choice in facts["choices"])
    assert facts["deviations"][0].startswith("int4_awq: ")
    assert facts["weights"]["i4"]["tensors"] == 14
    assert (engine("int4_awq") / "tokenizer" / "tokenizer.json").is_file()


def test_a_quantized_layer_that_the_graph_lacks_is_named(quantized: Fixture, engine: Fixture) -> None:
    """Nothing is skipped in silence: the error lists the layer."""
    import openvino as ov

    class Renamed(Checkpoint):
        def read_layer(self, layer: str) -> Any:
            return super().read_layer(layer.replace("layers.7", "layers.0"))

    plain = ov.Core().read_model(engine("bf16") / "openvino_model.xml")
    layers = ["model.layers.0.mlp.up_proj", "model.layers.7.mlp.up_proj"]
    with pytest.raises(ToolError) as caught:
        openvino_graph.insert_weights(plain, Renamed(quantized("fp8").path / "hf"), layers, progress=Silent())
    assert "1 of 2" in str(caught.value)
    assert "not in the exported graph" in str(caught.value)


def test_a_layer_of_another_shape_is_named(quantized: Fixture, engine: Fixture) -> None:
    """A weight that does not fit its place is refused before it is inserted."""
    import openvino as ov

    class Swapped(Checkpoint):
        def read_layer(self, layer: str) -> Any:
            return super().read_layer(layer.replace("up_proj", "down_proj"))

    plain = ov.Core().read_model(engine("bf16") / "openvino_model.xml")
    with pytest.raises(ToolError, match="has shape"):
        openvino_graph.insert_weights(
            plain, Swapped(quantized("fp8").path / "hf"), ["model.layers.0.mlp.up_proj"], progress=Silent()
        )


def test_a_list_of_layers_that_the_tensors_contradict_is_refused(quantized: Fixture, tmp_path: Path) -> None:
    """quantization.json that lists a layer too few is caught before anything heavy runs."""
    copy = tmp_path / "copy"
    shutil.copytree(quantized("fp8").path, copy)
    document = json.loads((copy / "quantization.json").read_text())
    dropped = document["quantized_layers"].pop()
    (copy / "quantization.json").write_text(json.dumps(document))
    broken = QuantizedCheckpoint(path=copy, digest="sha256:" + "2" * 64)
    with pytest.raises(IntegrityError, match=dropped):
        compile_engine(broken, EngineConfig(), out=tmp_path / "engine", progress=Silent())


def test_a_compiled_model_cache_of_a_paged_graph_cannot_be_read_back(engine: Fixture) -> None:
    """Why CACHE_DIR is not set; when this fails, OpenVINO has learned it and the choice should change."""
    import openvino as ov
    from openvino._offline_transformations import paged_attention_transformation

    core = ov.Core()
    model = core.read_model(engine("bf16") / "openvino_model.xml")
    paged_attention_transformation(model)
    blob = core.compile_model(model, "CPU").export_model()
    with pytest.raises(RuntimeError, match="k_head_size"):
        core.import_model(blob, "CPU")
