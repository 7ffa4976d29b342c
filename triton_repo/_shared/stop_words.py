"""Stop words matched on text, across the borders of tokens and chunks."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text on until a stop word is complete; the word itself and what follows are not shown.

    Text that may be the beginning of a stop word is held back until more text decides. The word that is completed first
    ends the text (the longer one if two end together), so the result does not depend on how the text was cut.

    Args:
        words: stop words; empty ones are ignored.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._words = [word for word in words if word]
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Text that may be shown after `text` arrived; nothing once a word matched."""
        if self.matched is not None:
            return ""
        if not self._words:
            return text
        text = self._held + text
        found = [(text.find(word) + len(word), -len(word), word) for word in self._words if word in text]
        if found:
            end, _, self.matched = min(found)
            self._held = ""
            return text[: end - len(self.matched)]
        keep = max(_overlap(text, word) for word in self._words)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    @property
    def is_holding(self) -> bool:
        """Some text waits because it may begin a stop word."""
        return bool(self._held)

    def finish(self) -> str:
        """Text that was held back when the stream ends without a match."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, word: str) -> int:
    """Length of the longest proper prefix of `word` that ends `text`."""
    for length in range(min(len(text), len(word) - 1), 0, -1):
        if text.endswith(word[:length]):
            return length
    return 0
