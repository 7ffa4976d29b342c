"""Which generated ids may leave the engine now, judged by the text that they stand for.

The ensemble's postprocessing sees every response alone, so a response must not end inside a character and must not
show the beginning of a stop word. Ids wait here until that is certain. A tokenizer whose single tokens each end inside
a character would wait until the end; real text does not do that.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from _shared.stop_words import StopMatcher
from _shared.token_text import TextDecoder
from _shared.tokenizer_dir import TokenizerDirectory


@dataclass
class Piece:
    """Ids with the log probability of each."""

    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)


class VisibleIds:
    """Holds back ids of one sequence until their text is whole and free of stop words.

    Args:
        tokenizer: None lets every id through at once.
        stop_words: text-level stop words.
    """

    def __init__(self, tokenizer: TokenizerDirectory | None, stop_words: list[str]) -> None:
        self._tokenizer = tokenizer
        self._decoder = None if tokenizer is None else TextDecoder(tokenizer.bytes_of)
        self._matcher = StopMatcher(stop_words)
        self._held = Piece()
        self._shown = ""

    @property
    def stopped(self) -> bool:
        """A stop word was completed; nothing more is visible."""
        return self._matcher.matched is not None

    def feed(self, ids: list[int], log_probs: list[float], *, finished: bool) -> Piece:
        """Ids that became visible with these new ones; everything held if `finished`."""
        self._held.ids += ids
        self._held.log_probs += log_probs
        if self._decoder is None:
            return self._release()
        text = self._decoder.feed(ids)
        self._shown += self._matcher.feed(text + self._decoder.finish() if finished else text)
        if self.stopped:
            return self._cut()
        if finished or (self._decoder.is_whole and not self._matcher.is_holding):
            return self._release()
        return Piece()

    def _release(self) -> Piece:
        piece, self._held, self._shown = self._held, Piece(), ""
        return piece

    def _cut(self) -> Piece:
        r"""Held ids up to the stop word.

        A token may carry text before the word as well (`".\n"` with the stop word `"\n"`). That text is encoded anew
        where that gives it back exactly; the first of its ids takes the log probability of the token that was cut.
        """
        assert self._tokenizer is not None  # noqa: S101  (a matcher without a decoder is never fed)
        shown = self._shown
        held = self._release()
        decoder = TextDecoder(self._tokenizer.bytes_of)
        read = kept_ids = kept_text = 0
        for count, token_id in enumerate(held.ids, start=1):
            text = decoder.feed([token_id])
            if not shown.startswith(text, read):
                break
            read += len(text)
            if decoder.is_whole:
                kept_ids, kept_text = count, read
        piece = Piece(held.ids[:kept_ids], held.log_probs[:kept_ids])
        rest = self._tokenizer.encode(shown[kept_text:], add_special_tokens=False)
        if rest and TextDecoder(self._tokenizer.bytes_of).feed(rest) == shown[kept_text:]:
            piece.ids += rest
            piece.log_probs += [held.log_probs[kept_ids]] + [0.0] * (len(rest) - 1)
        return piece
