"""The source model, a few decoder layers at a time: what is in memory is bounded, whatever the model's size.

The whole model exists as a skeleton without weights. `excerpt` makes a model of the same family that has some
decoder layers with their real weights, under their real names, and everything ModelOpt and transformers
expect of a model around them: embedding and head are small stand-ins, since nothing of theirs is looked at.
Running those layers on the activations that reach them computes what the whole model computes there.
Small layers are taken together (`groups`), because what ModelOpt does to a model costs the same for one layer
as for many; a layer of a large model is alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from pipeline.config.schema import Format
from pipeline.errors import BadSafetensors, ConfigError, Problem
from pipeline.quantize.source_model import build_skeleton, choose_device, linear_layers, read_config
from pipeline.quantize.tensor_files import TensorFiles

if TYPE_CHECKING:
    import torch
    from torch import nn

_SMALL_VOCABULARY = 64  # of the stand-ins; TensorRT-LLM pads to multiples of it
_WORK_TOGETHER = 2**38  # weights times tokens: some seconds of a CPU's time for one pass
_TOGETHER = 2**26  # weights in memory at once, where one layer has not more by itself: 256 MiB in float32


class _Reached(Exception):
    """The decoder layers begin."""


@dataclass(frozen=True, kw_only=True)
class LayeredModel:
    """A source checkpoint, opened; its layers are read when they are asked for.

    Attributes:
        config: as transformers reads it.
        skeleton: the whole model without weights.
        source: the Hugging Face directory.
        layers: name of the module that holds the decoder layers, such as "model.layers".
        device: where layers are put; `why` says the reason.
    """

    config: Any
    skeleton: nn.Module
    source: Path
    layers: str
    device: str
    why: str

    @classmethod
    def open(cls, source: Path) -> Self:
        """Read the config; tensors are looked at when they are needed.

        Args:
            source: a Hugging Face directory.

        Raises:
            ConfigError: transformers does not know the architecture, or it is no stack of decoder layers.
        """
        import torch

        config = read_config(source)
        skeleton = build_skeleton(config)
        stacks = [
            name
            for name, module in skeleton.named_modules()
            if isinstance(module, torch.nn.ModuleList) and len(module) == config.num_hidden_layers
        ]
        if not stacks:
            architecture = (config.architectures or ["unknown"])[0]
            raise ConfigError(f"{architecture} is no stack of decoder layers, so it cannot be quantized layer by layer")
        layer = skeleton.get_submodule(f"{stacks[0]}.0")
        device, why = choose_device(2 * sum(parameter.numel() * 4 for parameter in layer.parameters()))
        return cls(config=config, skeleton=skeleton, source=source, layers=stacks[0], device=device, why=why)

    @cached_property
    def files(self) -> TensorFiles:
        """The checkpoint's tensors.

        Raises:
            SourceNotFound: there are none.
            BadSafetensors: weights are missing or have the wrong shape.
        """
        files = TensorFiles(self.source)
        _refuse_incomplete(self.skeleton, files, self.source)
        return files

    @cached_property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Linear layers, name -> (out, in), in model order."""
        return linear_layers(self.skeleton)

    @cached_property
    def modules(self) -> list[str]:
        """Every module's name."""
        return [name for name, _module in self.skeleton.named_modules() if name]

    @cached_property
    def head(self) -> str:
        """Name of the output head."""
        return self._name(self._causal.get_output_embeddings())

    @cached_property
    def parameters(self) -> list[str]:
        """Names of the tensors that make the model, without a head that shares the embedding's."""
        tied = f"{self.head}.weight" if self.config.tie_word_embeddings else None
        return [name for name in self.skeleton.state_dict() if name != tied]

    @property
    def count(self) -> int:
        """How many decoder layers there are."""
        return int(self.config.num_hidden_layers)

    @property
    def _causal(self) -> Any:  # noqa: ANN401 - a transformers model
        return self.skeleton

    def _name(self, wanted: nn.Module) -> str:
        names: dict[nn.Module, str] = {module: name for name, module in self.skeleton.named_modules()}
        return names[wanted]

    def layer_name(self, index: int) -> str:
        """Name of a decoder layer."""
        return f"{self.layers}.{index}"

    def inside(self, index: int, name: str) -> bool:
        """Whether a module or tensor belongs to decoder layer `index`."""
        return name.startswith(f"{self.layers}.{index}.")

    def groups(self, indices: Iterable[int], alike: Callable[[int], Hashable], *, tokens: int = 0) -> list[list[int]]:
        """Decoder layers, in their order, that are to be in memory together: neighbours that are alike.

        Args:
            indices: the layers.
            alike: layers may be together for which this is equal.
            tokens: that go through them; where many do, the time of a run is in them, and shorter ones can be resumed.
        """
        groups: list[list[int]] = []
        size, before = 0, None
        for index in indices:
            layer = self.skeleton.get_submodule(self.layer_name(index))
            weights = sum(parameter.numel() for parameter in layer.parameters())
            kind, size = alike(index), size + weights
            if not groups or kind != before or size > _TOGETHER or size * tokens > _WORK_TOGETHER:
                groups.append([])
                before, size = kind, weights
            groups[-1].append(index)
        return groups

    def kind(self, index: int, formats: Mapping[str, Format]) -> tuple[tuple[str, Format | None], ...]:
        """The linear layers of a decoder layer, by their names within it, and their formats."""
        prefix = f"{self.layer_name(index)}."
        names = [name for name in self.linears if name.startswith(prefix)]
        return tuple((name.removeprefix(prefix), formats.get(name)) for name in names)

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Read a tensor into memory and cast it."""
        return _widen(self.files, name, self.files.raw(name)).to(dtype, copy=True)

    def excerpt(self, indices: Sequence[int], *, dtype: str = "float32", head: bool = False) -> Any:  # noqa: ANN401
        """A model whose only decoder layers are some of the source's, on the device, for evaluation.

        Args:
            indices: of the layers, counted from 0, in their order.
            dtype: name of the torch dtype of its weights.
            head: with the real output head instead of a stand-in.
        """
        model = self._around(indices, _SMALL_VOCABULARY)
        if head:
            model.set_submodule(self.head, copy.deepcopy(self.skeleton.get_submodule(self.head)))
        self._fill(model, dtype, stand_ins=True, head=head)
        model.tie_weights()
        return model.to(self.device).eval()

    @contextmanager
    def borrow(self, indices: Sequence[int], *, dtype: str = "float32", head: bool = False) -> Iterator[Any]:
        """`excerpt` for a while; afterwards its weights are gone.

        ModelOpt's quantizers and the model hold one another, so without this the weights of several excerpts would
        wait for the garbage collector.
        """
        import torch

        model = self.excerpt(indices, dtype=dtype, head=head)
        try:
            yield model
        finally:
            for parameter in model.parameters():
                parameter.data = torch.empty(0)

    def embed(self, batches: Sequence[Sequence[Sequence[int]]]) -> list[torch.Tensor]:
        """What reaches the first decoder layer: float32 [rows, tokens, hidden] for each batch of token ids.

        Only the rows of the embedding that occur are read.
        """
        import torch

        used = sorted({token for batch in batches for row in batch for token in row})
        place = {token: position for position, token in enumerate(used)}
        model = self._around([0], len(used))
        self._fill(model, "float32", stand_ins=False, head=False)
        embedding = self._causal.get_input_embeddings()
        name = f"{self._name(embedding)}.weight"
        rows = _widen(self.files, name, self.files.raw(name)[used]).float()
        model.get_input_embeddings().weight = torch.nn.Parameter(rows, requires_grad=False)
        reached: list[torch.Tensor] = []

        def stop(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            reached.append(args[0] if args else kwargs["hidden_states"])
            raise _Reached

        handle = model.get_submodule(self.layer_name(0)).register_forward_pre_hook(stop, with_kwargs=True)
        with torch.no_grad():
            for batch in batches:
                try:
                    model.base_model(torch.tensor([[place[token] for token in row] for row in batch]), use_cache=False)
                except _Reached:
                    continue
        handle.remove()
        return reached

    def run(self, model: Any, indices: Sequence[int], hidden: torch.Tensor, *, head: bool = False) -> torch.Tensor:  # noqa: ANN401
        """Run the layers of `excerpt` on what reaches them and return what leaves them, both on the CPU.

        Args:
            model: from `excerpt`, whatever was done to it since.
            indices: of its layers.
            hidden: [rows, tokens, hidden].
            head: go on through the output head.
        """
        import torch

        left: list[torch.Tensor] = []
        entering = hidden.to(self.device)

        def enter(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            return ((entering, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": entering})

        def leave(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:  # noqa: ANN401 - tensor or tuple
            left.append(output[0] if isinstance(output, tuple) else output)

        first, last = (model.get_submodule(self.layer_name(index)) for index in (indices[0], indices[-1]))
        handles = [first.register_forward_pre_hook(enter, with_kwargs=True), last.register_forward_hook(leave)]
        try:
            with torch.no_grad():
                ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=self.device)
                (model if head else model.base_model)(ids, use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        return left[0].cpu()

    def _around(self, indices: Sequence[int], vocabulary: int) -> Any:  # noqa: ANN401 - a transformers model
        """The family's model without weights, with a small vocabulary and some of the layers."""
        import torch

        config = copy.deepcopy(self.config)
        config.num_hidden_layers = 1
        config.vocab_size = vocabulary
        config.pad_token_id = None  # may lie outside the small vocabulary
        config.use_cache = False
        model = build_skeleton(config)
        some = torch.nn.ModuleList()
        for index in indices:
            some.add_module(str(index), copy.deepcopy(self.skeleton.get_submodule(self.layer_name(index))))
        model.set_submodule(self.layers, some)
        model.config.num_hidden_layers = len(some)
        return model

    def _fill(self, model: Any, dtype: str, *, stand_ins: bool, head: bool) -> None:  # noqa: ANN401
        """Give a model from `_around` its tensors: ones for the stand-ins, the source's for all else."""
        import torch

        vocabulary = {f"{self._name(self._causal.get_input_embeddings())}.weight"}
        if not head:
            vocabulary |= {name for name in model.state_dict() if name.startswith(f"{self.head}.")}
        wanted = getattr(torch, dtype)
        for name, tensor in model.state_dict().items():
            if not stand_ins and name.startswith(f"{self.layers}."):
                continue
            value = torch.ones(tensor.shape, dtype=wanted) if name in vocabulary else self.read(name, wanted)
            module, _, leaf = name.rpartition(".")
            holder = model.get_submodule(module)
            is_parameter = leaf in holder._parameters  # noqa: SLF001 - torch has no public question
            setattr(holder, leaf, torch.nn.Parameter(value, requires_grad=False) if is_parameter else value)


