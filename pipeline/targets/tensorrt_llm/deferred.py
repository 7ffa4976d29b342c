"""The compile step that the GPU node runs once: a script, a compose service and a Kubernetes Job.

The script is guarded by a lock and by the completion manifest in the engine directory: it builds beside
the engine, puts it in place with one rename, and does nothing when the engine of this key is there.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.targets.tensorrt_llm.toolchains import Toolchain

# Paths that a command holds until the node knows them -> what the script puts there.
CHECKPOINT, ENGINE, OUTPUT_CACHE = "@checkpoint@", "@engine@", "@cache@"
_SHELL: Mapping[str, str] = {CHECKPOINT: '"$checkpoint"', ENGINE: '"$staging"', OUTPUT_CACHE: '"$cache"'}
MOUNT = "/engine"


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the node has to do.

    key: digest of checkpoint, flags and toolchain; an engine of another key is replaced.
    argv: trtllm-build with the placeholders CHECKPOINT, ENGINE and OUTPUT_CACHE.
    world_size: rank files that have to come out.
    gpu: the config's GPU word.
    sm: its compute capability, 90 for Hopper.
    workers: ranks built at once, and so GPUs.
    """

    key: str
    argv: tuple[str, ...]
    world_size: int
    gpu: str
    sm: int
    workers: int
    toolchain: Toolchain
    image: str


def write(job: Job, directory: Path) -> None:
    """Write build.sh, manifest.json, compose.yaml and job.yaml."""
    directory.mkdir(parents=True, exist_ok=True)
    script = directory / "build.sh"
    script.write_text(build_script(job), encoding="utf-8")
    script.chmod(0o755)
    manifest = {"key": job.key, "image": job.image, "tensorrt_llm": job.toolchain.tensorrt_llm, "sm": job.sm}
    manifest |= {"gpu": job.gpu, "world_size": job.world_size, "command": list(job.argv)}
    text = json.dumps(manifest, indent=2, sort_keys=True)
    (directory / "manifest.json").write_text(f"{text}\n", encoding="utf-8")
    (directory / "compose.yaml").write_text(compose(job), encoding="utf-8")
    (directory / "job.yaml").write_text(kubernetes_job(job), encoding="utf-8")


def build_script(job: Job) -> str:
    """Return the script; it takes CHECKPOINT_DIR, ENGINE_DIR and TIMING_CACHE_DIR from the environment."""
    return _SCRIPT.format(
        key=job.key,
        sm=f"{job.sm // 10}.{job.sm % 10}",
        gpu=job.gpu,
        image=shlex.quote(job.image),
        tag=job.toolchain.tag,
        version=job.toolchain.tensorrt_llm,
        last_rank=job.world_size - 1,
        command=_shell(job.argv),
    )


def _shell(argv: Sequence[str]) -> str:
    """Quote a command line for sh, one option a line."""
    words = [_SHELL.get(word) or shlex.quote(word) for word in argv]
    return re.sub(r" (?=--)", " \\\n  ", " ".join(words))


