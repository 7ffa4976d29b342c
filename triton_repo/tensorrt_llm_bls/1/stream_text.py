"""Text of one generated sequence, from its first id to its end."""

from __future__ import annotations

from _shared.stop_words import StopMatcher
from _shared.token_text import TextDecoder, TokenBytes


class StreamText:
    """Turns ids into visible text and knows why the text ended.

    Args:
        bytes_of: bytes of each id.
        stop_words: words that end the text.
        stop_ids: ids that end the text.
        max_tokens: length at which the engine ends the sequence.
    """

    def __init__(self, bytes_of: TokenBytes, stop_words: list[str], stop_ids: set[int], max_tokens: int) -> None:
        self._decoder = TextDecoder(bytes_of)
        self._matcher = StopMatcher(stop_words)
        self._stop_ids = stop_ids
        self._remaining = max_tokens
        self._met_stop_id = False

    @property
    def stopped(self) -> bool:
        """A stop word or a stop id came; nothing more is visible."""
        return self._met_stop_id or self._matcher.matched is not None

    def feed(self, ids: list[int]) -> str:
        """Text that is certain after these ids."""
        if self.stopped:
            return ""
        stop = next((place for place, token in enumerate(ids) if token in self._stop_ids), None)
        if stop is not None:
            ids, self._met_stop_id = ids[:stop], True
        self._remaining -= len(ids)
        return self._matcher.feed(self._decoder.feed(ids))

    def finish(self) -> str:
        """The rest: what might have become a stop word, and U+FFFD for an unfinished character."""
        if self._matcher.matched is not None:
            return ""
        return self._matcher.feed(self._decoder.finish()) + self._matcher.finish()

    @property
    def finish_reason(self) -> str:
        """`stop` (stop word, stop id) or `length` (max_tokens), in the words of the OpenAI API."""
        return "length" if self._remaining <= 0 and not self.stopped else "stop"
