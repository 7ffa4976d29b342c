"""One run of trtllm-build, on this host or in a container: logged, explained when it fails, never left behind."""

from __future__ import annotations

import subprocess
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pipeline.config.deployment import EngineConfig
from pipeline.core.progress import Progress
from pipeline.errors import ToolError
from pipeline.host.process import Tool
from pipeline.targets.tensorrt_llm.command import with_files
from pipeline.targets.tensorrt_llm.log import PHASES, BuildLog
from pipeline.targets.tensorrt_llm.place import OFFLINE, Place, container_argv

# Lines that a cause is looked for in.
EXPLAINED_LINES: Final = 400
REMOVE_TIMEOUT_S: Final = 60

Explain = Callable[[Sequence[str]], str]


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is run where.

    argv: the command for a checkpoint directory and an engine directory.
    checkpoint, output: those directories here; `output` exists.
    cache: timing cache to start from, when it exists, and to write.
    log_path: the log; the reproduce script lies beside it.
    """

    place: Place
    image: str
    engine: EngineConfig
    argv: Callable[[str, str], tuple[str, ...]]
    checkpoint: Path
    output: Path
    cache: Path
    log_path: Path

    def start(self, progress: Progress, explain: Explain, *, ranks: int) -> str:
        """Run to the end and return the version of TensorRT-LLM that the log names, "" for none.

        Raises:
            HostError: the program cannot be started.
            ToolError: it failed; the hint begins with the likely cause.
        """
        tail: deque[str] = deque(maxlen=EXPLAINED_LINES)
        container = f"trtpipe-build-{uuid.uuid4().hex[:12]}"
        tool = Tool(argv=self.command(container), log_path=self.log_path, cwd=self.output, env=OFFLINE)
        with progress.track("trtllm-build", len(PHASES) * ranks, "phases") as advance, self._removed(container):
            log = BuildLog(advance, progress.note)

            def take(line: str) -> None:
                tail.append(line)
                log.take(line)

            try:
                tool.run(take)
            except ToolError as error:
                hint = f"{explain(tuple(tail))} {error.hint}".strip()
                raise ToolError(error.message, hint=hint, log_path=error.log_path) from error
        return log.version

    def command(self, container: str) -> tuple[str, ...]:
        """Return the command line; `container` names the container."""
        build = self.engine.build
        start, result = build.input_timing_cache or self.cache, build.output_timing_cache or self.cache
        # trtllm-build ignores an input that does not exist; leaving it out keeps the log clean.
        known = str(start) if start.is_file() else None
        if self.place.kind == "host":
            argv = (self.place.program, *self.argv(str(self.checkpoint), str(self.output))[1:])
            return with_files(argv, self.engine, input_cache=known, output_cache=str(result))
        argv = with_files(self.argv("/checkpoint", "/engine"), self.engine, input_cache=known, output_cache=str(result))
        mounts = {self.checkpoint: "/checkpoint:ro", self.output: "/engine"} | self._file_mounts(known, result)
        return container_argv(self.place, self.image, argv, name=container, mounts=mounts)

    def _file_mounts(self, input_cache: str | None, output_cache: Path) -> dict[Path, str]:
        """Directories of files that the config or the cache names, in the container under their own paths."""
        build = self.engine.build
        written = {output_cache.parent} | ({build.visualize_network} if build.visualize_network else set())
        read = {Path(name) for name in build.lora_dir}
        read |= {build.model_cls_file.parent} if build.model_cls_file else set()
        read |= {Path(input_cache).parent} if input_cache else set()
        mounts = {path: f"{path}:ro" for path in sorted(read - written)}
        return mounts | {path: str(path) for path in sorted(written)}

    @contextmanager
    def _removed(self, container: str) -> Iterator[None]:
        """Remove the container when its client ended badly: it would build on without us."""
        try:
            yield
        except BaseException:
            if self.place.kind == "container":
                # It is gone already when it ended by itself, so the answer does not matter.
                argv = [self.place.program, "rm", "--force", container]
                subprocess.run(argv, check=False, capture_output=True, timeout=REMOVE_TIMEOUT_S)
            raise