_SCRIPT = """\
#!/bin/sh
# Builds the TensorRT-LLM engine on the GPU node, once. Running it again is harmless: it waits for a run
# that is under way, and does nothing when the engine of this key is complete.
set -eu

key='{key}'
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
checkpoint=${{CHECKPOINT_DIR:-$root/checkpoint}}
engine=${{ENGINE_DIR:-$root/engine}}
timing=${{TIMING_CACHE_DIR:-$root/timing}}
staging=$engine.building
image={image}

fail() {{
  echo "build.sh: $1" >&2
  exit 1
}}

for program in flock trtllm-build; do
  command -v "$program" >/dev/null || fail "$program is not on PATH; run this inside $image"
done

exec 9>"$engine.lock"
flock 9
if grep -qs "\\"key\\": \\"$key\\"" "$engine/manifest.json"; then
  echo "build.sh: $engine is complete; nothing to do"
  exit 0
fi

gpu=unknown
capability=unknown
driver=unknown
if command -v nvidia-smi >/dev/null; then
  found=$(nvidia-smi --query-gpu=name,compute_cap,driver_version --format=csv,noheader | head -n 1)
  gpu=$(echo "$found" | cut -d , -f 1)
  capability=$(echo "$found" | cut -d , -f 2 | tr -d ' ')
  driver=$(echo "$found" | cut -d , -f 3 | tr -d ' ')
  [ "$capability" = '{sm}' ] || fail "this is $gpu (compute capability $capability); the engine is for {gpu} ({sm})"
fi

rm -rf "$staging"
trap 'rm -rf "$staging"' EXIT
trap 'exit 130' INT TERM
mkdir -p "$staging" "$timing"
# A timing cache of another image or GPU would be refused.
cache=$timing/{tag}-$(echo "$gpu" | tr -c 'A-Za-z0-9\\n' '-').cache

set -- {command}
[ ! -f "$cache" ] || set -- "$@" --input_timing_cache "$cache"
"$@" || fail "trtllm-build exited $?; the last lines above tell why (trtpipe explain LOG)"

[ -f "$staging/config.json" ] || fail "trtllm-build wrote no config.json"
rank=0
while [ "$rank" -le {last_rank} ]; do
  [ -s "$staging/rank$rank.engine" ] || fail "trtllm-build wrote no rank$rank.engine"
  rank=$((rank + 1))
done
built=$(sed -n 's/^ *"version": *"\\([^"]*\\)".*/\\1/p' "$staging/config.json" | head -n 1)
[ "$built" = '{version}' ] || fail "TensorRT-LLM $built built this, and the repository is for {version}"

cat >"$staging/manifest.json" <<MANIFEST
{{
  "key": "$key",
  "gpu": "$gpu",
  "compute_capability": "$capability",
  "driver": "$driver",
  "image": "$image",
  "tensorrt_llm": "$built"
}}
MANIFEST
sync
rm -rf "$engine.old"
[ ! -d "$engine" ] || mv "$engine" "$engine.old"
mv "$staging" "$engine"
rm -rf "$engine.old"
trap - EXIT
echo "build.sh: $engine is complete"
"""


def compose(job: Job) -> str:
    """Return a compose file with the service `engine-build`; the server waits for it to succeed."""
    return f"""\
# The server waits for the engine:
#   depends_on: {{engine-build: {{condition: service_completed_successfully}}}}
services:
  engine-build:
    image: {job.image}
    command: [/bin/sh, {MOUNT}/build/build.sh]
    volumes:
      - "${{ENGINE_ROOT:-..}}:{MOUNT}"
    environment:
      HF_HUB_OFFLINE: "1"
      TRANSFORMERS_OFFLINE: "1"
    ipc: host
    ulimits: {{memlock: -1, stack: 67108864}}
    restart: "no"
    deploy:
      resources:
        reservations:
          devices:
            - {{driver: nvidia, count: {job.workers}, capabilities: [gpu]}}
"""


def kubernetes_job(job: Job) -> str:
    """Return a Kubernetes Job; the claim `trtpipe-engine` holds the directory that has build/ in it."""
    return f"""\
apiVersion: batch/v1
kind: Job
metadata:
  name: trtpipe-engine-build
  labels: {{app.kubernetes.io/managed-by: trtpipe}}
  annotations: {{trtpipe/key: "{job.key}"}}
spec:
  backoffLimit: 1
  template:
    spec:
      restartPolicy: Never
      containers:
        - name: engine-build
          image: {job.image}
          command: [/bin/sh, {MOUNT}/build/build.sh]
          env:
            - {{name: HF_HUB_OFFLINE, value: "1"}}
            - {{name: TRANSFORMERS_OFFLINE, value: "1"}}
          resources:
            limits: {{nvidia.com/gpu: {job.workers}}}
          volumeMounts:
            - {{name: engine, mountPath: {MOUNT}}}
            - {{name: shm, mountPath: /dev/shm}}
      volumes:
        - name: engine
          persistentVolumeClaim: {{claimName: trtpipe-engine}}
        - name: shm
          emptyDir: {{medium: Memory, sizeLimit: 2Gi}}
"""
