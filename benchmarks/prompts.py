"""Prompts of an exact token length, the same for every benchmark: text and ids are two views of one thing.

Each prompt is a seeded draw of words that are one token each, so no two share a prefix worth caching and
the text tokenizes to exactly the ids (checked).
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

PROMPT_TOKENS = 180
OUTPUT_TOKENS = 64
REQUESTS = {1: 4, 16: 32}
"""Measured requests at each concurrency; one warm-up round of the same width precedes."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A text and the ids it tokenizes to, without added special tokens."""

    text: str
    ids: tuple[int, ...]


def make_prompts(tokenizer_json: Path, count: int, *, seed: int = 0, n_tokens: int = PROMPT_TOKENS) -> list[Prompt]:
    """Make `count` prompts of `n_tokens` tokens each."""
    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    words = sorted(token[1:] for token in tokenizer.get_vocab() if re.fullmatch(r"[Ġ▁][a-z]{3,8}", token))
    draw = random.Random(seed)  # noqa: S311 - a workload, not a secret
    prompts: list[Prompt] = []
    for _ in range(count):
        text = "".join(" " + word for word in draw.choices(words, k=n_tokens))
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if len(ids) != n_tokens:
            raise ValueError(f"{tokenizer_json}: {n_tokens} words became {len(ids)} tokens")
        prompts.append(Prompt(text=text, ids=tuple(ids)))
    return prompts
