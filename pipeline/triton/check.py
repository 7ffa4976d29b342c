"""Re-validates any model repository: ours, a hand-made one, or one that upstream's template tool has filled.

Everything that can be seen without a GPU is looked at and every finding is reported at once, with the file, the line
where there is one, and the row of the list of sharp edges it belongs to ("TL39"; the target's preflight covers the
rows that a config shows). Nothing is started.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.errors import ConfigError, Problem
from pipeline.triton import check_engine, check_models, check_parameters
from pipeline.triton.check_load import Finding, Repository, error, load
from pipeline.triton.launch import read_deployment

__all__ = ["Finding", "check"]


def check(repository: Path, *, mount: Path | None = None) -> list[Problem]:
    """Look for everything that will fail at load or on a request.

    Args:
        repository: the model repository on this machine.
        mount: the same directory as the server sees it; None takes deployment.json's, or the place of the repository.
            Paths outside it are taken to be the same here and there.

    Returns:
        Findings, errors first, then by file.
    """
    if not repository.is_dir():
        return [error("layout", str(repository), "is no directory.", "Name the model repository.")]
    try:
        deployment = read_deployment(repository)
    except ConfigError as problem:
        return [error("layout", "deployment.json", problem.message, problem.hint)]
    place = str(mount or deployment.get("mount") or repository.resolve())
    loaded, findings = load(repository, place)
    findings += _layout(loaded)
    if not loaded.models and not findings:
        hint = "Give the folder that holds the models' folders."
        return [error("layout", str(repository), "holds no model: no folder in it has a config.pbtxt.", hint)]
    for model in loaded.models.values():
        findings += check_parameters.check(model, loaded)
        findings += check_engine.check(model, loaded)
    findings += check_models.check(loaded, deployment)
    unique = dict.fromkeys(findings)
    return sorted(unique, key=lambda finding: (finding.severity != "error", finding.where, finding.message))


def _layout(loaded: Repository) -> list[Finding]:
    """Every directory is a model to Triton: it needs config.pbtxt and a version directory with a number."""
    found = []
    for directory in sorted(path for path in loaded.directory.iterdir() if path.is_dir()):
        if directory.name.startswith("."):
            continue
        if not (directory / "config.pbtxt").is_file():
            message = "has no config.pbtxt, and Triton takes every directory for a model."
            found.append(error("layout", directory.name, message, "Add it, or move the directory elsewhere."))
        elif not any(child.is_dir() and child.name.isdigit() for child in directory.iterdir()):
            found.append(error("layout", directory.name, "has no version directory.", f"mkdir {directory.name}/1"))
    return found