def _widen(files: TensorFiles, name: str, values: np.ndarray[Any, Any]) -> torch.Tensor:
    """Stored numbers as a torch tensor of the type they mean."""
    import torch

    dtype = files[name].dtype
    if dtype not in {"F64", "F32", "F16", "BF16"}:
        raise BadSafetensors(f"{files[name].file}: tensor {name} is {dtype}, a floating type was expected.")
    tensor = torch.from_numpy(values)
    return tensor.view(torch.bfloat16) if dtype == "BF16" else tensor


def _refuse_incomplete(skeleton: Any, files: TensorFiles, source: Path) -> None:  # noqa: ANN401
    """Compare the checkpoint's headers with what the model needs."""
    tied = skeleton.config.tie_word_embeddings
    problems = []
    for name, tensor in sorted(skeleton.state_dict().items()):
        if name not in files:
            if not (tied and skeleton.get_submodule(name.rpartition(".")[0]) is skeleton.get_output_embeddings()):
                problems.append(Problem(where=name, message="is missing."))
        elif files[name].shape != tuple(tensor.shape):
            problems.append(Problem(where=name, message=f"is {files[name].shape}, not {tuple(tensor.shape)}."))
    if problems:
        raise BadSafetensors(
            f"{len(problems)} weights of {source} are missing or have the wrong shape",
            problems=problems[:20],
            hint="Fetch the checkpoint again.",
        )
