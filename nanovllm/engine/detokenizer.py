"""Tokens to text as they come: no half characters, no part of a stop string."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanovllm.engine.tokenizer import Tokenizer

# Of UTF-8's at most four bytes per character each token brings one at least; beyond this many tokens that still
# end in U+FFFD the model really emits lone bytes.
_MAX_HELD_TOKENS = 8
_REPLACEMENT = "\ufffd"


class TextStream:
    """The text of one continuation.

    Args:
        tokenizer: decodes ids.
        stop: strings that end the text and are cut from it.
        min_tokens: text of the first so many tokens is not searched for them.
        skip_special_tokens: leave special tokens out.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...], min_tokens: int, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._min_tokens = min_tokens
        self._skip_special_tokens = skip_special_tokens
        self._token_ids: list[int] = []
        # Text of tokens before _read is out; decoding starts at _prefix, because a token's text can depend on
        # the ones before it (a leading space, a character in several parts).
        self._prefix = 0
        self._read = 0
        self._text = ""
        self._search_from = 0
        self._taken = 0
        self._finished = False

    @property
    def text(self) -> str:
        """All text that is certain."""
        return self._text[: self._certain()]

    def take_delta(self) -> str:
        """Certain text since the last call."""
        delta = self.text[self._taken :]
        self._taken += len(delta)
        return delta

    def push(self, token_ids: list[int]) -> str | None:
        """Add tokens. Returns the stop string that ended the text, if one did; it is cut off then."""
        self._token_ids += token_ids
        self._advance(flush=False)
        return self._cut_at_stop()

    def finish(self) -> None:
        """No more tokens come: what was held back is text now."""
        if not self._finished:
            self._advance(flush=True)
            self._cut_at_stop()
            self._finished = True

    def _decode(self, start: int, end: int | None = None) -> str:
        return self._tokenizer.decode(self._token_ids[start:end], self._skip_special_tokens)

    def _advance(self, flush: bool) -> None:
        before = self._decode(self._prefix, self._read)
        now = self._decode(self._prefix)
        if now.endswith(_REPLACEMENT) and not flush:
            if len(self._token_ids) - self._read > _MAX_HELD_TOKENS:
                self._release_lone_bytes(before, now)
            return
        self._text += now[len(before) :]
        self._prefix, self._read = self._read, len(self._token_ids)

    def _release_lone_bytes(self, before: str, now: str) -> None:
        """Let go of all but the last few tokens, split where no character is."""
        count = len(self._token_ids)
        for cut in range(count - 1, count - 5, -1):
            head = self._decode(self._prefix, cut)
            if head + self._decode(cut) == now:
                self._text += head[len(before) :]
                self._prefix = self._read = cut
                return

    def _cut_at_stop(self) -> str | None:
        if len(self._token_ids) <= self._min_tokens:
            self._search_from = len(self._text)
            return None
        hits = [(at, stop) for stop in self._stop if (at := self._text.find(stop, self._search_from)) >= 0]
        if hits:
            at, stop = min(hits)
            self._text = self._text[:at]
            self._finished = True
            return stop
        longest = max(map(len, self._stop), default=0)
        self._search_from = max(self._search_from, len(self._text) - longest + 1)
        return None

    def _certain(self) -> int:
        """Length of the text that cannot turn out to be the start of a stop string."""
        if self._finished or not self._stop:
            return len(self._text)
        for held in range(min(max(map(len, self._stop)) - 1, len(self._text)), 0, -1):
            if any(stop.startswith(self._text[-held:]) for stop in self._stop):
                return len(self._text) - held
        return len(self._text)
