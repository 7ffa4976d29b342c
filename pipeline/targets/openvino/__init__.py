"""The CPU target: ModelOpt's integers in an OpenVINO graph, run by OpenVINO GenAI's continuous batching."""

from pipeline.targets.openvino.choices import deviations
from pipeline.targets.openvino.compile import NAME, compile_engine, describe

__all__ = ["NAME", "compile_engine", "describe", "deviations"]
