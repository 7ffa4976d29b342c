"""Takes the place of TensorRT-LLM's backend: answers with the ids it got, and writes down what it was sent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

INPUTS = ("input_ids", "input_lengths", "request_output_len", "streaming")


class TritonPythonModel:
    """One response per request, decoupled."""

    def initialize(self, args: dict[str, str]) -> None:
        """Find the place of the record."""
        self._record = Path(args["model_repository"]) / args["model_version"] / "record.jsonl"

    def execute(self, requests: list[Any]) -> None:
        """Echo."""
        for request in requests:
            tensors = {name: pb_utils.get_input_tensor_by_name(request, name) for name in INPUTS}
            values = {name: tensor.as_numpy() for name, tensor in tensors.items() if tensor is not None}
            with self._record.open("a") as record:
                shown = {name: [list(value.shape), value.reshape(-1).tolist()] for name, value in values.items()}
                record.write(json.dumps(shown) + "\n")
            ids = values["input_ids"].reshape(1, 1, -1).astype(np.int32)
            outputs = {
                "output_ids": ids,
                "sequence_length": np.array([[ids.shape[-1]]], dtype=np.int32),
                "sequence_index": np.array([[0]], dtype=np.int32),
            }
            response = pb_utils.InferenceResponse([pb_utils.Tensor(name, value) for name, value in outputs.items()])
            request.get_response_sender().send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
