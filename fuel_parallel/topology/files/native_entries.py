"""What the entries of a native file say: each the parts, or the figures of the links, that it stands for."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec

from fuel_parallel.errors import DataError
from fuel_parallel.topology.cores import parse_list
from fuel_parallel.topology.files import expressions
from fuel_parallel.topology.files.native_schema import DeviceEntry, Figures, NicEntry, NumaEntry, PartEntry, SwitchEntry
from fuel_parallel.topology.files.native_yaml import Path
from fuel_parallel.topology.files.units import parse_rate, parse_size, parse_time
from fuel_parallel.topology.model import AnyPart, Cache, DeviceInfo, DeviceKind, Link, Nic, NumaDomain, Switch

MOST = 1_000_000
"""Parts, and links, of a topology."""


class Mistake(Exception):
    """What is wrong, and the keys that lead there."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(reason)
        self.path, self.reason = path, reason


def parts_of(entry: PartEntry, path: Path) -> Iterator[AnyPart]:
    """The parts of an entry, with the ids that it gives and in no machine."""
    ids = names_of(entry.id, (*path, "id"), MOST)
    fields = msgspec.structs.asdict(entry)
    for field, value in fields.items():
        if isinstance(value, list) and field != "caches" and len(value) != len(ids):
            reason = f"a list of {len(value)} values for {len(ids)} ids; expected one value for all, or one for each"
            raise Mistake((*path, field), reason)
    for field in ("memory", "speed", "tflops", "cores"):
        if field in fields:
            fields[field] = _parsed(field, fields[field], (*path, field))
    make = _MAKERS[type(entry)]
    for position, part in enumerate(ids):
        mine = {f: v[position] if isinstance(v, list) and f != "caches" else v for f, v in fields.items()}
        yield make(mine | {"id": part, "node": ""}, path)


def link_of(entry: Figures, path: Path) -> Link:
    """What the entry says of each of its links."""
    rate, time = (_parsed(field, getattr(entry, field), (*path, field)) for field in ("bandwidth", "latency"))
    return Link(
        interconnect=entry.kind,
        bandwidth_mb_s=rate,
        latency_us=time,
        count=entry.count,
        path=entry.path,
        origin=entry.origin,
    )


def shown(path: Path) -> str:
    """`node[0].device[1].memory`."""
    words = [f"[{key}]" if isinstance(key, int) else f".{key}" for key in path]
    return "".join(words).removeprefix(".")


def _device(f: dict[str, Any], path: Path) -> DeviceInfo:
    prefix = f["id"].rpartition("/")[2].partition(":")[0]
    kind = f["kind"] or next((kind for kind in DeviceKind if kind.value == prefix), None)
    if kind is None:
        kinds = ", ".join(one.value for one in DeviceKind)
        raise Mistake(path, f"of what kind is {f['id']!r}? Give it a kind, one of {kinds}, or an id such as 'cuda:0'")
    return DeviceInfo(
        id=f["id"],
        kind=kind,
        name=f["name"],
        memory_bytes=f["memory"],
        numa=f["numa"],
        bus=f["bus"],
        cores=f["cores"],
        tflops=f["tflops"],
    )


def _numa(f: dict[str, Any], path: Path) -> NumaDomain:
    index = f["index"]
    if index is None:
        number = re.search(r"([0-9]{1,6})\Z", f["id"])
        if number is None:
            raise Mistake(path, f"which is {f['id']!r}? Give it an index, or an id such as 'numa:0'")
        index = int(number[1])
    caches = []
    for position, c in enumerate(f["caches"]):
        place = (*path, "caches", position)
        size, cores = (_parsed(field, getattr(c, field), (*place, field)) for field in ("size", "cores"))
        caches.append(Cache(level=c.level, bytes=size, cores=cores))
    return NumaDomain(id=f["id"], index=index, cores=f["cores"], memory_bytes=f["memory"], caches=tuple(caches))


def _nic(f: dict[str, Any], path: Path) -> Nic:
    return Nic(id=f["id"], name=f["name"], numa=f["numa"], bus=f["bus"], speed_mb_s=f["speed"])


def _switch(f: dict[str, Any], path: Path) -> Switch:
    return Switch(id=f["id"], kind=f["kind"], name=f["name"], bus=f["bus"])


_MAKERS: dict[type, Callable[[dict[str, Any], Path], AnyPart]] = {
    DeviceEntry: _device,
    NumaEntry: _numa,
    NicEntry: _nic,
    SwitchEntry: _switch,
}


# Values.


def _flops(value: float) -> float:
    if not 0 < value < math.inf:
        raise DataError(f"{value} is no rate of computing; expected 10**12 operations a second, such as 312")
    return float(value)


def _cores(text: str) -> str:
    parse_list(text)
    return text


def _same(value: Any) -> Any:
    return value


_PARSERS: dict[str, Callable[[Any], Any]] = {
    "memory": parse_size,
    "size": parse_size,
    "speed": parse_rate,
    "bandwidth": parse_rate,
    "latency": parse_time,
    "tflops": _flops,
    "cores": _cores,
}
Change = tuple[str, Callable[[Any], Any]]
"""A field of the model, and what gives its value."""

OF_LINKS: dict[str, Change] = {
    "kind": ("interconnect", _same),
    "bandwidth": ("bandwidth_mb_s", parse_rate),
    "latency": ("latency_us", parse_time),
    "count": ("count", _same),
    "path": ("path", _same),
    "origin": ("origin", _same),
}
OF_PARTS: dict[str, Change] = {
    "name": ("name", _same),
    "memory": ("memory_bytes", parse_size),
    "tflops": ("tflops", _flops),
    "numa": ("numa", _same),
    "bus": ("bus", _same),
    "cores": ("cores", _cores),
    "speed": ("speed_mb_s", parse_rate),
}


def _parsed(field: str, value: Any, path: Path) -> Any:
    if value is None:
        return None
    parse = _PARSERS[field]
    if isinstance(value, list):
        return [explained((*path, at), partial(parse, one)) for at, one in enumerate(value)]
    return explained(path, lambda: parse(value))


def explained(path: Path, call: Callable[[], Any]) -> Any:
    """What `call` gives; what it raises becomes a `Mistake` at `path`."""
    try:
        return call()
    except DataError as reason:
        raise Mistake(path, str(reason)) from None


def names_of(text: str, path: Path, most: int) -> list[str]:
    """The names that an expression stands for. Raises `Mistake`."""
    found: list[str] = explained(path, lambda: _without_star(text, most))
    return found


def _without_star(text: str, most: int) -> list[str]:
    if expressions.matcher(text) is not None:
        raise DataError(f"{text!r} has a '*', which stands for parts that are there already; expected such as 'n[1-4]'")
    return expressions.expand(text, most)


def count_of(text: str, path: Path) -> int:
    """How many these are, before any is made. Raises `Mistake`."""
    found: int = explained(path, lambda: expressions.count(text, MOST))
    return found
