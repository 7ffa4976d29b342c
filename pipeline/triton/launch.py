"""How the server of a repository is started: ranks, environment and flags, for one GPU or many.

Modes and rules: NVIDIA/TensorRT-LLM triton_backend/scripts/launch_triton_server.py@0a2e2c1.

- leader: one process per rank under mpirun; rank 0 serves, the others load the engine's model only.
- orchestrator: one server process; the backend spawns the ranks. For several engines in one server.
- orchestrator without spawning: rank 0 orchestrates, the other ranks are started here and belong to engines by
  `participant_ids`. For clusters that do not let MPI spawn.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pipeline.errors import ConfigError
from pipeline.triton.backend_parameters import CORE_MODEL
from pipeline.triton.engine_directory import in_repository, read_mapping, world_size
from pipeline.triton.model_config import parse

MOUNT: Final = "/models"
DEPLOYMENT: Final = "deployment.json"
ENGINE_BACKEND: Final = "tensorrtllm"
TRITONSERVER: Final = "/opt/tritonserver/bin/tritonserver"
# mpirun refuses root otherwise, and NVIDIA's images run as root.
_MPIRUN: Final = ("mpirun", "--allow-run-as-root")


@dataclass(frozen=True, kw_only=True)
class EngineModel:
    """A model of the backend tensorrtllm and its ranks; gpus is the highest GPU number it uses plus one."""

    name: str
    ranks: int
    gpus: int


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What a command line follows from.

    mode: leader, orchestrator, orchestrator_no_spawn, or single for a server without ranks of its own.
    mount: the repository as the server sees it.
    environment: variables that the processes need.
    """

    mode: str
    mount: str
    engines: tuple[EngineModel, ...]
    environment: tuple[str, ...] = ()

    @property
    def processes(self) -> int:
        """Server processes to start."""
        if self.mode == "leader":
            return self.engines[0].ranks
        if self.mode == "orchestrator_no_spawn":
            return 1 + sum(engine.ranks for engine in self.engines)
        return 1


def launch_argv(repository: Path, *, mount: str | None = None) -> tuple[str, ...]:
    """Return the command line that serves a repository; nothing is started.

    Args:
        repository: as it lies here.
        mount: as the server sees it; None takes what deployment.json says, or the place here.

    Raises:
        ConfigError: a configuration cannot be parsed, or an engine's number of ranks is not known.
    """
    return argv(plan(repository, mount=mount))


def plan(repository: Path, *, mount: str | None = None) -> Launch:
    """Read from a repository how its server has to be started; see `launch_argv`."""
    deployment = read_deployment(repository)
    mount = mount or deployment.get("mount") or str(repository.resolve())
    engines = tuple(_engines(repository, mount, deployment))
    mode = str(deployment.get("launch_mode", "leader"))
    if not engines:
        mode = "single"
    elif mode == "leader" and len(engines) > 1:
        # NVIDIA/TensorRT-LLM#423: two engines in one leader-mode server end in an MPI error.
        mode = "orchestrator"
    elif mode == "leader" and engines[0].ranks == 1:
        mode = "single"
    return Launch(mode=mode, mount=mount, engines=engines, environment=tuple(deployment.get("environment", ())))


def argv(launch: Launch) -> tuple[str, ...]:
    """Build the command line; pure."""
    variables = list(launch.environment)
    if launch.mode.startswith("orchestrator"):
        spawn = int(launch.mode == "orchestrator")
        variables += ["TRTLLM_ORCHESTRATOR=1", f"TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES={spawn}"]
    prefix = ("env", *variables) if variables else ()
    if launch.mode == "single":
        return (*prefix, *_server(launch, 0))
    words = [*prefix, *_MPIRUN]
    for rank in range(launch.processes):
        words += [":"] * (rank > 0) + ["-n", "1", *_server(launch, rank)]
    return tuple(words)


