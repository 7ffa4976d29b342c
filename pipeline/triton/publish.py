"""Puts a finished model repository where a server or a release will take it."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

from pipeline.host.files import commit_directory, disk_errors, link_or_copy

LINKED_BYTES = 2**20


def publish(repository: Path, directory: Path) -> None:
    """Put a copy of a model repository at `directory`, in one step; what trtpipe wrote there before is replaced.

    What is large is hard-linked to the store where the file system allows it; what people edit
    (config.pbtxt, model.py) is copied, so that an edit never reaches the store.

    Raises:
        HostError: the directory holds something that trtpipe did not write.
        DiskFull: nothing was changed.
    """
    directory = directory.resolve()  # "." has no name to put a staging directory beside
    staging = directory.with_name(f".{directory.name}.{uuid.uuid4().hex}.tmp")
    try:
        with disk_errors(directory.parent):
            for source in sorted(path for path in repository.rglob("*") if path.is_file()):
                target = staging / source.relative_to(repository)
                if source.stat().st_size >= LINKED_BYTES:
                    link_or_copy(source, target)
                else:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(source, target)
        commit_directory(staging, directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
