"""Text from tokens as they come: whole characters only, and never a stop string or the beginning of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decoder = Callable[[Sequence[int]], str]
"""Tokens to the text that they are; bytes that are no UTF-8 become U+FFFD."""

_UNFINISHED = "\ufffd"
_CONTEXT = 8  # tokens that are decoded with new ones, whose text is out


class TextStream:
    """The text of one continuation.

    Tokens are decoded together with some that came before, since tokenizers write a word otherwise at the beginning of
    a text. A character whose bytes are not all there waits for the rest, and so does what may become a stop string.

    Args:
        decode: Of the tokenizer.
        context: Tokens before the first one.
        stop_strings: The text ends before the first one that is complete.

    >>> stream = TextStream(lambda tokens: bytes(tokens).decode(errors="replace"), b"ab", ("END",))
    >>> [stream.push(token) for token in "né.ENDE".encode()], stream.stopped
    (['n', '', 'é', '.', '', '', '', ''], True)
    """

    def __init__(self, decode: Decoder, context: Sequence[int] = (), stop_strings: Sequence[str] = ()) -> None:
        self.stopped = False
        """Whether a stop string has come."""
        self.text = ""
        """All that was said so far."""
        self._decode = decode
        self._stop_strings = tuple(stop_strings)
        self._tokens: list[int] = list(context)
        self._forget()
        self._held = ""

    def push(self, token: int) -> str:
        """The text that one more token makes sure."""
        if self.stopped:
            return ""
        self._tokens.append(token)
        return self._say(at_end=False)

    def finish(self) -> str:
        """What is left when no more tokens come."""
        return "" if self.stopped else self._say(at_end=True)

    def _forget(self) -> None:
        """Keeps the last tokens only; all of their text is out, or waits in `_held`."""
        self._tokens = self._tokens[-_CONTEXT:]
        self._sure = len(self._decode(self._tokens)) if self._tokens else 0

    def _say(self, at_end: bool) -> str:
        text = self._decode(self._tokens)
        sure = len(text) - (text.endswith(_UNFINISHED) and not at_end)
        self._held += text[self._sure : sure]
        self._sure = max(sure, self._sure)
        if sure == len(text) and len(self._tokens) > 2 * _CONTEXT:
            self._forget()
        places = [(self._held.find(stop), stop) for stop in self._stop_strings]
        complete = [(at + len(stop), at) for at, stop in places if at >= 0]
        if complete:
            self.stopped = True
            said, self._held = self._held[: min(complete)[1]], ""
        else:
            keep = 0 if at_end else self._possible_beginning()
            said, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        self.text += said
        return said

    def _possible_beginning(self) -> int:
        """How many of the last characters may be the beginning of a stop string."""
        return max(
            (
                size
                for stop in self._stop_strings
                for size in range(1, min(len(stop), len(self._held) + 1))
                if self._held.endswith(stop[:size])
            ),
            default=0,
        )
