"""Lists of hosts as SLURM writes them, `n[01-04,7],gpu1`: their size is known before they are expanded."""

from __future__ import annotations

import re

from fuel_parallel.topology.files.source import Source

MOST = 1 << 17
"""So many names a file may have; the largest machines have a tenth of that."""

LONGEST = 64
"""SLURM's limit for a name is that of a host."""

NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.\-]*)")

_TERM = re.compile(r"(?:[A-Za-z0-9_.\-]|\[[0-9,\-]+\])+")
_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?")


def expand(source: Source, text: str, *, line: int | None = None, key: str = "") -> tuple[str, ...]:
    """The names of a list in its order, each once. Raises `TopologyFileError`: no list, too many names, bad ranges.

    >>> expand(Source("hosts", ""), "n[08-10,7],gpu1")
    ('n7', 'n08', 'n09', 'n10', 'gpu1')
    """
    terms = _terms(source, text, line, key)
    total = sum(_size(source, term, line, key) for term in terms)
    if total > MOST:
        raise source.error(f"{_short(text)} names {total} hosts; at most {MOST} are read", line=line, key=key)
    names: dict[str, None] = {}
    for term in terms:
        for name in _expanded(source, term, line, key):
            if len(name) > LONGEST:
                raise source.error(f"the name {_short(name)} has more than {LONGEST} characters", line=line, key=key)
            names[name] = None
    return tuple(names)


def check_name(source: Source, name: str, what: str, *, line: int | None = None) -> str:
    """The name of one host or switch. Raises `TopologyFileError` when it is none."""
    if not NAME.fullmatch(name):
        raise source.error(
            f"{_short(name)} is no name of a {what}; expected letters, digits, '.', '-' and '_'", line=line
        )
    if len(name) > LONGEST:
        raise source.error(f"the {what} name {_short(name)} has more than {LONGEST} characters", line=line)
    return name


def _terms(source: Source, text: str, line: int | None, key: str) -> list[str]:
    """What stands between the commas that are outside of brackets."""
    ends, inside = [], False
    for mark in re.finditer(r"[\[\],]", text):
        inside = mark[0] == "[" or (inside and mark[0] != "]")
        if mark[0] == "," and not inside:
            ends.append(mark.start())
    terms = [text[a:b].strip() for a, b in zip([0, *(e + 1 for e in ends)], [*ends, len(text)], strict=True)]
    for term in terms:
        if not _TERM.fullmatch(term):
            found = "an empty name" if not term else _short(term)
            raise source.error(
                f"{found} in the list of hosts {_short(text)}; expected names and ranges such as n[01-04,7],gpu1",
                line=line,
                key=key,
            )
    return terms


def _size(source: Source, term: str, line: int | None, key: str) -> int:
    """How many names a term has, from its text alone."""
    size = 1
    for inside in re.findall(r"\[([^\]]*)\]", term):
        size *= sum(_length(source, one, term, line, key) for one in inside.split(","))
        if size > MOST:
            break
    return size


def _length(source: Source, part: str, term: str, line: int | None, key: str) -> int:
    found = _RANGE.fullmatch(part)
    if found is None:
        raise source.error(f"{part!r} in {_short(term)} is no range; expected one such as 01-04", line=line, key=key)
    first, last = int(found[1]), int(found[2] or found[1])
    if last < first:
        raise source.error(f"the range {part} in {_short(term)} descends; it must ascend", line=line, key=key)
    return last - first + 1


def _expanded(source: Source, term: str, line: int | None, key: str) -> list[str]:
    if "[" not in term:
        return [term]
    from ClusterShell.NodeSet import NodeSet, NodeSetException
    from ClusterShell.RangeSet import RangeSetException

    try:
        # Without a resolver: "@" and the like would be looked up in groups of this machine.
        return list(NodeSet(term, resolver=None))
    except (NodeSetException, RangeSetException, ValueError) as reason:
        raise source.error(f"{_short(term)} is no list of hosts: {reason}", line=line, key=key) from None


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
