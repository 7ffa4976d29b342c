"""The OpenVINO graph of a quantized checkpoint: export at 16 bit, then put ModelOpt's integers in.

optimum-intel traces the plain 16-bit model; each quantized layer's weight constant is then replaced by
the exact codes and scales, in the shape of a decompression that the CPU plugin keeps compressed:

    codes -> Convert(f32) [-> Subtract(zero points)] -> Multiply(scales f32) [-> Reshape [out, in]] -> MatMul

Scales stay float32, as ModelOpt wrote them, so that codes * scales is the same number on every side.
"""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pipeline.core.progress import Progress
from pipeline.errors import Problem, ToolError
from pipeline.targets.openvino.weights import INT4, Checkpoint, QuantizedWeight

if TYPE_CHECKING:
    import openvino as ov

# Names that the converter makes up from counters of the process, as 'Multiply_4711'.
_NUMBERED = re.compile(r"^[A-Za-z0-9]+_\d+$")


def write_plain_checkpoint(checkpoint: Checkpoint, directory: Path, dtype: Literal["bfloat16", "float16"]) -> None:
    """Write the same model as an ordinary 16-bit Hugging Face directory, which transformers can load.

    transformers cannot load ModelOpt's export as it is: it skips the unknown quantization method and
    then fails on shapes (int4) or takes codes for weights (fp8).
    """
    import json

    import torch
    from safetensors.torch import save_file

    directory.mkdir(parents=True)
    config = json.loads((checkpoint.directory / "config.json").read_text("utf-8"))
    config.pop("quantization_config", None)
    config.pop("torch_dtype", None)
    config["dtype"] = dtype
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = {name: tensor.contiguous() for name, tensor in checkpoint.plain_tensors(getattr(torch, dtype))}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def export_plain_graph(directory: Path, out: Path) -> Path:
    """Trace a 16-bit checkpoint to a stateful graph with optimum-intel and return its .xml.

    Raises:
        ToolError: the architecture has no OpenVINO export, or the export failed.
    """
    from optimum.exporters.openvino import main_export
    from optimum.intel.openvino.configuration import OVConfig

    with _quiet_export():
        try:
            main_export(
                str(directory),
                out,
                task="text-generation-with-past",
                library_name="transformers",
                stateful=True,
                # Guard: without a config, optimum-intel re-quantizes models above 1e9 parameters to int8.
                ov_config=OVConfig(),
                local_files_only=True,
                trust_remote_code=False,
            )
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, NotImplementedError) as error:
            raise ToolError(
                f"optimum-intel could not export the model to OpenVINO: {type(error).__name__}: {error}",
                hint="The openvino target serves decoder-only models that optimum-intel can export.",
            ) from error
    return out / "openvino_model.xml"