def _server(launch: Launch, rank: int) -> Iterator[str]:
    yield from (TRITONSERVER, f"--model-repository={launch.mount}")
    if rank:
        yield "--model-control-mode=explicit"
        yield from (f"--load-model={engine.name}" for engine in launch.engines)
    if launch.mode == "orchestrator":
        # Spawned ranks share the GPUs with this process, which would keep memory pools on each.
        yield from ("--pinned-memory-pool-byte-size=0", "--enable-peer-access=false")
        gpus = max(engine.gpus for engine in launch.engines)
        yield from (f"--cuda-memory-pool-byte-size={gpu}:0" for gpu in range(gpus))
    yield from ("--http-port=8000", "--grpc-port=8001", "--metrics-port=8002", "--disable-auto-complete-config")
    yield f"--backend-config=python,shm-region-prefix-name=prefix{rank}_"


def read_deployment(repository: Path) -> dict[str, Any]:
    """Return deployment.json of a repository; {} for one that has none."""
    path = repository / DEPLOYMENT
    if not path.is_file():
        return {}
    try:
        deployment = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}", hint="Emit the repository again.") from error
    return deployment if isinstance(deployment, dict) else {}


def _engines(repository: Path, mount: str, deployment: dict[str, Any]) -> Iterator[EngineModel]:
    for path in sorted(repository.glob("*/config.pbtxt")):
        config = parse(path.read_text(encoding="utf-8"), str(path))
        if config.backend != ENGINE_BACKEND:
            continue
        name = path.parent.name
        ranks = deployment.get("world_size") if name == CORE_MODEL else None
        if ranks is None:
            engine = in_repository(config.parameters["gpt_model_path"].string_value, repository, mount)
            ranks = world_size(read_mapping(engine))
        gpus = config.parameters["gpu_device_ids"].string_value if "gpu_device_ids" in config.parameters else ""
        numbers = [int(number) for group in gpus.split(";") for number in group.split(",") if number.strip().isdigit()]
        yield EngineModel(name=name, ranks=int(ranks), gpus=max(numbers, default=int(ranks) - 1) + 1)


def launch_script(launch: Launch, *, image: str) -> str:
    """Return launch.sh: checks what can be checked before the server starts, then becomes the server."""
    command = " \\\n  ".join(_lines(argv(launch)))
    return _SCRIPT.format(
        mount=launch.mount,
        image=image,
        last_rank=max((engine.ranks for engine in launch.engines), default=0) - 1,
        core=CORE_MODEL,
        command=command,
    )


def _lines(words: tuple[str, ...]) -> Iterator[str]:
    """Put a process and its flags on lines of their own."""
    line: list[str] = []
    for word in words:
        if line and (word.startswith("--") or word == ":"):
            yield " ".join(line)
            line = []
        line.append(shlex.quote(word))
    yield " ".join(line)


_SCRIPT = """\
#!/bin/sh
# Starts the server of this repository, inside {image}
# with the repository mounted at {mount}. Not run where it was written: there was no GPU.
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
fail() {{
  echo "launch.sh: $1" >&2
  exit 1
}}
[ "$here" = '{mount}' ] || fail "paths in config.pbtxt begin with {mount}, and this is $here: mount it there"

engine=$here/{core}/1/engine
rank=0
while [ "$rank" -le {last_rank} ]; do
  [ -s "$engine/rank$rank.engine" ] || fail "$engine/rank$rank.engine is missing: run sh {core}/1/build/build.sh first"
  rank=$((rank + 1))
done
if [ {last_rank} -gt 0 ] && [ "$(df -Pk /dev/shm | awk 'NR==2 {{print $2}}')" -lt 1048576 ]; then
  # triton-inference-server/tensorrtllm_backend#377, #576: ranks hang in a small /dev/shm.
  fail "/dev/shm is smaller than 1 GiB: start the container with --shm-size=2g or --ipc=host"
fi

exec {command}
"""
