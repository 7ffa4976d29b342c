"""The core model on a CPU: a Python model that drives OpenVINO GenAI."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pipeline.host.files import link_or_copy
from pipeline.triton.backend_parameters import CORE_MODEL, Decision
from pipeline.triton.core_model import Emission
from pipeline.triton.model_config import ModelConfig, set_parameter

_NOT_SERVED: Final = ("manifest.json", "provenance.json")


class OpenvinoCore:
    """See the module's docstring."""

    whole_responses = True
    packages = ("jinja2", "numpy", "openvino", "openvino-genai", "tokenizers")

    def configure(self, configs: Mapping[str, ModelConfig], emission: Emission) -> tuple[Decision, ...]:
        """Set backend, batch and queue."""
        core = configs[CORE_MODEL]
        core.backend = "python"
        core.dynamic_batching.preferred_batch_size[:] = [core.max_batch_size]
        # The core model counts for itself: Triton's own queue limit would also refuse requests that cancel others.
        set_parameter(core, "max_queue_size", str(emission.serving.max_queue_size))
        set_parameter(core, "exclude_input_in_output", str(emission.serving.exclude_input_in_output).lower())
        return ()

    def write(self, emission: Emission, out: Path) -> None:
        """Put code, tokenizer and compiled graph into the version directory."""
        version = out / CORE_MODEL / "1"
        copy_code(emission.templates / CORE_MODEL / "1", version)
        copy_code(emission.templates / "_shared", version / "_shared")
        link_or_copy(emission.engine_dir / "tokenizer", version / "tokenizer")
        for file in sorted(emission.engine_dir.iterdir()):
            if file.is_file() and file.name not in _NOT_SERVED:
                link_or_copy(file, version / "engine" / file.name)

    def readme(self, emission: Emission) -> str:
        """Return how to start the server."""
        del emission
        return """Needs Triton with the Python backend, and for its Python: `pip install -r requirements.txt` (numpy
below 2: Triton's stub process dies on string tensors with numpy 2). Copy the directory anywhere; nothing in it
knows its place.

    tritonserver --model-repository=. --disable-auto-complete-config
"""


def copy_code(source: Path, destination: Path) -> None:
    """Copy the Python files of a directory."""
    destination.mkdir(exist_ok=True)
    for file in sorted(source.glob("*.py")):
        (destination / file.name).write_bytes(file.read_bytes())
