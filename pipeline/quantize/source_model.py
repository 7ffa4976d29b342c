"""The source checkpoint as transformers sees it: its config, its layers without weights, the live model."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.core.progress import Progress
from pipeline.errors import BadSafetensors, ConfigError, Problem

if TYPE_CHECKING:
    from torch import nn


def read_config(directory: Path) -> Any:  # noqa: ANN401 - a transformers config of any family
    """Read config.json with the defaults of its class.

    Raises:
        ConfigError: transformers does not implement the architecture itself.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"transformers {version('transformers')} cannot read {directory / 'config.json'}: {error}",
            hint="The architecture must be one that transformers implements itself.",
        ) from error


def build_skeleton(config: Any) -> Any:  # noqa: ANN401 - a transformers model
    """The model that a config describes, float32 and for evaluation: its weights on the meta device, buffers computed.

    Initializing the weights, which even on the meta device is five sixths of the time, is left out.
    """
    import torch
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM
    from transformers.modeling_utils import no_init_weights

    with init_empty_weights(include_buffers=False), no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    model.tie_weights()  # goes with the initialization
    return model.eval().requires_grad_(requires_grad=False)


def read_layout(config: Any) -> tuple[dict[str, tuple[int, int]], list[str]]:  # noqa: ANN401 - see read_config
    """Return the linear layers, name -> (out, in), and every module name, without any weight."""
    model = build_skeleton(config)
    return linear_layers(model), [name for name, _module in model.named_modules() if name]


def linear_layers(model: nn.Module) -> dict[str, tuple[int, int]]:
    """A model's linear layers, name -> (out, in), in its order."""
    from torch import nn as torch_nn

    return {
        name: (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, torch_nn.Linear)
    }


def load_model(source: Path, dtype: str, progress: Progress) -> nn.Module:
    """Load the model for evaluation, on CUDA when it has room there.

    Args:
        source: a Hugging Face directory.
        dtype: name of a torch dtype; weights are cast to it.
        progress: told of the device and the reason.

    Raises:
        BadSafetensors: weights are missing or have the wrong shape.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=getattr(torch, dtype),
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise BadSafetensors(f"transformers cannot load the weights in {source}: {error}") from error
    lost = [Problem(where=name, message="is missing.") for name in sorted(info["missing_keys"])]
    lost += [Problem(where=str(key[0]), message="has another shape.") for key in sorted(info["mismatched_keys"])]
    if lost:
        raise BadSafetensors(
            f"{len(lost)} weights of {source} are missing or have the wrong shape",
            problems=lost[:20],
            hint="Transformers would fill them with random numbers. Fetch the checkpoint again.",
        )
    device, why = choose_device(sum(parameter.nbytes for parameter in model.parameters()))
    progress.note(f"quantize on {device}: {why}")
    model = model.to(device).eval()
    model.requires_grad_(requires_grad=False)
    loaded: nn.Module = model
    return loaded


def choose_device(model_bytes: int) -> tuple[str, str]:
    """Return the device and the reason. Room for activations is taken as half the weights' bytes."""
    import torch

    if not torch.cuda.is_available():
        return "cpu", "no CUDA device"
    free, _total = torch.cuda.mem_get_info()
    need = model_bytes * 3 // 2
    gib = f"{need / 2**30:.1f} GiB needed, {free / 2**30:.1f} GiB free on the GPU"
    return ("cuda", gib) if free >= need else ("cpu", gib)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' advice and progress bars for a while: our own Progress speaks."""
    from transformers.utils import logging as transformers_logging

    level = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.ERROR)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
