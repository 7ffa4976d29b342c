"""NVIDIA ModelOpt: sparsify, quantize, calibrate, inspect and export a live model.

Only this module and modelopt_search import it.
ModelOpt prints, warns, logs (on import as well) and raises bare AssertionErrors. Here its words are kept
from the terminal, and its known failures are turned into errors that say what to do. ModelOpt's exporters
change the model in place: one export per loaded model.
"""

from __future__ import annotations

import copy
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pipeline.errors import Problem, ToolError

if TYPE_CHECKING:
    import torch
    from torch import nn

ForwardLoop = Callable[["nn.Module"], None]

# ModelOpt's and torch's words (lower case) -> likely cause. Seen with ModelOpt 0.47.
_CAUSES = (
    ("nan values in amax", "The weights or an activation are NaN: the source checkpoint is broken or overflows."),
    ("meta tensor", "A weight was never loaded: the source checkpoint lacks it, or it was offloaded."),
    ("different quantization formats", "Only some of q, k, v (or gate and up) are excluded. Exclude all of them."),
    ("not divisible for block", "quantization.group_size does not divide a layer's inputs per rank."),
    ("partial blocks", "quantization.group_size does not divide a layer's inputs."),
    ("cannot pack weight", "int4_awq packs two outputs into a byte; exclude layers with an odd number of outputs."),
    ("not positive", "A scale is 0: a layer saw only zeros. Use more, or more varied, calibration text."),
    ("no weight quantizer", "The quantizer config matched no layer of this architecture."),
    ("duplicating kv heads", "tensor_parallel_size is larger than the number of KV heads."),
    ("cannot export tensorrt_llm checkpoint", "ModelOpt has no TensorRT-LLM export of this architecture."),
    ("out of memory", "The model does not fit. Use a machine with more memory, or smaller calibration.batch_size."),
    ("can't allocate memory", "The model does not fit in memory. Lower calibration.batch_size and max_seq_len."),
)
_TOOL_FAILURES = (
    RuntimeError, AssertionError, ValueError, TypeError, KeyError, IndexError, AttributeError,
    NotImplementedError, ZeroDivisionError,
)  # fmt: skip


@contextmanager
def guarded(doing: str) -> Iterator[None]:
    """Keep ModelOpt off the terminal and turn its failures into ToolError with the likely cause."""
    printed = io.StringIO()
    disabled_level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    with warnings.catch_warnings(record=True) as caught, redirect_stdout(printed):
        warnings.simplefilter("always")
        try:
            yield
        except _TOOL_FAILURES as error:
            said = f"{type(error).__name__}: {error}"
            cause = next((text for words, text in _CAUSES if words in said.lower()), "")
            heard = [str(item.message).splitlines()[0] for item in caught if str(item.message)]
            heard += printed.getvalue().splitlines()
            raise ToolError(
                f"ModelOpt failed to {doing}: {said}",
                problems=[Problem(where="modelopt", message=line, severity="warning") for line in heard[-10:]],
                hint=cause or "Try the format on a smaller model of the family, or pick another quantization.format.",
            ) from error
        finally:
            logging.disable(disabled_level)


def quantize_in_place(model: nn.Module, config: Mapping[str, Any], forward_loop: ForwardLoop | None) -> None:
    """Insert quantizers as `config` says and calibrate them with `forward_loop`; without one, the weights' only."""
    import torch

    with guarded(f"quantize ({config['algorithm']})"), torch.no_grad():
        import modelopt.torch.quantization as mtq

        mtq.quantize(model, dict(config), forward_loop)


def sparsify_in_place(
    model: nn.Module, method: Literal["magnitude", "sparsegpt"], layers: Iterable[str], forward_loop: ForwardLoop | None
) -> None:
    """Set two of every four neighbouring weights of the named linear layers to zero.

    ModelOpt 0.47 leaves the other weights as they are with either method: its SparseGPT chooses zeros by the
    inverse Hessian and does not keep the update of the remaining weights that the method computes.
    """
    import torch

    mode = {"magnitude": "sparse_magnitude", "sparsegpt": "sparsegpt"}[method]
    # The last matching glob wins: nothing, then each layer by name.
    rules: dict[str, Any] = {"*": None} | {name: {} for name in layers}
    with guarded(f"sparsify ({method})"), torch.no_grad():
        import modelopt.torch.sparsity as mts

        mts.sparsify(model, [(mode, {"nn.Linear": rules})], {"forward_loop": forward_loop, "verbose": False})
        mts.export(model)


