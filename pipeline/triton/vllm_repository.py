"""A repository for Triton's vLLM backend: one model, text in and text out, with vLLM's own batching.

The backend's tensors are its own (`text_input`, `sampling_parameters` as JSON, `stream` -> `text_output`), so this is
another contract than the five models of the other targets, and it is what Triton's OpenAI frontend drives. Facts:
triton-inference-server/vllm_backend src/model.py@00ea75b (model.json beside the version's files, KIND_MODEL for several
GPUs, decoupled, max_batch_size 0) and samples/model_repository/vllm_model/config.pbtxt@1e27105. Never run here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from pipeline.errors import IntegrityError
from pipeline.host.files import link_or_copy
from pipeline.triton.core_model import Emission
from pipeline.triton.model_config import parse, render

TARGET: Final = "vllm"
MODEL: Final = "vllm_model"
_ARGUMENTS: Final = "model.json"
_CONFIG: Final = f"""
name: "{MODEL}"
backend: "vllm"
max_batch_size: 0
model_transaction_policy {{ decoupled: true }}
input [
  {{ name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }},
  {{ name: "stream" data_type: TYPE_BOOL dims: [ 1 ] optional: true }},
  {{ name: "sampling_parameters" data_type: TYPE_STRING dims: [ 1 ] optional: true }},
  {{ name: "exclude_input_in_output" data_type: TYPE_BOOL dims: [ 1 ] optional: true }}
]
output [ {{ name: "text_output" data_type: TYPE_STRING dims: [ -1 ] }} ]
instance_group [ {{ count: 1 kind: KIND_MODEL }} ]
parameters {{ key: "REPORT_CUSTOM_METRICS" value: {{ string_value: "true" }} }}
parameters {{ key: "ENABLE_VLLM_HEALTH_CHECK" value: {{ string_value: "true" }} }}
"""


def emit_vllm(emission: Emission, out: Path) -> None:
    """Write the repository: config.pbtxt, 1/model.json, 1/model/ and README.md.

    Raises:
        IntegrityError: the engine directory has no checkpoint.
    """
    engine = emission.engine
    if not (emission.engine_dir / "model" / "config.json").is_file():
        raise IntegrityError(f"{emission.engine_dir} has no model/config.json", hint="Compile again.")
    version = out / MODEL / "1"
    version.mkdir(parents=True)
    (out / MODEL / "config.pbtxt").write_text(render(parse(_CONFIG, MODEL)), encoding="utf-8")
    # The backend hands the path on as it is, and vLLM would take a relative one for a hub id.
    arguments = dict(engine["engine_arguments"]) | {"model": f"{emission.mount}/{MODEL}/1/model"}
    (version / _ARGUMENTS).write_text(json.dumps(arguments, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    link_or_copy(emission.engine_dir / "model", version / "model")
    (out / "README.md").write_text(_readme(emission), encoding="utf-8")


def _readme(emission: Emission) -> str:
    engine = emission.engine
    limits: dict[str, Any] = engine["limits"]
    toolchain = engine["toolchain"]
    image = toolchain["image"]
    return f"""# Triton model repository `{emission.name}`

For {engine["world_size"]} x {engine["gpu"]["name"]} with Triton's vLLM backend: vLLM {toolchain["vllm"]}, driver
R{toolchain["driver_branch"]} or newer. `{MODEL}/1/{_ARGUMENTS}` holds vLLM's arguments. Where this was written there
was no GPU: **nothing of it was run on vLLM**; what was proven is the checkpoint in `{MODEL}/1/model`.

    docker run --rm --gpus all --ipc=host --ulimit memlock=-1 -p 127.0.0.1:8000-8002:8000-8002 \\
      -v "$PWD:{emission.mount}" {image} tritonserver --model-repository={emission.mount}

`POST /v2/models/{MODEL}/generate` with vLLM's sampling parameters as JSON text (vLLM's own max_tokens is 16):

    {{"text_input": "The capital of France is", "stream": false, "exclude_input_in_output": true,
     "sampling_parameters": "{{\\"temperature\\": 0, \\"max_tokens\\": 64}}"}}

The tensors are the vLLM backend's, not those of the other targets: `trtpipe generate` and `trtpipe chat` do not speak
them. Triton's OpenAI frontend does.

| limit | value |
|---|---|
| sequences in flight (max_num_seqs) | {limits["max_batch_size"]} |
| prompt + output tokens (max_model_len) | {limits["max_seq_len"]} |
| tokens per iteration (max_num_batched_tokens) | {limits["max_num_tokens"]} |
"""
