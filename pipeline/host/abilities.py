"""What this machine can do, judged from installed package versions and hardware; imports none of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

State = Literal["yes", "no"]


@dataclass(frozen=True, kw_only=True)
class Ability:
    """One thing a user may want, the distributions it takes, and what brings them."""

    what: str
    distributions: tuple[str, ...]
    remedy: str


ABILITIES = (
    Ability(
        what="read GGUF checkpoints",
        distributions=("gguf", "tokenizers"),
        remedy="pip install 'trtpipe[quantize]'",
    ),
    Ability(
        what="quantize with ModelOpt and verify",
        distributions=("nvidia-modelopt", "torch", "transformers", "accelerate", "requests"),
        remedy="pip install 'trtpipe[quantize]'",
    ),
    Ability(
        what="probe NF4",
        distributions=("bitsandbytes",),
        remedy="pip install 'trtpipe[probe]'",
    ),
    Ability(
        what="compile for the CPU (openvino target)",
        distributions=("optimum-intel", "openvino", "openvino-genai", "torch", "transformers"),
        remedy="pip install 'trtpipe[openvino]'",
    ),
    Ability(
        what="serve on Triton",
        distributions=("nvidia-pytriton", "openvino-genai", "tokenizers"),
        remedy="pip install 'trtpipe[serve]'",
    ),
    Ability(
        what="call a server (generate, chat)",
        distributions=("tritonclient", "grpcio"),
        remedy="pip install 'trtpipe[client]'",
    ),
    Ability(
        what="compile TensorRT-LLM engines",
        distributions=("tensorrt-llm",),
        remedy="on a GPU node: inside the pinned container, or by the compile step that the repository carries",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Whether one ability is there; `remedy` says what to do when it is not."""

    what: str
    state: State
    missing: tuple[str, ...]
    remedy: str


def judge(versions: Mapping[str, str]) -> tuple[Finding, ...]:
    """Compare the abilities with installed versions (distribution -> version)."""
    findings = []
    for ability in ABILITIES:
        missing = tuple(name for name in ability.distributions if name not in versions)
        findings.append(
            Finding(
                what=ability.what,
                state="no" if missing else "yes",
                missing=missing,
                remedy=ability.remedy if missing else "",
            )
        )
    return tuple(findings)


def distributions() -> tuple[str, ...]:
    """Every distribution that some ability takes, sorted."""
    return tuple(sorted({name for ability in ABILITIES for name in ability.distributions}))