def is_quantizing(module: nn.Module) -> bool:
    """Whether any quantizer within a module is on."""
    return any(getattr(inner, "is_enabled", False) for inner in module.modules())


def insert(model: nn.Module, config: Mapping[str, Any]) -> None:
    """Insert quantizers as `config` says, without measuring anything; the model may be one without weights."""
    quantize_in_place(model, config, None)


def measure_weights(model: nn.Module) -> None:
    """Measure the range of every enabled weight quantizer, again if need be."""
    import torch

    # Guard: a range that is there already only grows (ModelOpt 0.47), and the weights may have shrunk since.
    for quantizer in weight_quantizers(model).values():
        for stage in stages(quantizer):
            stage.reset_amax()
    with guarded("measure weights"), torch.no_grad():
        import modelopt.torch.quantization as mtq

        mtq.calibrate(model, algorithm="max", forward_loop=None)


def smooth(layer: nn.Module, scale: torch.Tensor) -> None:
    """Give a layer the pre-quant scale p [in] that a calibration found, as ModelOpt does: W becomes W / p."""
    import torch

    with guarded("smooth"), torch.no_grad():
        from modelopt.torch.quantization.model_calib import apply_pre_quant_scale_and_smooth

        apply_pre_quant_scale_and_smooth(layer, scale)


