"""The quantized checkpoint as a model that runs: every linear layer computes the reference formula.

Layers are read when they compute and dropped afterwards, so a model far larger than memory can be
scored as long as one layer, the embedding and the activations of the text fit. `load_reference_model`
keeps them, for generation.

Everything is computed in float32 on the CPU: stored 16-bit numbers are exact there, and a difference
between two models is then one of their weights and formulas, not of the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pipeline.core.progress import Progress
from pipeline.quantize.numerics import Distribution, DistributionComparison
from pipeline.quantize.readers import read_quantized
from pipeline.quantize.reference import QuantizedLinear
from pipeline.quantize.source_model import build_skeleton
from pipeline.quantize.tensor_files import FloatArray


class LayerReader(Protocol):
    """What a model is built from: linear layers and parameters by their Hugging Face names."""

    def linear(self, module: str) -> QuantizedLinear:
        """Read one linear layer, quantized or not."""
        ...

    def tensor(self, name: str) -> FloatArray:
        """Read a parameter as float32."""
        ...


_POSITIONS_PER_BLOCK = 128  # log-probabilities of this many positions are held at once


def load_reference_model(quantized_dir: Path) -> Any:  # noqa: ANN401 - torch is not imported at module level
    """Load a quantized checkpoint (artifact or hf/ directory) as a causal language model in float32.

    Returns:
        A transformers model in evaluation mode whose linear layers compute the formulas of
        `reference`; it generates as any other. All decoded weights stay in memory.
    """
    reader = read_quantized(quantized_dir)
    return build_model(reader.directory, reader, resident=True)


def build_model(config_directory: Path, reader: LayerReader, *, resident: bool) -> Any:  # noqa: ANN401
    """Build the model that `config_directory`/config.json describes over the tensors of `reader`.

    Args:
        config_directory: holds a Hugging Face config.json.
        reader: supplies linear layers and parameters by their Hugging Face names.
        resident: keep every decoded linear layer; otherwise read it anew for each forward pass.
    """
    import torch
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(config_directory, local_files_only=True)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # transformers would look for a quantizer of its own
    model = build_skeleton(config)
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear):
            keep = resident or name == "lm_head"  # the head computes once per block of positions
            read = partial(_read_layer, reader, name, module.out_features)
            model.set_submodule(name, _linear_module(read, resident=keep))
            continue
        for parameter in dict(module.named_parameters(recurse=False)):
            rows = module.get_parameter(parameter).shape[0]
            value = torch.from_numpy(np.array(reader.tensor(f"{name}.{parameter}")[:rows]))
            module.register_parameter(parameter, torch.nn.Parameter(value, requires_grad=False))
    return model


def _read_layer(reader: LayerReader, name: str, rows: int) -> QuantizedLinear:
    """Read a linear layer without the rows by which TensorRT-LLM pads the vocabulary of lm_head."""
    layer = reader.linear(name)
    if layer.format != "float" or len(layer.codes) == rows:
        return layer
    return replace(layer, codes=layer.codes[:rows], bias=None if layer.bias is None else layer.bias[:rows])


def _linear_module(read: Callable[[], QuantizedLinear], *, resident: bool) -> Any:  # noqa: ANN401
    import torch

    class ReferenceLinear(torch.nn.Module):
        """Computes `QuantizedLinear.forward`; torch multiplies, several times faster than numpy."""

        def __init__(self) -> None:
            super().__init__()
            self._layer = read() if resident else None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            layer = self._layer or read()
            x_hat = layer.quantized_input(x.detach().reshape(-1, x.shape[-1]).numpy())
            bias = None if layer.bias is None else torch.from_numpy(layer.bias)
            y = torch.nn.functional.linear(torch.from_numpy(x_hat), torch.from_numpy(layer.weight), bias)
            return y.reshape(*x.shape[:-1], -1)

    return ReferenceLinear()


def last_hidden(model: Any, ids: npt.NDArray[np.int64], label: str, progress: Progress) -> Any:  # noqa: ANN401
    """Run a model on text and return what its head would see: a tensor [sequences * (length - 1), hidden].

    Args:
        model: from `build_model`.
        ids: token ids [sequences, length]; each sequence predicts its tokens from the second on.
        label: what is scored, for the progress line.
        progress: told of the pass.
    """
    import torch

    with torch.no_grad(), progress.track(f"score {label}", ids.size, "tokens") as advance:
        state = model.base_model(input_ids=torch.from_numpy(ids), use_cache=False).last_hidden_state
        advance(ids.size)
    return state[:, :-1].reshape(-1, state.shape[-1])


def compare_hidden(
    baseline: tuple[Any, Any], tested: tuple[Any, Any], ids: npt.NDArray[np.int64], progress: Progress
) -> Distribution:
    """Compare what two models predict, each given as the model and its `last_hidden` of `ids`."""
    import torch

    heads = [model.get_output_embeddings() for model, _hidden in (baseline, tested)]
    targets = ids[:, 1:].reshape(-1)
    comparison = DistributionComparison()
    with torch.no_grad(), progress.track("compare predictions", len(targets), "tokens") as advance:
        for start in range(0, len(targets), _POSITIONS_PER_BLOCK):
            block = slice(start, start + _POSITIONS_PER_BLOCK)
            expected, predicted = (
                torch.log_softmax(head(state[block]), dim=-1).numpy()
                for head, (_model, state) in zip(heads, (baseline, tested), strict=True)
            )
            comparison.add(expected, predicted, targets[block])
            advance(len(targets[block]))
    return comparison.result()


def compare_models(
    baseline: Any,  # noqa: ANN401
    tested: Any,  # noqa: ANN401
    ids: npt.NDArray[np.int64],
    progress: Progress,
) -> Distribution:
    """Score both models on the same text, each position given the true tokens before it.

    Args:
        baseline: the model of the source, from `build_model`.
        tested: the model of the quantized checkpoint.
        ids: token ids [sequences, length]; each sequence predicts its tokens from the second on.
        progress: told of each model's pass and of the comparison.
    """
    sides = [
        (model, last_hidden(model, ids, label, progress))
        for label, model in (("16-bit source", baseline), ("quantized", tested))
    ]
    return compare_hidden(sides[0], sides[1], ids, progress)
