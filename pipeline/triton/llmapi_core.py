"""The core model on a GPU without an engine file: our Python model around TensorRT-LLM's LLM API, and its model.yaml.

Differs from upstream's llmapi model (NVIDIA/TensorRT-LLM triton_backend/all_models/llmapi@c8c6df0) in one thing: it
takes the tensors of the engine's core model, so everything around it, and every client of it, stays as it is.
model.yaml is upstream's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import yaml

from pipeline.errors import ConfigError, IntegrityError, Problem
from pipeline.host.files import link_or_copy
from pipeline.triton.backend_parameters import CORE_MODEL, Decision
from pipeline.triton.core_model import Emission
from pipeline.triton.engine_core import write_launcher
from pipeline.triton.model_config import ModelConfig
from pipeline.triton.openvino_core import copy_code

# Code of the CPU's core model that knows nothing of its engine.
_OF_EVERY_CORE: Final = ("answer.py", "core_request.py", "visible_ids.py")
# Parameters of the template that this model reads.
_PARAMETERS: Final = ("exclude_input_in_output", "max_queue_size", "tokenizer_dir")
_CANCELLATION_CHECK_PERIOD_MS: Final = 100


class LlmapiCore:
    """See the module's docstring."""

    whole_responses = True
    # All in the image.
    packages = ()

    def configure(self, configs: Mapping[str, ModelConfig], emission: Emission) -> tuple[Decision, ...]:
        """Set backend, batch, queue, and decoupled, which auto-complete would take from model.yaml when it is on.

        Raises:
            ConfigError: a launch mode that the LLM API does not have.
        """
        if emission.serving.launch_mode != "leader":
            where = "serving.launch_mode"
            message = (
                f"{emission.serving.launch_mode} is a mode of compiled engines; the LLM API starts its ranks itself."
            )
            raise ConfigError(
                "the serving section asks for what the LLM API cannot do",
                problems=[Problem(where=where, message=message)],
            )
        core = configs[CORE_MODEL]
        core.backend = "python"
        for key in set(core.parameters) - set(_PARAMETERS):
            del core.parameters[key]
        core.dynamic_batching.preferred_batch_size[:] = [core.max_batch_size]
        core.parameters["max_queue_size"].string_value = str(emission.serving.max_queue_size)
        core.parameters["exclude_input_in_output"].string_value = str(emission.serving.exclude_input_in_output).lower()
        core.model_transaction_policy.decoupled = True
        return ()

    def write(self, emission: Emission, out: Path) -> None:
        """Put code, model.yaml, checkpoint and tokenizer into the version directory.

        Raises:
            IntegrityError: the engine directory has no checkpoint.
        """
        if not (emission.engine_dir / "model" / "config.json").is_file():
            raise IntegrityError(f"{emission.engine_dir} has no model/config.json", hint="Compile again.")
        version = out / CORE_MODEL / "1"
        copy_code(emission.templates / "_llmapi", version)
        copy_code(emission.templates / "_shared", version / "_shared")
        for name in _OF_EVERY_CORE:
            (version / name).write_bytes((emission.templates / CORE_MODEL / "1" / name).read_bytes())
        link_or_copy(emission.engine_dir / "model", version / "model")
        link_or_copy(emission.engine_dir / "tokenizer", version / "tokenizer")
        link_or_copy(emission.engine_dir / "engine.json", version / "engine.json")
        (version / "model.yaml").write_text(model_yaml(emission), encoding="utf-8")
        write_launcher(emission, out)

    def readme(self, emission: Emission) -> str:
        """Return how to start the server."""
        engine = emission.engine
        image = engine["toolchain"]["image"]
        machine = f"{engine['world_size']} x {engine['gpu']['name']}"
        return f"""For {machine} with TensorRT-LLM's LLM API ({engine["toolchain"]["tensorrt_llm"]}): serve it in
`{image}`. No engine is compiled; `{CORE_MODEL}/1/model.yaml` holds the arguments of the LLM API. Where this was
written there was no GPU: **nothing of it was run**. `trtpipe check .` tells what does not fit.

    docker run --rm --gpus all --ipc=host --ulimit memlock=-1 -p 127.0.0.1:8000-8002:8000-8002 \\
      -v "$PWD:{emission.mount}" {image} sh {emission.mount}/launch.sh
"""


def model_yaml(emission: Emission) -> str:
    """Return model.yaml: the LLM API's arguments, and what upstream's model tells Triton."""
    arguments = dict(emission.engine["llm_args"])
    backend = emission.serving.tensorrt_llm.guided_decoding_backend
    if backend is not None:
        arguments["guided_decoding_backend"] = backend
    arguments["triton_config"] = {
        "max_batch_size": emission.engine["limits"]["max_batch_size"],
        "decoupled": True,
        "cancellation_check_period_ms": (
            emission.serving.tensorrt_llm.cancellation_check_period_ms or _CANCELLATION_CHECK_PERIOD_MS
        ),
    }
    return yaml.safe_dump(arguments, sort_keys=True)