def take_clipping(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return by layer the share of each group's range that its weight quantizer uses; afterwards it uses all."""
    import torch

    found = {name: stages(quantizer)[0].amax.clone() for name, quantizer in weight_quantizers(model).items()}
    measure_weights(model)
    whole = weight_quantizers(model)
    return {name: torch.nan_to_num(amax / stages(whole[name])[0].amax, nan=1.0) for name, amax in found.items()}


def apply_clipping(model: nn.Module, shares: Mapping[str, torch.Tensor]) -> None:
    """Narrow the range of each group to its share, from `take_clipping`."""
    quantizers = weight_quantizers(model)
    for name, share in shares.items():
        quantizer = stages(quantizers[name])[0]
        quantizer.amax = quantizer.amax * share


def weight_quantizers(model: nn.Module) -> dict[str, Any]:
    """Return the enabled weight quantizer of each quantized linear layer by layer name."""
    return _enabled(model, "weight_quantizer")


def input_quantizers(model: nn.Module) -> dict[str, Any]:
    """Return the enabled input quantizer of each linear layer by layer name."""
    return _enabled(model, "input_quantizer")


def stages(quantizer: Any) -> list[Any]:  # noqa: ANN401 - a ModelOpt quantizer, or a sequence of them
    """The quantizers that a weight passes in order: two for w4a8_awq, else one."""
    return list(quantizer) if hasattr(quantizer, "__len__") else [quantizer]


def kv_quantizers(model: nn.Module) -> dict[str, Any]:
    """Return the enabled quantizers of cached keys and values: '<attention>.k' and '<attention>.v'."""
    keys = {f"{name}.k": quantizer for name, quantizer in _enabled(model, "k_bmm_quantizer").items()}
    values = {f"{name}.v": quantizer for name, quantizer in _enabled(model, "v_bmm_quantizer").items()}
    return keys | values


def _enabled(model: nn.Module, attribute: str) -> dict[str, Any]:
    suffix = f".{attribute}"
    return {
        name.removesuffix(suffix): module
        for name, module in model.named_modules()
        if name.endswith(suffix) and getattr(module, "is_enabled", False)
    }


def pre_quant_scale(layer: nn.Module) -> torch.Tensor | None:
    """Return p [in] that multiplies the layer's input before quantization, or None."""
    quantizer: Any = layer.input_quantizer
    scale: torch.Tensor | None = quantizer.pre_quant_scale
    return scale


def set_pre_quant_scale(layer: nn.Module, scale: torch.Tensor, *, folded: bool) -> None:
    """Replace p of a smoothed layer and rescale its weight so that W * p stays what it was.

    Args:
        layer: a quantized linear layer that has a p.
        scale: the new p [in], float32, positive.
        folded: p is multiplied into the norm in front, so the layer must not apply it: ModelOpt's
            exporter expects the buffer gone and `fused_with_prequant` set on the layer.
    """
    import torch

    live: Any = layer
    with torch.no_grad():
        live.weight.data = live.weight.float() * live.input_quantizer.pre_quant_scale.float() / scale
    if folded:
        del live.input_quantizer._pre_quant_scale  # noqa: SLF001 - ModelOpt offers no public removal
        live.fused_with_prequant = True
    else:
        live.input_quantizer.pre_quant_scale = scale


def snap_weights(model: nn.Module) -> None:
    """Move every quantized weight onto the exact grid point that the exporter will pick for it.

    The fake quantizer multiplies by maxbound / amax and the exporter divides by amax / maxbound; where a
    weight lies halfway between two codes the two can round to different sides. Afterwards they cannot.
    Rounding is the exporter's (W / s, s = amax / maxbound, one scale a tensor, row or group), so the
    exported bytes are what they would have been.
    """
    import torch

    for name, found in weight_quantizers(model).items():
        weight: Any = model.get_submodule(name).weight
        quantizer = stages(found)[0]
        scale = quantizer.export_amax().float() / quantizer.maxbound
        if scale.ndim == 2:  # noqa: PLR2004 - [out, in / group]
            scale = scale.repeat_interleave(weight.shape[1] // scale.shape[1], dim=1)
        elif scale.numel() > 1:
            scale = scale[:, None]
        with torch.no_grad():
            steps = weight.float() / scale
            codes = (
                steps.to(torch.float8_e4m3fn).float()
                if quantizer.num_bits == (4, 3)
                else steps.round().clamp(-quantizer.maxbound - 1, quantizer.maxbound)
            )
            weight.data = codes.mul_(scale)


def describe_hf(skeleton: Any, quantizers: Mapping[str, Any] | None, directory: Path) -> dict[str, Any] | None:  # noqa: ANN401 - a transformers model
    """Write config.json and generation_config.json as the Hugging Face export of a whole model writes them.

    But for one thing: ModelOpt copies rope_theta into a llama3 rope_scaling, where the source does not have it.

    Args:
        skeleton: the whole model without weights; unchanged.
        quantizers: ModelOpt's config of all its quantizers; None when there are none.
        directory: where to.

    Returns:
        Content of hf_quant_config.json; None when nothing is quantized.
    """
    described: dict[str, Any] | None = None
    with guarded("describe the Hugging Face checkpoint"):
        from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format
        from modelopt.torch.export.quant_utils import get_quant_config

        if quantizers is not None:
            model = copy.deepcopy(skeleton)
            insert(model, quantizers)
            described = get_quant_config(model)
        skeleton.save_pretrained(directory, state_dict={})
        config = json.loads((directory / "config.json").read_text("utf-8"))
        if described is not None:
            config["quantization_config"] = convert_hf_quant_config_format(described)
        (directory / "config.json").write_text(json.dumps(config), "utf-8")
        for weights in directory.glob("*.safetensors"):
            weights.unlink()
    return described


def export_hf(model: nn.Module, directory: Path) -> None:
    """Write the unified Hugging Face checkpoint; weights are packed from float32, codes exact.

    Tensors that are not quantized keep the live model's dtype.
    """
    import torch

    with guarded("export the Hugging Face checkpoint"), torch.no_grad():
        from modelopt.torch.export import export_hf_checkpoint

        export_hf_checkpoint(model, dtype=next(model.parameters()).dtype, export_dir=directory, max_shard_size="4GB")


def export_trtllm(
    model: nn.Module,
    directory: Path,
    *,
    decoder: str,
    dtype: torch.dtype,
    tensor_parallel_size: int,
    pipeline_parallel_size: int,
) -> None:
    """Write the TensorRT-LLM checkpoint; `decoder` is ModelOpt's name of the family, such as "llama"."""
    import torch

    with guarded("export the TensorRT-LLM checkpoint"), torch.no_grad():
        from modelopt.torch.export import export_tensorrt_llm_checkpoint

        export_tensorrt_llm_checkpoint(
            model,
            decoder,
            dtype=dtype,
            export_dir=directory,
            inference_tensor_parallel=tensor_parallel_size,
            inference_pipeline_parallel=pipeline_parallel_size,
        )
