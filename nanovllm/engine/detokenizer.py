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
        # Left out before decoding, because a decoder may strip the space that follows them.
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self.num_tokens = 0  # pushed so far
        self._token_ids: list[int] = []
        # Text of tokens before _read is out; decoding starts at _prefix, because a token's text can depend on
        # the ones before it (a leading space, a character in several parts).
        self._prefix = 0
        self._read = 0
        self._text = ""
        self._searched = 0
        self._taken = 0
        self._finished = False

    @property
    def text(self) -> str:
        """All text that is certain: without what may turn out to be the start of a stop string."""
        if self._finished or not self._stop:
            return self._text
        for held in range(min(max(map(len, self._stop)) - 1, len(self._text)), 0, -1):
            if any(stop.startswith(self._text[-held:]) for stop in self._stop):
                return self._text[:-held]
        return self._text

    def take_delta(self) -> str:
        """Certain text since the last call."""
        delta = self.text[self._taken :]
        self._taken += len(delta)
        return delta

    def push(self, token_ids: list[int]) -> str | None:
        """Add tokens. Returns the stop string that ended the text, if one did; it is cut off then."""
        kept = [token_id for token_id in token_ids if token_id not in self._skipped]
        if not self._stop and len(kept) > 1 and self._advance_at_once(kept):
            self.num_tokens += len(token_ids)
            return None
        for token_id in token_ids:
            self.num_tokens += 1
            if token_id not in self._skipped:
                self._token_ids.append(token_id)
                self._advance(flush=False)
            stop = self._cut_at_stop()
            if stop is not None:
                return stop
        return None

    def finish(self) -> str | None:
        """No more tokens come: what was held back is text now. Returns as `push` does."""
        if self._finished:
            return None
        self._advance(flush=True)
        stop = self._cut_at_stop()
        self._finished = True
        return stop

    def _decode(self, start: int, end: int | None = None) -> str:
        return self._tokenizer.decode(self._token_ids[start:end], False)

    def _advance(self, flush: bool) -> None:
        before = self._decode(self._prefix, self._read)
        now = self._decode(self._prefix)
        if now.endswith(_REPLACEMENT) and not flush:
            if len(self._token_ids) - self._read > _MAX_HELD_TOKENS:
                self._release_lone_bytes(before, now)
            return
        self._text += now[len(before) :]
        self._prefix, self._read = self._read, len(self._token_ids)

    def _advance_at_once(self, kept: list[int]) -> bool:
        """Take several tokens, and leave all as if they had come one by one. False, and nothing is taken, where that
        is not certain: what becomes of invalid bytes depends on where a decoder starts."""
        tail = self._token_ids[self._prefix :] + kept
        now = self._tokenizer.decode(tail, False)
        if _REPLACEMENT in now or self._tokenizer.decode(tail[:-1], False).endswith(_REPLACEMENT):
            return False
        self._text += now[len(self._decode(self._prefix, self._read)) :]
        self._token_ids += kept
        self._prefix, self._read = len(self._token_ids) - 1, len(self._token_ids)
        return True

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
        """Look for stop strings that end in text not searched yet."""
        searched, self._searched = self._searched, len(self._text)
        if self.num_tokens <= self._min_tokens:
            return None
        hits = [(at, s) for s in self._stop if (at := self._text.find(s, max(0, searched - len(s) + 1))) >= 0]
        if not hits:
            return None
        at, stop = min(hits)
        self._text = self._text[:at]
        self._finished = True
        return stop
