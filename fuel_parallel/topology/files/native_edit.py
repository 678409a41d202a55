"""New figures for the links of a TOML file that somebody wrote: its comments, its order and its words stay.

An entry whose links all get the same figures is changed where it stands; what else changes, an [[override]] at the end
says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from fuel_parallel.errors import TopologyError
from fuel_parallel.topology.files import native
from fuel_parallel.topology.files.native_expand import Expansion
from fuel_parallel.topology.files.native_fold_links import Ends, figures, fold_edges
from fuel_parallel.topology.files.native_text import language
from fuel_parallel.topology.files.native_yaml import Path
from fuel_parallel.topology.files.source import Source
from fuel_parallel.topology.model import Link

MOST_KIB = 1024
"""Of a file that is edited: one with comments was written by hand."""


def edit(source: Source, links: Mapping[Ends, Link]) -> str:
    """The text with other figures: those of `links`, by source and target, one direction each.

    Raises `TopologyFileError` when the file is none of TOML, or a link is not in it.

    >>> from fuel_parallel.topology.model import mb_s
    >>> text = '''
    ... device = [{id = "cuda:[0-1]"}]
    ...
    ... [[link]]
    ... between = ["cuda:0", "cuda:1"]  # the bridge
    ... bandwidth = "50 GB/s"           # says its data sheet
    ... '''
    >>> fast = Link(bandwidth_mb_s=mb_s(44.0))
    >>> print(edit(Source("pair.toml", text), {("cuda:0", "cuda:1"): fast, ("cuda:1", "cuda:0"): fast}))
    <BLANKLINE>
    device = [{id = "cuda:[0-1]"}]
    <BLANKLINE>
    [[link]]
    between = ["cuda:0", "cuda:1"]  # the bridge
    bandwidth = "44 GB/s"           # says its data sheet
    <BLANKLINE>
    """
    if language(source) != "toml" or len(source.text) > MOST_KIB << 10:
        raise source.error(f"only a native file in TOML, of at most {MOST_KIB} KiB, is edited in place")
    known = native.read_expansion(source)
    strange = next((ends for ends in links if ends not in known.links), None)
    if strange is not None:
        raise source.error(f"there is no link from {strange[0]!r} to {strange[1]!r} to give figures to")
    changed = {ends: link for ends, link in links.items() if known.links[ends] != link}
    if not changed:
        return source.text
    text = _edited(source.text, known, changed)
    # The reader, not the editor, says what a file means.
    if native.read_expansion(Source(source.name, text)).links != known.links | changed:
        raise source.error("the new figures cannot be put into this file; write them to another one")
    return text


def _edited(text: str, known: Expansion, changed: Mapping[Ends, Link]) -> str:
    import tomlkit

    document = tomlkit.parse(text)
    left = dict(changed)
    for place, ends in _entries(known).items():
        new = {changed.get(one) for one in ends}
        link = next(iter(new))
        if len(new) == 1 and link is not None:
            _set(_at(document, place), link, known.links[ends[0]])
            for one in ends:
                del left[one]
    for override in _overrides(left, known):
        _append(document, override)
    return tomlkit.dumps(document)


def _entries(known: Expansion) -> dict[Path, list[Ends]]:
    """The entries that alone say what their links are, and these links."""
    last = dict(known.link_places)
    covered: dict[Path, list[Ends]] = {}
    for ends, place in known.link_places.items():
        covered.setdefault(place, []).append(ends)
    for place, several in known.overridden.items():
        covered[place] = several
        last |= dict.fromkeys(several, place)
    return {place: ends for place, ends in covered.items() if ends and all(last[one] == place for one in ends)}


def _at(document: Any, place: Path) -> Any:
    for key in place:
        document = document[key]
    return document


def _set(entry: Any, new: Link, old: Link) -> None:
    for field, value in _differing(new, old).items():
        entry[field] = value


def _differing(new: Link, old: Link) -> dict[str, Any]:
    """The fields that change, as a file says them."""
    now, before = figures(new), figures(old)
    lost = next((field for field, value in now.items() if value is None and before[field] is not None), None)
    if lost is not None:
        raise TopologyError(f"a {lost} that a file states cannot become unknown; remove it from the file")
    found: dict[str, Any] = msgspec.to_builtins({f: value for f, value in now.items() if value != before[f]})
    return found


def _overrides(left: Mapping[Ends, Link], known: Expansion) -> list[dict[str, Any]]:
    """Entries for single links, those with the same figures together."""
    groups: dict[tuple[tuple[str, Any], ...], list[Ends]] = {}
    for ends, link in left.items():
        groups.setdefault(tuple(_differing(link, known.links[ends]).items()), []).append(ends)
    found = []
    for fields, edges in groups.items():
        every = set(edges)
        both = [(a, b) for a, b in edges if (b, a) in every and a < b]
        single = [(a, b) for a, b in edges if (b, a) not in every]
        for some, one_way in ((both, False), (single, True)):
            for ends, pairs in fold_edges(some, one_way):
                more = {} if pairs is None else {"pairs": pairs.value}
                found.append({"between": list(ends), **more, **({"one_way": True} if one_way else {}), **dict(fields)})
    return found


def _append(document: Any, override: dict[str, Any]) -> None:
    import tomlkit

    if "override" not in document:
        document.append("override", tomlkit.aot())
    table = tomlkit.table()
    table.trivia.indent = "\n"  # an empty line before it
    table.update(override)
    document["override"].append(table)
