"""The LLM API repository: model.yaml, and from request tensors to the LLM API's arguments."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.config.deployment import ServingConfig
from pipeline.errors import ConfigError
from pipeline.triton.model_config import parse
from pipeline.triton.repository import emit
from tests.support.gpu_engine import llmapi_model

pytestmark = pytest.mark.fast


def emitted(tmp_path: Path, serving: dict[str, Any] | None = None) -> Path:
    """An emitted repository."""
    out = tmp_path / "out"
    emit(llmapi_model(tmp_path / "engine"), ServingConfig.model_validate(serving or {}), name="x", out=out)
    return out


def test_model_yaml_is_upstreams(tmp_path: Path) -> None:
    """Arguments of LLM() at top level and triton_config with upstream's three keys."""
    settings = yaml.safe_load((emitted(tmp_path) / "tensorrt_llm" / "1" / "model.yaml").read_text())
    assert settings == {
        "model": "model",
        "backend": "pytorch",
        "tensor_parallel_size": 1,
        "max_batch_size": 4,
        "kv_cache_config": {"enable_block_reuse": True},
        "triton_config": {"max_batch_size": 4, "decoupled": True, "cancellation_check_period_ms": 100},
    }


def test_guided_decoding_is_an_argument_of_the_llm(tmp_path: Path) -> None:
    """The same key of the config works on both GPU targets."""
    out = emitted(tmp_path, {"tensorrt_llm": {"guided_decoding_backend": "xgrammar"}})
    settings = yaml.safe_load((out / "tensorrt_llm" / "1" / "model.yaml").read_text())
    assert settings["guided_decoding_backend"] == "xgrammar"


def test_configuration_is_decoupled_and_has_the_engines_tensors(tmp_path: Path) -> None:
    """config.pbtxt says decoupled itself; the launcher switches auto-complete off."""
    path = emitted(tmp_path) / "tensorrt_llm" / "config.pbtxt"
    config = parse(path.read_text(), "core")
    assert (config.backend, config.model_transaction_policy.decoupled, config.max_batch_size) == ("python", True, 4)
    assert {"input_ids", "request_output_len", "streaming", "guided_decoding_guide"} <= {t.name for t in config.input}
    assert set(config.parameters) == {"exclude_input_in_output", "max_queue_size", "tokenizer_dir"}


def test_frontend_tensors_are_on_both_entries(tmp_path: Path) -> None:
    """What Triton's OpenAI frontend sends (server python/openai/openai_frontend/engine/utils/triton.py@e1db8a6)."""
    sent = {
        *("text_input", "stream", "max_tokens", "stop_words", "top_p", "frequency_penalty", "presence_penalty"),
        *("seed", "temperature", "guided_decoding_guide_type", "guided_decoding_guide", "lora_task_id"),
        *("return_num_input_tokens", "return_num_output_tokens", "exclude_input_in_output"),
    }
    for entry in ("ensemble", "tensorrt_llm_bls"):
        config = parse((emitted(tmp_path / entry) / entry / "config.pbtxt").read_text(), entry)
        assert sent <= {tensor.name for tensor in config.input}
        assert {"text_output", "num_input_tokens", "num_output_tokens"} <= {tensor.name for tensor in config.output}


def test_code_imports_nothing_of_this_machine(tmp_path: Path) -> None:
    """The core model needs numpy, tokenizers, yaml, TensorRT-LLM and what lies beside it."""
    version = emitted(tmp_path) / "tensorrt_llm" / "1"
    beside = {path.stem for path in version.glob("*.py")} | {"_shared"}
    roots = set()
    for path in version.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                roots |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                roots.add(node.module.split(".")[0])
    import sys

    foreign = {root for root in roots if root not in sys.stdlib_module_names} - beside
    assert foreign == {"jinja2", "numpy", "tensorrt_llm", "tokenizers", "triton_python_backend_utils", "yaml"}


def test_launch_mode_of_engines_is_refused(tmp_path: Path) -> None:
    """The LLM API has no orchestrator mode."""
    with pytest.raises(ConfigError, match="LLM API"):
        emitted(tmp_path, {"launch_mode": "orchestrator"})
