"""Makes the code of the Triton models importable in tests, and real engines to serve with it."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2] / "triton_repo"


def use_model_code(*models: str) -> None:
    """Put the shared code and the version directories of `models` on the import path."""
    for place in (ROOT, *(ROOT / model / "1" for model in models)):
        if str(place) not in sys.path:
            sys.path.append(str(place))


def tiny_engine(directory: Path, *, seed: int = 0, **limits: int) -> Path:
    """Export the tiny Llama of a seed to OpenVINO and write the engine directory that the emitter reads.

    float32, so that a sequence does not depend on what it is batched with.
    """
    from optimum.intel import OVModelForCausalLM

    from tests.support.checkpoints import tiny_llama

    source = tiny_llama(directory / "source", seed=seed)
    engine = directory / "engine"
    model = OVModelForCausalLM.from_pretrained(source, export=True, load_in_8bit=False, compile=False)
    model.save_pretrained(engine)
    (engine / "tokenizer").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, engine / "tokenizer" / name)
    write_engine_json(engine, **limits)
    return engine


def write_engine_json(engine: Path, **limits: int) -> None:
    """Write engine.json with the given limits instead of the defaults."""
    bounds = {"max_batch_size": 16, "max_num_tokens": 256, "max_seq_len": 256, "vocab_size": 512} | limits
    content: dict[str, Any] = {
        "target": "openvino",
        "limits": bounds,
        "scheduler": {"max_num_batched_tokens": bounds["max_num_tokens"], "max_num_seqs": bounds["max_batch_size"]},
        "plugin_config": {"INFERENCE_PRECISION_HINT": "f32"},
        "choices": [],
        "deviations": [],
        "eos_token_ids": [2, 0],
        "pad_token_id": 0,
        "versions": {},
    }
    (engine / "engine.json").write_text(json.dumps(content))
