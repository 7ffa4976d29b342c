"""Locate a source checkpoint, judge it, and say what identifies it; light, and no model code runs.

A source is a Hugging Face directory, a hub id, a GGUF file, or one of these inside an installed
package. What is refused here: pickle weights, remote code that the config does not allow by name,
truncated weights and Git LFS pointers. A checkpoint that is quantized already is told by its `quant_method`;
whether it can be used is for the room that reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal, Protocol

from pipeline.checkpoints.architecture import Architecture, read_architecture
from pipeline.checkpoints.gguf import import_gguf, import_tokenizer, read_gguf_architecture
from pipeline.checkpoints.gguf_file import check_magic
from pipeline.checkpoints.hub import locate_snapshot
from pipeline.checkpoints.json_file import read_json, read_optional_json
from pipeline.checkpoints.package_file import locate_in_package
from pipeline.checkpoints.safetensors_index import PICKLE_SUFFIXES, read_checkpoint, weight_files
from pipeline.checkpoints.tokenizer import check_tokenizer, convert_tokenizer
from pipeline.config.schema import SourceConfig
from pipeline.core.digest import digest_json
from pipeline.core.progress import Progress
from pipeline.errors import BadTokenizer, ConfigError, Problem, SourceNotFound, Unreadable, UnsafeCheckpoint
from pipeline.host.files import link_or_copy

Kind = Literal["directory", "hub", "gguf", "package"]

_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer.model", "vocab.json")
_OTHER_FILES: Final = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer_config.json",
)
_CODE_FILES: Final = ("config.json", "tokenizer_config.json")


class Hasher(Protocol):
    """Hashes a file; core's FileHasher is one."""

    def digest(self, path: Path) -> str:
        """Return "sha256:<hex>" of the file's content."""
        ...


@dataclass(frozen=True, kw_only=True)
class ResolvedSource:
    """A source that exists and may be used.

    `location` is a directory, or a GGUF file when `needs_import`. `files` are the names in the directory that make up
    the checkpoint. `identity` goes into the step key: content, never where it lies. `origin` says in
    words where it comes from; `problems` are warnings. `quant_method` is config.json's word for how the weights are
    quantized already, None for a 16-bit or 32-bit checkpoint.
    """

    kind: Kind
    location: Path
    files: tuple[str, ...]
    identity: Mapping[str, str]
    needs_import: bool
    origin: str
    problems: tuple[Problem, ...] = ()
    quant_method: str | None = None

    @property
    def digest(self) -> str:
        """Digest of the content, the same wherever it lies."""
        return digest_json(dict(self.identity))

    def architecture(self) -> Architecture:
        """Read the architecture from the headers.

        Raises:
            BadGGUF, BadSafetensors, Unreadable: the files are broken.
        """
        return read_gguf_architecture(self.location) if self.location.is_file() else read_architecture(self.location)

    def write_tokenizer(self, out: Path) -> None:
        """Put the tokenizer files of the checkpoint into `out`, converted where they have to be; no weights."""
        if self.location.is_file():
            import_tokenizer(self.location, out)
            return
        for name in self.files:
            if name in (*_TOKENIZER_FILES, *_OTHER_FILES):
                link_or_copy(self.location / name, out / name)
        if self.needs_import:
            convert_tokenizer(self.location, out)

    def write(self, out: Path, progress: Progress) -> None:
        """Make the Hugging Face directory of a source that needs an import.

        A GGUF file is dequantized; a directory without tokenizer.json is linked, and its tokenizer converted.
        """
        if self.location.is_file():
            import_gguf(self.location, out, progress)
            return
        for name in self.files:
            link_or_copy(self.location / name, out / name)
        convert_tokenizer(self.location, out)


def resolve(source: SourceConfig, hasher: Hasher) -> ResolvedSource:
    """Find the checkpoint that a config names, check it and digest it.

    Raises:
        ConfigError: not exactly one of path, hub, gguf and package is set.
        SourceNotFound: it does not exist or cannot be fetched.
        UnsafeCheckpoint: pickle weights, or remote code that the config does not allow.
        BadSafetensors, BadGGUF, BadTokenizer, Unreadable: its files are broken.
    """
    named = [key for key in ("path", "hub", "gguf", "package") if getattr(source, key) is not None]
    match named:
        case ["path"] if source.path is not None:
            return _directory(source.path, source, hasher)
        case ["gguf"] if source.gguf is not None:
            return _gguf(source.gguf, hasher)
        case ["hub"] if source.hub is not None:
            return _hub(source.hub, source, hasher)
        case ["package"] if source.package is not None:
            return _package(source.package, source, hasher)
        case _:
            said = f"{' and '.join(named)} are set" if named else "none is set"
            raise ConfigError(f"source: exactly one of path, hub, gguf and package is needed; {said}.")


def _hub(hub: str, source: SourceConfig, hasher: Hasher) -> ResolvedSource:
    snapshot = locate_snapshot(hub, source.revision, with_code=source.trust_remote_code)
    resolved = _directory(snapshot.directory, source, hasher)
    problems = resolved.problems
    if source.revision != snapshot.commit:
        warning = Problem(
            message=f"'{hub}' is not pinned: {source.revision or 'no revision'} is commit {snapshot.commit} today.",
            where="source.revision",
            hint=f"Set source.revision: {snapshot.commit} so that a rebuild means the same weights.",
            severity="warning",
        )
        problems = (*problems, warning)
    identity = MappingProxyType({**resolved.identity, "hub": hub, "commit": snapshot.commit})
    origin = f"hub {hub} at {snapshot.commit}"
    return replace(resolved, kind="hub", identity=identity, origin=origin, problems=problems)


