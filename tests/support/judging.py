"""Judges configs by the legality table, for the tests of the table and of the shapes."""

from __future__ import annotations

from pipeline.config.legality import check
from pipeline.config.schema import BuildConfig
from pipeline.errors import Problem
from tests.support.architectures import Facts

GPU = {"target": "tensorrt_llm", "gpu": "H100"}
LLMAPI = {"target": "tensorrt_llm_llmapi", "gpu": "H100"}


def config(**sections: object) -> BuildConfig:
    """A config with these sections; dtype follows the format."""
    values: dict[str, object] = {"name": "a", "source": {"path": "m"}, **sections}
    return BuildConfig.model_validate(values)


def judge(facts: Facts | None, **sections: object) -> list[str]:
    """Errors as 'key: message hint'."""
    return [str(problem) for problem in check(config(**sections), facts) if problem.severity == "error"]


def warnings(facts: Facts | None, **sections: object) -> list[Problem]:
    """Warnings only."""
    return [problem for problem in check(config(**sections), facts) if problem.severity == "warning"]
