"""Patterns for dotted names of layers and tensors."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fuel_parallel.errors import ArgumentError

_WILD = re.compile(r"(\*+)")


@dataclass(frozen=True)
class NamePattern:
    """Dotted names: `*` stands for any characters between two dots, `**` for any at all.

    Raises `ArgumentError` for a text that can name nothing.

    >>> pattern = NamePattern("blocks.*.up")
    >>> pattern.captures("blocks.11.up"), pattern.captures("blocks.1.mlp.up"), pattern.filled(("7",))
    (('11',), None, 'blocks.7.up')
    """

    text: str

    def __post_init__(self) -> None:
        if not all(self.text.split(".")):
            raise ArgumentError(
                f"expected a dotted name, such as 'blocks.*.up', without empty parts; got {self.text!r}"
            )

    @property
    def wildcards(self) -> int:
        """How many there are."""
        return len(_WILD.findall(self.text))

    def captures(self, name: str) -> tuple[str, ...] | None:
        """What the wildcards stand for in a name; None if the name is another."""
        parts = [_expression(part) for part in _WILD.split(self.text)]
        found = re.fullmatch("".join(parts), name)
        return None if found is None else found.groups()

    def filled(self, captures: tuple[str, ...]) -> str:
        """The name in which the wildcards stand for these texts."""
        rest = iter(captures)
        return _WILD.sub(lambda _: next(rest), self.text)


def _expression(part: str) -> str:
    if not part.startswith("*"):
        return re.escape(part)
    return "([^.]*)" if part == "*" else "(.*)"
