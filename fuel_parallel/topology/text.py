"""A topology as text: an outline to read, or a native file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from fuel_parallel.errors import DataError
from fuel_parallel.topology.files import native
from fuel_parallel.topology.files.native_edit import edit
from fuel_parallel.topology.files.source import Source
from fuel_parallel.topology.model import (
    AnyPart,
    DeviceInfo,
    Link,
    Nic,
    NumaDomain,
    Origin,
    Switch,
    gb_s,
)
from fuel_parallel.topology.topology import DeviceTopology


def emit(t: DeviceTopology, as_json: bool, output: Path | None, *, measured: bool = False) -> None:
    """Prints a topology, or writes it to a file in the native format and says so. Raises `DataError` if that fails.

    Of one that was `measured` a TOML file that is there already gets the figures, and keeps all else.
    """
    if output is None:
        sys.stdout.write(native.write(t, "json") if as_json else "\n".join(outline(t)) + "\n")
        return
    text, what = native.write(t, native.form_of(output.name)), f"{t!r}"
    if measured and output.exists() and native.form_of(output.name) == "toml":
        text, what = _with_measured(t, Source.open(output))
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as reason:
        raise DataError(f"cannot write {output}: {reason.strerror}") from None
    sys.stdout.write(f"{what} written to {output}\n")


def _with_measured(t: DeviceTopology, source: Source) -> tuple[str, str]:
    """A file that somebody wrote, with the links of it that were measured; and how many these are, in words."""
    found = [c for c in t.connections() if c.link.origin is Origin.MEASURED]
    links = {(c.source, c.target): c.link for c in found}
    links |= {(c.target, c.source): c.link for c in found if not c.one_way}
    there = native.read_expansion(source).links
    known = {ends: link for ends, link in links.items() if ends in there}
    if not known:
        some = " and ".join(map(repr, next(iter(links), ("none",))))
        raise source.error(f"it has none of the links that were measured, such as {some}; write to another file")
    missing = len({frozenset(ends) for ends in links.keys() - known.keys()})
    what = f"figures of {len({frozenset(ends) for ends in known})} links"
    return edit(source, known), what + f" ({missing} that were measured are not in the file)" * bool(missing)


def outline(t: DeviceTopology) -> Iterator[str]:
    """One line a part, machine by machine, with its links below it, each link once.

    Names come from files: what a terminal would obey rather than show is replaced.
    """
    for line in _outline(t):
        yield line if line.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in line)


def _outline(t: DeviceTopology) -> Iterator[str]:
    yield f"{t.name or 'topology'}: {len(t)} devices, {len(t.nodes) or 1} machine{'s' * (len(t.nodes) > 1)}"
    shown: set[frozenset[str]] = set()
    parts: dict[str, list[AnyPart]] = {}
    for part in t.description().parts:
        parts.setdefault(part.node, []).append(part)
    nodes = t.nodes
    for node in [*nodes, ""]:
        mine = parts.get(node, [])
        if node or (nodes and mine):
            yield node or "between machines"
        for part in sorted(mine, key=lambda p: _ORDER.index(type(p))):
            yield f"  {part.id.removeprefix(f'{node}/'):<20} {facts(part)}".rstrip()
            for target, link in t.links_of(part.id).items():
                pair = frozenset((part.id, target))
                if pair not in shown:
                    shown.add(pair)
                    yield f"    - {target.removeprefix(f'{node}/'):<18} {link_words(link)}".rstrip()


_ORDER = (NumaDomain, DeviceInfo, Nic, Switch)


def facts(part: AnyPart) -> str:
    """What is known of a part."""
    words: list[str] = []
    if isinstance(part, DeviceInfo):
        words = [part.name, _bytes(part.memory_bytes), part.cores and f"cores {part.cores}", part.bus]
    elif isinstance(part, NumaDomain):
        largest = max(part.caches, key=lambda c: c.level, default=None)
        cache = f"L{largest.level} {_bytes(largest.bytes)}" if largest else ""
        words = [part.cores and f"cores {part.cores}", _bytes(part.memory_bytes), cache]
    elif isinstance(part, Nic):
        words = [f"{gb_s(part.speed_mb_s) * 8:.0f} Gb/s" if part.speed_mb_s else "speed unknown", part.bus]
    else:
        words = [part.kind.value, part.name]
    return ", ".join(word for word in words if word)


def link_words(link: Link) -> str:
    """What is known of a link."""
    words = [link.path, link.interconnect.value.replace("_", " ")]
    words.append("bandwidth unknown" if link.bandwidth_mb_s is None else f"{gb_s(link.bandwidth_mb_s):.1f} GB/s")
    if link.latency_us is not None:
        words.append(f"{link.latency_us:.2f} us")
    if link.bandwidth_mb_s is not None and link.origin is not Origin.STATED:
        words.append(f"({link.origin.value})")
    return " ".join(word for word in words if word)


def _bytes(number: int | None) -> str:
    if number is None:
        return ""
    size, unit = next((s, u) for s, u in ((30, "GiB"), (20, "MiB"), (10, "KiB"), (0, "B")) if number >> s or not s)
    return f"{number / 2**size:.0f} {unit}"
