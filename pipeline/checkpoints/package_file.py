"""Find a checkpoint inside an installed Python distribution, by its file list; nothing is imported."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path

from pipeline.errors import SourceNotFound


@dataclass(frozen=True, kw_only=True)
class PackageFile:
    """A file or directory of a distribution: its name there, where it lies, and the distribution's version."""

    name: str
    path: Path
    version: str


def locate_in_package(package: str, file: str | None) -> PackageFile:
    """Find `file`, or an unambiguous end of its path, in an installed distribution.

    Raises:
        SourceNotFound: the distribution is not installed, or has no such file; names what comes near.
    """
    found = _distribution(package)
    names = [str(path) for path in found.files or () if ".." not in path.parts]
    candidates = _candidates(names)
    listed = "\n".join(f"    {name}" for name in candidates) or "    none"
    if file is None:
        raise SourceNotFound(f"source.file is needed with package '{package}'. Checkpoints in it:\n{listed}")
    wanted = file.strip("/")
    directories = {str(parent) for name in names for parent in Path(name).parents if str(parent) != "."}
    matches = [name for name in (*names, *sorted(directories)) if name == wanted or name.endswith(f"/{wanted}")]
    if wanted in matches:
        matches = [wanted]
    if len(matches) != 1:
        said = f"'{file}' is ambiguous ({', '.join(matches)})" if matches else f"there is no '{file}'"
        close = get_close_matches(wanted, names, n=1)
        hint = f"Did you mean '{close[0]}'?" if close and not matches else ""
        raise SourceNotFound(f"package '{package}': {said}. Checkpoints in it:\n{listed}", hint=hint)
    path = Path(str(found.locate_file(matches[0])))
    if not path.exists():
        raise SourceNotFound(
            f"package '{package}': '{matches[0]}' is in its file list and not on disk.",
            hint=f"Run 'pip install --force-reinstall --no-deps {package}'.",
        )
    return PackageFile(name=matches[0], path=path, version=found.version)


def _distribution(package: str) -> Distribution:
    try:
        return distribution(package)
    except (PackageNotFoundError, ValueError) as error:
        installed = sorted({str(each.name) for each in distributions() if each.name})
        close = get_close_matches(package, installed, n=1)
        hint = f"Did you mean '{close[0]}'?" if close else f"Run 'pip install {package}'."
        raise SourceNotFound(f"package '{package}' is not installed here.", hint=hint) from error


def _candidates(names: list[str]) -> list[str]:
    """List GGUF files, and directories that hold config.json beside safetensors."""
    weights = {str(Path(name).parent) for name in names if name.endswith(".safetensors")}
    configs = {str(Path(name).parent) for name in names if Path(name).name == "config.json"}
    return sorted([*(name for name in names if name.endswith(".gguf")), *(weights & configs)])
