"""YAML as plain data, with the line of each key. Nothing is called by a tag, repeated by an alias, or nested deeply."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from fuel_parallel.topology.files.source import Source

DEEPEST = 16
"""Levels of tables and lists; a topology has five."""

Path = tuple[str | int, ...]
"""Keys and indexes that lead to a value."""


def parse(source: Source) -> Any:
    """The data. Raises `TopologyFileError` with the line when it is no YAML, or has what a topology does not need."""
    return _tree(source).value()


def lines_of(source: Source) -> Iterable[tuple[Path, int]]:
    """Each key and each item of a list, and its line, counted from 1."""
    return _tree(source).lines.items()


class Tree:
    """What is built from the events of a parser, which never recurses."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.lines: dict[Path, int] = {}
        self._open: list[Any] = [[]]
        self._keys: list[str | None] = [None]
        self._path: list[str | int] = []
        self._top: list[Any] = self._open[0]

    def value(self) -> Any:
        """All of the document; None where there is none."""
        return self._top[0] if self._top else None

    def put(self, value: Any, line: int) -> None:
        """Adds a value to the list or table that is open; a table takes it as a key first."""
        into, key = self._open[-1], self._keys[-1]
        if isinstance(into, list):
            self._path[-1:] = [len(into)] if len(self._open) > 1 else []
            into.append(value)
        elif key is not None:
            into[key] = value
            self._keys[-1] = None
        elif not isinstance(value, str):
            raise self.source.error(f"{str(value)[:60]!r} is no key; keys are names of fields", line=line)
        elif value in into:
            raise self.source.error(f"the key {value[:60]!r} stands twice in one table; expected once", line=line)
        else:
            self._keys[-1] = self._path[-1] = value
        self.lines.setdefault(tuple(self._path), line)

    def begin(self, value: Any, line: int) -> None:
        """Opens a list or a table."""
        self.put(value, line)
        if len(self._open) > DEEPEST:
            raise self.source.error(f"nested too deeply; expected at most {DEEPEST} levels", line=line)
        self._open.append(value)
        self._keys.append(None)
        self._path.append("")

    def end(self) -> None:
        """Closes what was opened last."""
        self._open.pop()
        self._keys.pop()
        self._path.pop()


def _tree(source: Source) -> Tree:
    import yaml

    tree = Tree(source)
    try:
        for event in yaml.parse(source.text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            line = event.start_mark.line + 1 if event.start_mark else 1
            if getattr(event, "anchor", None) or getattr(event, "tag", None):
                raise source.error("anchors, aliases and tags have no meaning in a topology; write it out", line=line)
            if isinstance(event, yaml.DocumentStartEvent) and tree.value() is not None:
                raise source.error("a second document begins here; expected one", line=line)
            if isinstance(event, yaml.ScalarEvent):
                tree.put(_scalar(event.value) if event.implicit[0] else event.value, line)
            elif isinstance(event, yaml.CollectionStartEvent):
                tree.begin([] if isinstance(event, yaml.SequenceStartEvent) else {}, line)
            elif isinstance(event, yaml.CollectionEndEvent):
                tree.end()
    except yaml.YAMLError as reason:
        mark: Any = getattr(reason, "problem_mark", None)
        what = getattr(reason, "problem", None) or str(reason).splitlines()[0]
        raise source.error(f"this is no YAML: {what}", line=mark.line + 1 if mark else None) from None
    return tree


def _scalar(text: str) -> Any:
    """As in YAML 1.2: `0000:07:00.0` is an address and no number of sixtieths, and `no` is a name."""
    if text in ("", "~", "null"):
        return None
    if text in ("true", "false"):
        return text == "true"
    if re.fullmatch(r"[-+]?(?:0|[1-9][0-9]{0,20})", text):
        return int(text)
    if re.fullmatch(r"[-+]?[0-9]{1,40}\.[0-9]{0,40}(?:[eE][-+]?[0-9]{1,3})?", text):
        return float(text)
    return text
