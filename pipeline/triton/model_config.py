"""Triton model configurations as the protobuf message they are, and checks that Triton makes late or not at all.

A config.pbtxt is parsed into `inference.ModelConfig`, changed as a message and printed; text is never pasted into text.
`render` parses what it printed and compares. The message definition ships with tritonclient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.errors import ConfigError, Problem

# Generated code without types: the whole message, and a part of it (a step, a tensor).
ModelConfig = Any
Message = Any


def parse(text: str, where: str) -> ModelConfig:
    """Read config.pbtxt text.

    Args:
        text: protobuf text format.
        where: file name for the error.

    Raises:
        ConfigError: not a ModelConfig, with the parser's line and column.
    """
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    try:
        return text_format.Parse(text, model_config_pb2.ModelConfig())
    except text_format.ParseError as error:
        raise ConfigError(
            f"{where}:{error}", hint="Fix the template; it must be a valid Triton ModelConfig."
        ) from error


def render(config: ModelConfig) -> str:
    """Print a configuration; the result parses back to an equal message.

    Raises:
        ConfigError: it does not (a bug of protobuf or of a value such as invalid UTF-8).
    """
    from google.protobuf import text_format

    text: str = text_format.MessageToString(config)
    if parse(text, config.name) != config:
        raise ConfigError(f"{config.name}: printed configuration does not parse back to what was printed")
    return text


def set_parameter(config: ModelConfig, key: str, value: str) -> None:
    """Set one entry of `parameters` that the template has.

    Raises:
        ConfigError: the template has no such parameter, so nothing would read it.
    """
    if key not in config.parameters:
        known = ", ".join(sorted(config.parameters))
        raise ConfigError(f"{config.name}: the template has no parameter '{key}'", hint=f"It has {known}.")
    config.parameters[key].string_value = value


def data_type(name: str) -> int:
    """Return the number of a tensor type, such as "TYPE_FP32"."""
    from tritonclient.grpc.model_config_pb2 import DataType

    number: int = DataType.Value(name)
    return number


def find_problems(configs: Mapping[str, ModelConfig]) -> list[Problem]:
    """Check the models of one repository together.

    Args:
        configs: directory name -> configuration.

    Returns:
        Every finding: names, placeholders left over, unequal batch sizes, unequal decoupled flags, and
        ensembles whose steps do not fit together.
    """
    problems = [
        Problem(message=f"is named '{config.name}', its directory is '{directory}'", where=directory)
        for directory, config in configs.items()
        if config.name != directory
    ]
    for directory, config in configs.items():
        if "${" in str(config):
            problems.append(Problem(message="a placeholder '${' was never filled", where=directory))
    batch_sizes = {directory: config.max_batch_size for directory, config in configs.items()}
    if len(set(batch_sizes.values())) > 1:
        problems.append(Problem(message=f"max_batch_size must be equal in all models, is {batch_sizes}"))
    decoupled = {
        name: configs[name].model_transaction_policy.decoupled
        for name in ("tensorrt_llm", "tensorrt_llm_bls")
        if name in configs
    }
    if len(set(decoupled.values())) > 1:
        problems.append(Problem(message=f"the decoupled flag must be equal, is {decoupled}"))
    return problems + find_wiring_problems(configs)


def find_wiring_problems(configs: Mapping[str, ModelConfig]) -> list[Problem]:
    """Return where the steps of an ensemble do not fit together."""
    return [
        problem
        for directory, config in configs.items()
        if config.platform == "ensemble"
        for problem in _Wiring(directory, config, configs).problems()
    ]


class _Wiring:
    """The tensors that flow through one ensemble."""

    def __init__(self, directory: str, ensemble: ModelConfig, configs: Mapping[str, ModelConfig]) -> None:
        self._directory = directory
        self._ensemble = ensemble
        self._configs = configs
        # What each tensor of the ensemble is, once something produced it.
        self._tensors = {tensor.name: tensor for tensor in ensemble.input}
        self._consumed: set[str] = set()

    def problems(self) -> list[Problem]:
        """Every place where a tensor is missing, unread, or of another type or shape."""
        found = [Problem(message=text, where=self._directory) for text in self._find()]
        return sorted(found, key=str)

    def _find(self) -> Iterator[str]:
        steps = [step for step in self._ensemble.ensemble_scheduling.step if step.model_name in self._configs]
        for step in self._ensemble.ensemble_scheduling.step:
            if step.model_name not in self._configs:
                yield f"step '{step.model_name}' is not a model of this repository"
        for step in steps:
            yield from self._produce(step)
        for step in steps:
            yield from self._consume(step)
        for output in self._ensemble.output:
            yield from self._compare(output, output.name, "output")
        for name in sorted(self._tensors.keys() - self._consumed):
            yield f"tensor '{name}' is produced or accepted and nothing reads it"

    def _produce(self, step: Message) -> Iterator[str]:
        outputs = {tensor.name: tensor for tensor in self._configs[step.model_name].output}
        for key, value in sorted(step.output_map.items()):
            if key not in outputs:
                yield f"{step.model_name} has no output '{key}'"
            elif value in self._tensors:
                yield f"tensor '{value}' is produced twice"
            else:
                self._tensors[value] = outputs[key]

    def _consume(self, step: Message) -> Iterator[str]:
        inputs = {tensor.name: tensor for tensor in self._configs[step.model_name].input}
        optional = {tensor.name for tensor in self._ensemble.input if tensor.optional}
        for key in sorted(step.input_map.keys() - inputs.keys()):
            yield f"{step.model_name} has no input '{key}'"
        for key, tensor in sorted(inputs.items()):
            value = step.input_map.get(key)
            if value is None:
                if not tensor.optional:
                    yield f"{step.model_name} needs '{key}' and the ensemble does not give it"
                continue
            if value in optional and not tensor.optional:
                yield f"{step.model_name} needs '{key}', but the ensemble's '{value}' is optional"
            yield from self._compare(tensor, value, f"{step.model_name} input '{key}'")

    def _compare(self, reader: Message, name: str, role: str) -> Iterator[str]:
        from tritonclient.grpc.model_config_pb2 import DataType

        writer = self._tensors.get(name)
        self._consumed.add(name)
        if writer is None:
            yield f"{role}: nothing produces tensor '{name}'"
            return
        if writer.data_type != reader.data_type:
            types = (DataType.Name(writer.data_type), DataType.Name(reader.data_type))
            yield f"{role}: tensor '{name}' is written as {types[0]} and read as {types[1]}"
        same_rank = len(writer.dims) == len(reader.dims)
        fits = all(-1 in pair or pair[0] == pair[1] for pair in zip(writer.dims, reader.dims, strict=False))
        if not (same_rank and fits):
            yield f"{role}: tensor '{name}' is written as {list(writer.dims)} and read as {list(reader.dims)}"
