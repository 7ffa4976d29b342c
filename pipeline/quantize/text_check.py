"""What is wrong with the text files that a config names, before anything heavy runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from pipeline.config.schema import BuildConfig
from pipeline.errors import ConfigError, Problem, Unreadable
from pipeline.quantize.calibration import text_sets
from pipeline.quantize.documents import SHIPPED_HELD, Document, common_documents, read_documents
from pipeline.quantize.tasks import read_task


def check_texts(config: BuildConfig, provenance: Mapping[str, str]) -> Iterator[Problem]:
    """Read every text file of a config: calibration, training, held text and the gate's tasks.

    Malformed rows are errors by file:line. A warning is what makes a proof worth less: documents of the held text
    that the observers see too.

    Args:
        config: its hub sets are located.
        provenance: key path -> where it is written.
    """
    fed: dict[str, list[Document]] = {}
    for one in text_sets(config.calibration):
        documents, problems = check_text(one.path, one.key, provenance)
        yield from problems
        fed[one.name] = documents
    held, problems = check_text(config.verify.dataset or SHIPPED_HELD, "verify.dataset", provenance)
    yield from problems
    for name, documents in fed.items():
        common = common_documents(documents, held)
        if common:
            yield Problem(
                where=_where("verify.dataset", provenance),
                message=f"{common} of {len(held)} documents of the held text are in the calibration text {name} too, "
                "so the proof and the gate see text that the ranges were made from.",
                hint="Give verify.dataset text that is not calibrated on.",
                severity="warning",
            )
    if config.finetune.dataset is not None:
        yield from check_text(config.finetune.dataset, "finetune.dataset", provenance)[1]
    for task in config.quality.tasks:
        try:
            read_task(task)
        except (ConfigError, Unreadable) as error:
            yield from _of_error(error, "quality.tasks", provenance)


def check_text(path: Path, key: str, provenance: Mapping[str, str]) -> tuple[list[Document], list[Problem]]:
    """Read a text file; the documents, or the problems that it has, each at its file:line."""
    try:
        return read_documents(path, key=key), []
    except (ConfigError, Unreadable) as error:
        return [], list(_of_error(error, key, provenance))


def _of_error(error: ConfigError | Unreadable, key: str, provenance: Mapping[str, str]) -> Iterator[Problem]:
    if error.problems:
        yield from (replace(problem, hint=problem.hint or error.hint) for problem in error.problems)
    else:
        yield Problem(where=_where(key, provenance), message=f"{error.message}.", hint=error.hint)


def _where(key: str, provenance: Mapping[str, str]) -> str:
    path = key.partition(" ")[0]
    return f"{provenance.get(path, '')} {key}".strip()
