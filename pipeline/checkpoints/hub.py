"""Find a hub id in the local cache, or download it: safetensors, JSON and text, never pickle.

The only importer of huggingface_hub. The cache is looked at first and the network only when the
cache lacks the revision; time-outs are short, so that a machine without network learns it soon.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pipeline.checkpoints.safetensors_index import PICKLE_SUFFIXES, weight_files
from pipeline.errors import BadSafetensors, SourceNotFound, UnsafeCheckpoint
from pipeline.host.files import disk_errors

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?")
_WANTED: Final = ("*.safetensors", "*.json", "*.jinja", "merges.txt", "tokenizer.model")
# Folders repeat the weights in other forms (original/, onnx/); consolidated* is Mistral's own second copy.
_UNWANTED: Final = ("*/*", "consolidated*")
_DEFAULT_ENDPOINT: Final = "https://huggingface.co"
_TIMEOUT_S: Final = 5.0
_TRUE: Final = ("1", "ON", "YES", "TRUE")  # huggingface_hub's words for a switch that is on


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A revision of a hub id on disk and the commit that it is."""

    directory: Path
    commit: str


def locate_snapshot(
    hub: str, revision: str | None, *, with_code: bool = False, environment: Mapping[str, str] = os.environ
) -> Snapshot:
    """Return the local snapshot of a hub id, downloading it when the cache lacks it.

    Args:
        hub: 'owner/name'.
        revision: commit, branch or tag; None is the default branch.
        with_code: also fetch the checkpoint's Python files.
        environment: read for HF_HUB_CACHE, HF_HOME and HF_ENDPOINT, as huggingface_hub does.

    Raises:
        SourceNotFound: not in the cache and not reachable; says what was tried and where.
        UnsafeCheckpoint: the hub has it as pickle files only.
        DiskFull: the cache's file system is full.
    """
    if not _HUB_ID.fullmatch(hub):
        raise SourceNotFound(
            f"'{hub}' is not a hub id.", hint="A hub id reads 'owner/name'; use source.path for a path."
        )
    cache = _cache_directory(environment)
    cached = _from_cache(hub, revision, cache)
    return cached if cached is not None else _download(hub, revision, cache, with_code, environment)


def locate_data_file(hub: str, file: str, revision: str, *, environment: Mapping[str, str] = os.environ) -> Path:
    """Return a file of a data set on the hub from the local cache, downloading it when the cache lacks it.

    Args:
        hub: 'owner/name' of the data set.
        file: its path in there.
        revision: a commit.
        environment: as in `locate_snapshot`; HF_HUB_OFFLINE keeps to the cache.

    Raises:
        SourceNotFound: not in the cache and not reachable, or not there; says what was tried and where.
        DiskFull: the cache's file system is full.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    cache = _cache_directory(environment)
    endpoint = environment.get("HF_ENDPOINT") or _DEFAULT_ENDPOINT
    name = f"'{file}' of data set '{hub}' at revision '{revision}'"
    try:
        with disk_errors(cache):
            found = hf_hub_download(
                hub, file, repo_type="dataset", revision=revision, cache_dir=cache, endpoint=endpoint,
                etag_timeout=_TIMEOUT_S, local_files_only=environment.get("HF_HUB_OFFLINE", "0") in _TRUE,
            )  # fmt: skip
    except LocalEntryNotFoundError as error:
        raise SourceNotFound(
            f"{name} is not in the cache {cache}, and {endpoint} cannot be reached.",
            hint="On a machine with network run 'huggingface-cli download --repo-type dataset "
            f"{hub} {file} --revision {revision}' and copy the cache, or set path to a file.",
        ) from error
    except (EntryNotFoundError, RepositoryNotFoundError) as error:
        raise SourceNotFound(
            f"{name} does not exist at {endpoint}, or is private or gated.",
            hint="Check the spelling, or run 'huggingface-cli login'.",
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise SourceNotFound(
            f"{name} cannot be fetched from {endpoint} ({error}).", hint="Set path to a file."
        ) from error
    return Path(found)


def _cache_directory(environment: Mapping[str, str]) -> Path:
    """Return where huggingface_hub keeps repositories, by its documented rules."""
    for key in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environment.get(key):
            return Path(environment[key]).expanduser()
    if environment.get("HF_HOME"):
        return Path(environment["HF_HOME"]).expanduser() / "hub"
    return Path(environment.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface" / "hub"


def _from_cache(hub: str, revision: str | None, cache: Path) -> Snapshot | None:
    """Return the cached snapshot when it is there with all its weights."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        found = snapshot_download(hub, revision=revision, cache_dir=cache, local_files_only=True)
    except LocalEntryNotFoundError:
        return None
    directory = Path(found)
    return Snapshot(directory=directory, commit=directory.name) if _is_complete(directory) else None


def _is_complete(directory: Path) -> bool:
    """Tell whether config and all weights are there: an interrupted download leaves some of its files."""
    try:
        weight_files(directory)
    except (SourceNotFound, BadSafetensors):
        return False
    return (directory / "config.json").exists()


def _download(hub: str, revision: str | None, cache: Path, with_code: bool, environment: Mapping[str, str]) -> Snapshot:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    endpoint = environment.get("HF_ENDPOINT") or _DEFAULT_ENDPOINT
    name = f"hub id '{hub}'" + (f" at revision '{revision}'" if revision else "")
    try:
        api = HfApi(endpoint=endpoint)
        # Guard: asked first, because snapshot_download answers a missing network with whatever is cached.
        siblings = api.model_info(hub, revision=revision, timeout=_TIMEOUT_S).siblings or []
        _refuse_pickle_only(name, [sibling.rfilename for sibling in siblings])
        with disk_errors(cache):
            found = api.snapshot_download(
                hub,
                revision=revision,
                cache_dir=cache,
                allow_patterns=[*_WANTED, *(["*.py"] if with_code else [])],
                ignore_patterns=list(_UNWANTED),
                etag_timeout=_TIMEOUT_S,
                max_workers=2,
            )
    except GatedRepoError as error:
        raise SourceNotFound(
            f"{name} is gated at {endpoint}.", hint="Accept its terms there and run 'huggingface-cli login'."
        ) from error
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise SourceNotFound(
            f"{name} does not exist at {endpoint}, or is private.",
            hint="Check the spelling, or run 'huggingface-cli login'.",
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        pinned = f" --revision {revision}" if revision else ""
        raise SourceNotFound(
            f"{name} is not in the cache {cache}, and {endpoint} cannot be reached ({type(error).__name__}).",
            hint=f"On a machine with network run 'huggingface-cli download {hub}{pinned}' and copy the cache, "
            "or set source.path to a directory with the checkpoint.",
        ) from error
    directory = Path(found)
    return Snapshot(directory=directory, commit=directory.name)


def _refuse_pickle_only(name: str, files: list[str]) -> None:
    pickles = [file for file in files if "/" not in file and file.endswith(PICKLE_SUFFIXES)]
    if pickles and not any(file.endswith(".safetensors") for file in files):
        raise UnsafeCheckpoint(
            f"{name} has pickle weights only ({', '.join(pickles[:3])}); loading them can run any code.",
            hint="Look for a revision or a sibling with safetensors, or convert it where you trust it.",
        )
