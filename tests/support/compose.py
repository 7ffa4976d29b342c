"""Reads compose files as `docker compose` would, as far as tests ask: schema, defaults of variables, merged keys."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import yaml

SCHEMA = Path(__file__).parent / "schemas" / "compose-spec.json"
_VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?:(?P<operator>:?[-?])(?P<word>[^}]*))?\}")


def read_compose(path: Path) -> dict[str, Any]:
    """Parse a compose file; YAML merge keys are resolved, variables stay."""
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(document, dict)
    return document


def schema_errors(document: Mapping[str, Any]) -> list[str]:
    """Validate against the Compose specification."""
    validator = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text(encoding="utf-8")))
    return [f"{list(error.absolute_path)}: {error.message}" for error in validator.iter_errors(document)]


def with_defaults(value: str, **variables: str) -> str:
    """Replace variables by the given values or their defaults; a required one that is not given stays as it is."""

    def replacement(match: re.Match[str]) -> str:
        name, operator = match["name"], match["operator"] or ""
        return variables.get(name) or (match["word"] if operator.endswith("-") else match[0])

    return _VARIABLE.sub(replacement, value).replace("$$", "$")