@contextlib.contextmanager
def _quiet_export() -> Iterator[None]:
    """Keep tracer warnings off the terminal; none of them is the user's to act on."""
    loggers = [logging.getLogger(name) for name in ("transformers", "optimum", "torch", "nncf")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def linear_matmuls(model: ov.Model) -> dict[str, ov.Node]:
    """Find the MatMul of each linear layer: module name -> node.

    The converter names an operation after the module that made it:
    '__module.model.layers.0.mlp.up_proj/aten::linear/MatMul' ('ov_ext::linear' at 16 bit).
    """
    matmuls = {}
    for node in model.get_ops():
        module, _, operation = node.get_friendly_name().partition("/")
        if node.get_type_name() == "MatMul" and "::linear/" in operation:
            matmuls[module.removeprefix("__module.")] = node
    return matmuls


def insert_weights(model: ov.Model, checkpoint: Checkpoint, layers: Sequence[str], *, progress: Progress) -> None:
    """Replace the weight of every layer in `layers` by ModelOpt's codes and scales.

    Args:
        model: the 16-bit graph; changed in place.
        checkpoint: where codes and scales are read from.
        layers: every quantized layer.
        progress: told of each layer.

    Raises:
        ToolError: names every layer that the graph does not have, or has in another shape.
    """
    matmuls = linear_matmuls(model)
    problems = []
    smoothed: dict[tuple[str, int, bytes], ov.Output] = {}
    ordered: dict[tuple[str, int, bytes], ov.Output] = {}
    with progress.track("low-bit weights", len(layers), "layers") as advance:
        for layer in layers:
            weight = checkpoint.read_layer(layer)
            problem = _misfit(matmuls.get(layer), weight)
            if problem is not None:
                problems.append(problem)
                continue
            _replace_weight(matmuls[layer], weight)
            _smooth_input(matmuls[layer], weight, known=smoothed)
            _order_input(matmuls[layer], weight, known=ordered)
            advance(1)
    if problems:
        raise ToolError(
            f"{len(problems)} of {len(layers)} quantized layers do not fit the exported graph",
            problems=problems,
            hint="The openvino target needs each quantized layer as one linear operation; exclude these layers.",
        )
    model.validate_nodes_and_infer_types()


def _misfit(matmul: ov.Node | None, weight: QuantizedWeight) -> Problem | None:
    if matmul is None:
        return Problem(where=weight.layer, message="is not in the exported graph.")
    shape = matmul.input(1).get_partial_shape()
    attributes = matmul.get_attributes()
    if shape.is_dynamic or tuple(shape.to_shape()) != weight.shape or not attributes["transpose_b"]:
        return Problem(
            where=weight.layer, message=f"has shape {shape} in the graph and {weight.shape} in the checkpoint."
        )
    return None


def _replace_weight(matmul: ov.Node, weight: QuantizedWeight) -> None:
    import numpy as np
    import openvino as ov
    from openvino import opset13 as ops

    rows, columns = weight.shape
    grouped = weight.code in INT4 and weight.group_size != columns
    shape = [rows, weight.scales.shape[1], weight.group_size] if grouped else [rows, columns]
    codes = ops.constant(_as_tensor(weight, shape))
    codes.set_friendly_name(f"{weight.layer}.weight")
    scales = ops.constant(weight.scales[:, :, None] if grouped else weight.scales, dtype=np.float32)
    scales.set_friendly_name(f"{weight.layer}.weight_scale")
    levels = ops.convert(codes, ov.Type.f32)
    if weight.zero_points is not None:
        stored = weight.zero_points[:, :, None] if grouped else weight.zero_points
        zero_points = ops.constant(stored, dtype=np.uint8)
        zero_points.set_friendly_name(f"{weight.layer}.weight_zero_point")
        levels = ops.subtract(levels, ops.convert(zero_points, ov.Type.f32))
    values = ops.multiply(levels, scales)
    if grouped:
        values = ops.reshape(values, ops.constant(np.array([rows, columns], np.int64)), special_zero=False)
    values.set_friendly_name(f"{weight.layer}.weight/dequantized")
    matmul.input(1).replace_source_output(values.output(0))


def _as_tensor(weight: QuantizedWeight, shape: Sequence[int]) -> ov.Tensor:
    import numpy as np
    import openvino as ov

    types = {"i4": ov.Type.i4, "u4": ov.Type.u4, "i8": ov.Type.i8, "f8e4m3": ov.Type.f8e4m3}
    # Guard: a tensor made from an array borrows its memory, and the graph outlives the array.
    owned = ov.Tensor(types[weight.code], ov.Shape(shape))
    ov.Tensor(np.ascontiguousarray(weight.codes), ov.Shape(shape), types[weight.code]).copy_to(owned)
    return owned


def _smooth_input(matmul: ov.Node, weight: QuantizedWeight, *, known: dict[tuple[str, int, bytes], ov.Output]) -> None:
    """Multiply the layer's input by p; layers that read one tensor with equal p share the product."""
    import numpy as np
    from openvino import opset13 as ops

    if weight.pre_quant_scale is None:
        return
    source = matmul.input(0).get_source_output()
    key = (source.get_node().get_friendly_name(), source.get_index(), weight.pre_quant_scale.tobytes())
    if key not in known:
        factor = ops.constant(weight.pre_quant_scale[None, None, :], dtype=np.float32)
        factor.set_friendly_name(f"{weight.layer}.pre_quant_scale")
        known[key] = ops.multiply(source, factor).output(0)
    matmul.input(0).replace_source_output(known[key])


def _order_input(matmul: ov.Node, weight: QuantizedWeight, *, known: dict[tuple[str, int, bytes], ov.Output]) -> None:
    """Put the layer's inputs in the order of its columns; layers that read one tensor in one order share it."""
    import numpy as np
    from openvino import opset13 as ops

    if weight.input_order is None:
        return
    source = matmul.input(0).get_source_output()
    key = (source.get_node().get_friendly_name(), source.get_index(), weight.input_order.tobytes())
    if key not in known:
        order = ops.constant(weight.input_order, dtype=np.int32)
        order.set_friendly_name(f"{weight.layer}.weight_input_order")
        known[key] = ops.gather(source, order, ops.constant(np.array(-1, np.int64))).output(0)
    matmul.input(0).replace_source_output(known[key])


def count_weights(model: ov.Model) -> dict[str, dict[str, int]]:
    """Count the constants of two and more dimensions: element type -> {"tensors", "bytes"}."""
    counts: dict[str, dict[str, int]] = {}
    for node in model.get_ops():
        if node.get_type_name() == "Constant" and len(node.output(0).get_shape()) > 1:
            kind = node.output(0).get_element_type().to_string()
            count = counts.setdefault(kind, {"tensors": 0, "bytes": 0})
            count["tensors"] += 1
            count["bytes"] += node.get_byte_size()
    return counts


def name_canonically(model: ov.Model) -> None:
    """Rename what the converter numbered with process-wide counters, so that equal graphs are equal files."""
    model.set_friendly_name("openvino_model")
    for number, node in enumerate(model.get_ordered_ops()):
        if _NUMBERED.match(node.get_friendly_name()):
            node.set_friendly_name(f"{node.get_type_name()}.{number}")