def _package(package: str, source: SourceConfig, hasher: Hasher) -> ResolvedSource:
    found = locate_in_package(package, source.file)
    resolved = _directory(found.path, source, hasher) if found.path.is_dir() else _gguf(found.path, hasher)
    return replace(resolved, kind="package", origin=f"package {package} {found.version}: {found.name}")


def _gguf(file: Path, hasher: Hasher) -> ResolvedSource:
    if not file.exists():
        raise SourceNotFound(f"{file}: there is no such file.", hint=_near(file))
    if file.is_dir():
        names = ", ".join(sorted(path.name for path in file.glob("*.gguf"))) or "none"
        raise SourceNotFound(f"{file}: a directory, expected a GGUF file. GGUF files in it: {names}.")
    check_magic(file)
    identity = MappingProxyType({"format": "gguf", "digest": hasher.digest(file)})
    return ResolvedSource(
        kind="gguf", location=file, files=(), identity=identity, needs_import=True, origin=f"GGUF {file.name}"
    )


def _directory(directory: Path, source: SourceConfig, hasher: Hasher) -> ResolvedSource:
    _check_layout(directory)
    names = {path.name for path in weight_files(directory)}
    read_checkpoint(directory)
    names |= {name for name in (*_TOKENIZER_FILES, *_OTHER_FILES) if (directory / name).exists()}
    names |= _check_code(directory, source)
    digests = {name: hasher.digest(directory / name) for name in sorted(names)}
    if "tokenizer.json" in names:
        check_tokenizer(directory, read_architecture(directory))
    return ResolvedSource(
        kind="directory",
        location=directory,
        files=tuple(digests),
        identity=MappingProxyType({"format": "huggingface", **{f"file {name}": it for name, it in digests.items()}}),
        needs_import="tokenizer.json" not in names,
        origin=f"directory {directory.name}",
        quant_method=_quant_method(directory),
    )


def _quant_method(directory: Path) -> str | None:
    settings = read_json(directory / "config.json").get("quantization_config")
    if settings is None:
        return None
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    return str(method or "unknown")


def _check_layout(directory: Path) -> None:
    """Check that config, weights and tokenizer are there, and that the weights are no pickle."""
    if not directory.exists():
        raise SourceNotFound(f"{directory}: there is no such directory.", hint=_near(directory))
    if not directory.is_dir():
        hint = "Use source.gguf for a GGUF file." if directory.suffix == ".gguf" else ""
        raise SourceNotFound(f"{directory}: a file, expected a directory with config.json.", hint=hint)
    try:
        dangling = sorted(path.name for path in directory.iterdir() if path.is_symlink() and not path.exists())
    except OSError as error:
        raise Unreadable(f"{directory}: cannot be listed ({error.strerror or error}).") from error
    if dangling:
        raise Unreadable(
            f"{directory}: '{dangling[0]}' is a symlink to a file that is not there ({len(dangling)} such).",
            hint="Download the checkpoint again.",
        )
    if not (directory / "config.json").exists():
        gguf = sorted(path.name for path in directory.glob("*.gguf"))
        hint = f"Use source.gguf for '{gguf[0]}'." if gguf else "Name the directory that holds config.json."
        raise SourceNotFound(f"{directory}: config.json is missing; not a Hugging Face checkpoint.", hint=hint)
    pickles = sorted(path.name for path in directory.iterdir() if path.suffix in PICKLE_SUFFIXES)
    if pickles and not any(directory.glob("*.safetensors*")):
        raise UnsafeCheckpoint(
            f"{directory}: the weights are pickle files ({', '.join(pickles[:3])}); loading them can run any code.",
            hint="Convert them where you trust them: AutoModelForCausalLM.from_pretrained(DIR)"
            ".save_pretrained(NEW_DIR, safe_serialization=True), then use NEW_DIR.",
        )
    if not any((directory / name).exists() for name in _TOKENIZER_FILES):
        raise BadTokenizer(
            f"{directory}: no tokenizer; expected one of {', '.join(_TOKENIZER_FILES)}.",
            hint="Copy the tokenizer files of the model next to its weights.",
        )


def _check_code(directory: Path, source: SourceConfig) -> set[str]:
    """Refuse a checkpoint that brings code, or return the code's files when the config allows it."""
    with_code = [name for name in _CODE_FILES if "auto_map" in read_optional_json(directory / name)]
    if with_code and not source.trust_remote_code:
        raise UnsafeCheckpoint(
            f"{directory / with_code[0]}: 'auto_map' asks to run Python code that the checkpoint brings.",
            hint="Read that code; if you trust it, set source.trust_remote_code: true.",
        )
    return {path.name for path in directory.glob("*.py")} if with_code else set()


def _near(path: Path) -> str:
    """Suggest a sibling of a similar name."""
    parent = path.parent
    names = sorted(sibling.name for sibling in parent.iterdir()) if parent.is_dir() else []
    close = get_close_matches(path.name, names, n=1)
    if close:
        return f"Did you mean '{parent / close[0]}'?"
    return "" if parent.is_dir() else f"The directory '{parent}' does not exist either."
