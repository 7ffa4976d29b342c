"""Exit codes are a contract with scripts."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from pipeline import errors
from pipeline.errors import Problem, TrtpipeError

pytestmark = pytest.mark.fast

CLASSES = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, TrtpipeError) and kind is not TrtpipeError
]
README = Path(__file__).parents[2] / "README.md"


def test_every_failure_has_its_own_exit_code() -> None:
    """No two classes share a code, and none takes 0, 1 or 2."""
    codes = [kind.exit_code for kind in CLASSES]
    assert len(codes) == len(set(codes)) == 20
    assert not {0, 1, 2} & set(codes)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_exit_code_is_documented(kind: type[TrtpipeError]) -> None:
    """The tree in the module and the README name each class with its code."""
    assert re.search(rf"{kind.__name__}\s+{kind.exit_code}\b", errors.__doc__ or "")
    assert re.search(rf"^\| {kind.exit_code} \|", README.read_text(), re.MULTILINE)
    assert kind.__doc__


def test_an_error_lists_every_problem_with_its_place_and_hint() -> None:
    """All problems at once, then the hint of the whole."""
    error = errors.ConfigError(
        "two things are wrong",
        hint="Mend both.",
        problems=[
            Problem(message="'fp88' is not a format.", where="a.yaml:3 format", hint="Did you mean 'fp8'?"),
            Problem(message="too long", where="a.yaml:9 name"),
        ],
    )
    assert str(error).splitlines() == [
        "two things are wrong",
        "  a.yaml:3 format: 'fp88' is not a format. Did you mean 'fp8'?",
        "  a.yaml:9 name: too long",
        "  Mend both.",
    ]
