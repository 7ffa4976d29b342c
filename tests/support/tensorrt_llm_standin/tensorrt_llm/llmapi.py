"""The part of tensorrt_llm.llmapi that a server needs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class GuidedDecodingParams:
    """Strict like the real one."""

    json: str | None = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False
