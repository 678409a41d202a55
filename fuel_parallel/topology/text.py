"""A topology as text: an outline to read, and JSON."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from fuel_parallel.errors import DataError
from fuel_parallel.topology.model import (
    AnyPart,
    Description,
    DeviceInfo,
    Link,
    Nic,
    NumaDomain,
    Origin,
    Switch,
    gb_s,
)
from fuel_parallel.topology.topology import DeviceTopology

LARGEST = 64 << 20
"""Bytes of a file that is read at most."""


def emit(t: DeviceTopology, as_json: bool, output: Path | None) -> None:
    """Prints a topology, or writes it to a file as JSON and says so. Raises `DataError` if that fails."""
    if output is not None:
        try:
            output.write_text(to_json(t) + "\n")
        except OSError as reason:
            raise DataError(f"cannot write {output}: {reason.strerror}") from None
        sys.stdout.write(f"{t!r} written to {output}\n")
    else:
        sys.stdout.write((to_json(t) if as_json else "\n".join(outline(t))) + "\n")


def to_json(t: DeviceTopology) -> str:
    """All of a topology as JSON; `from_json` reads it.

    >>> from_json(to_json(DeviceTopology("empty"))) == DeviceTopology("empty")
    True
    """
    return msgspec.json.format(msgspec.json.encode(t.description())).decode()


def from_json(text: str | bytes, source: str = "the text") -> DeviceTopology:
    """Reads what `to_json` wrote.

    Raises `DataError` when the text is something else, and `TopologyError` when what it says does not hold together.
    """
    if len(text) > LARGEST:
        raise DataError(f"{source} has {len(text)} bytes; a topology has at most {LARGEST}")
    try:
        return DeviceTopology.from_description(msgspec.json.decode(text, type=Description))
    except (msgspec.DecodeError, RecursionError) as reason:
        raise DataError(f"{source} is no topology: {reason}") from None


def outline(t: DeviceTopology) -> Iterator[str]:
    """One line a part, machine by machine, with its links below it, each link once."""
    yield f"{t.name or 'topology'}: {len(t)} devices, {len(t.nodes) or 1} machine{'s' * (len(t.nodes) > 1)}"
    shown: set[frozenset[str]] = set()
    parts = t.description().parts
    for node in [*t.nodes, ""]:
        mine = [p for p in parts if p.node == node]
        if node:
            yield node
        for part in sorted(mine, key=lambda p: _ORDER.index(type(p))):
            yield f"  {part.id.removeprefix(f'{node}/'):<20} {_facts(part)}".rstrip()
            for target, link in t.links_of(part.id).items():
                pair = frozenset((part.id, target))
                if pair not in shown:
                    shown.add(pair)
                    yield f"    - {target.removeprefix(f'{node}/'):<18} {_link(link)}".rstrip()


_ORDER = (NumaDomain, DeviceInfo, Nic, Switch)


def _facts(part: AnyPart) -> str:
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


def _link(link: Link) -> str:
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
