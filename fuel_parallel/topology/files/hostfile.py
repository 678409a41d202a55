"""Host files: of Open MPI and DeepSpeed (`n01 slots=4`), MPICH and Intel MPI (`n01:4`), MLX (JSON), or bare names.

`parse` gives the hosts whatever the dialect; it takes comments of all dialects, adds up hosts that come again, and
refuses what only a running job knows (`+n0`) and files that mix dialects.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from fuel_parallel.topology.files.hostlist import MOST, check_name
from fuel_parallel.topology.files.source import Source
from fuel_parallel.topology.model import DeviceInfo, DeviceKind
from fuel_parallel.topology.topology import DeviceTopology

OPEN_MPI, HYDRA, MLX = "Open MPI", "MPICH", "MLX"


@dataclass(frozen=True)
class Host:
    """A host and how many ranks it takes.

    Args:
        name: As it is written.
        slots: None where the file says nothing.
        max_slots: None where the file says nothing.
        user: For the login, "" where the file says nothing.
        line: Where it is first named, from 1.
        dialect: Whose words its lines have, "" for a bare name.
    """

    name: str
    slots: int | None = None
    max_slots: int | None = None
    user: str = ""
    line: int = 0
    dialect: str = ""


@dataclass(frozen=True)
class _Word:
    """What `NAME=VALUE` after a host means: a field of `Host`, or "" for what is left out."""

    dialect: str
    field: str


_WORDS = {
    "slots": _Word(OPEN_MPI, "slots"),
    "count": _Word(OPEN_MPI, "slots"),
    "cpu": _Word(OPEN_MPI, "slots"),
    "cpus": _Word(OPEN_MPI, "slots"),
    "slots-max": _Word(OPEN_MPI, "max_slots"),
    "slots_max": _Word(OPEN_MPI, "max_slots"),
    "max-slots": _Word(OPEN_MPI, "max_slots"),
    "max_slots": _Word(OPEN_MPI, "max_slots"),
    "username": _Word(OPEN_MPI, "user"),
    "user": _Word(HYDRA, "user"),
    "binding": _Word(HYDRA, ""),
}
_MLX = re.compile(r'\s*\[\s*\{\s*"(?:ssh|ips|rdma)"')
_USER = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_COMMENT = re.compile(r"/\*.*?(?:\*/|\Z)|(?://|#)[^\n]*", re.DOTALL)
_LOOK = 100


def matches(source: Source) -> bool:
    """Whether the first lines are hosts, alone or with words such as `slots=4`."""
    return looks_like_hosts(source) or _MLX.match(source.text) is not None


def looks_like_hosts(source: Source, sign: str = r"") -> bool:
    """Whether the first lines are hosts; with a `sign`, some line must have that besides."""
    seen = []
    for _, text in _uncommented(source):
        seen.append(text)
        if not re.fullmatch(r"[\^+]?[A-Za-z0-9_.@\-]+(?::[0-9*#]*)?(?:\s+[A-Za-z_\-]+\s*=\s*\S+)*", text[:1000]):
            return len(seen) > 1 and any("=" in one for one in seen)  # one bad line of many: `parse` says which
        if len(seen) == _LOOK:
            break
    return bool(seen) and (not sign or any(re.search(sign, one) for one in seen))


def read(source: Source) -> DeviceTopology:
    """One CPU device a slot of each host; nothing is known of the links. Raises `TopologyFileError`."""
    hosts = parse(source)
    silent = [host.name for host in hosts if host.slots is None]
    if silent:
        more = ", ..." if len(silent) > 4 else ""
        source.note(f"{len(silent)} hosts have no number of slots, and one device each: {', '.join(silent[:4])}{more}")
    return topology_of(hosts)


def write(topology: DeviceTopology) -> str:
    """A host file of Open MPI: a slot for each device that computes."""
    return "".join(f"{host} slots={count}\n" for host, count in slots_of(topology).items())


def parse(source: Source) -> tuple[Host, ...]:
    r"""The hosts of a file, in the order of their first lines. Raises `TopologyFileError`.

    >>> parse(Source("hosts", "n01 slots=2  # new\nn01 slots=1\n"))
    (Host(name='n01', slots=3, max_slots=None, user='', line=1, dialect='Open MPI'),)
    """
    found: dict[str, Host] = {}
    excluded: dict[str, int] = {}
    dialects: dict[str, int] = {}
    total = 0
    lines = _mlx_lines(source) if _MLX.match(source.text) else _lines(source, excluded)
    for host in lines:
        if host.dialect:
            dialects.setdefault(host.dialect, host.line)
        if len(dialects) > 1:
            first, second = dialects
            raise source.error(
                f"words of {second}, but line {dialects[first]} has words of {first}; a file is of one dialect",
                line=host.line,
            )
        total += host.slots or 1
        if total > MOST:
            raise source.error(f"with {host.name!r} there are more than {MOST} slots", line=host.line)
        found[host.name] = _added(source, found[host.name], host) if host.name in found else host
    for name, line in excluded.items():
        if found.pop(name, None) is None:
            source.note(f"^{name} leaves out a host that is not listed", line=line)
    if HYDRA in dialects:
        source.note("read as a machine file of MPICH; Open MPI takes `host:2` for the name of a host")
    if not found:
        raise source.error("no hosts; expected lines such as `n01 slots=4` or `n01:4`")
    return tuple(found.values())


def topology_of(hosts: tuple[Host, ...]) -> DeviceTopology:
    """One CPU device a slot, and no links."""
    t = DeviceTopology("hosts")
    for host in hosts:
        for i in range(1 if host.slots is None else host.slots):
            t.add_device(DeviceInfo(id=f"{host.name}/cpu:{i}", node=host.name, kind=DeviceKind.CPU))
    return t


def slots_of(topology: DeviceTopology) -> dict[str, int]:
    """For each machine the number of its devices; CPUs count where a machine has nothing else."""
    devices: dict[str, list[DeviceInfo]] = {}
    for device in topology.devices:
        devices.setdefault(device.node or "localhost", []).append(device)
    accelerators = {host: sum(d.kind is not DeviceKind.CPU for d in mine) for host, mine in devices.items()}
    return {host: accelerators[host] or len(mine) for host, mine in devices.items()}


def _added(source: Source, old: Host, new: Host) -> Host:
    """A host that comes again: its slots add up; a line without a number is one slot."""
    if old.user and new.user and old.user != new.user:
        raise source.error(
            f"{new.name!r} has the user {new.user!r}, but {old.user!r} in line {old.line}", line=new.line
        )
    limits = [host.max_slots for host in (old, new) if host.max_slots is not None]
    return replace(
        old,
        slots=(1 if old.slots is None else old.slots) + (1 if new.slots is None else new.slots),
        max_slots=max(limits, default=None),
        user=old.user or new.user,
        dialect=old.dialect or new.dialect,
    )


def _lines(source: Source, excluded: dict[str, int]) -> Iterator[Host]:
    noted: set[str] = set()
    _refuse_open_comment(source)
    for line, text in _uncommented(source):
        first, *rest = re.sub(r"\s*=\s*", "=", text).split()
        if first.startswith("+"):
            raise source.error(
                f"{first[:40]!r} is relative to the hosts that a batch system gives to a job, which are not in this "
                "file; name the hosts themselves",
                line=line,
            )
        if first.startswith("^"):
            excluded[check_name(source, first[1:], "host", line=line)] = line
            continue
        yield _host(source, first, rest, line, noted)


def _host(source: Source, first: str, rest: list[str], line: int, noted: set[str]) -> Host:
    user, at, name = first.rpartition("@")
    if at and not _USER.fullmatch(user):
        raise source.error(f"{user[:40]!r} is no user; expected USER@HOST", line=line)
    name, colon, number = name.partition(":")
    if colon and ":" in number:
        raise source.error(f"{first[:40]!r}: an IPv6 address cannot be told from HOST:SLOTS; name the host", line=line)
    host = Host(check_name(source, name, "host", line=line), user=user, line=line, dialect=HYDRA if colon else "")
    if colon:
        host = replace(host, slots=_count(source, number, first, line))
    for word in rest:
        key, equals, value = word.partition("=")
        meaning = _WORDS.get(key.lower())
        if not equals or meaning is None:
            known = ", ".join(dict.fromkeys(_WORDS))
            raise source.error(f"{word[:40]!r} after a host is not known; expected NAME=VALUE of {known}", line=line)
        if host.dialect not in ("", meaning.dialect):
            raise source.error(f"{word[:40]!r} is of {meaning.dialect}, but {first!r} is of {host.dialect}", line=line)
        host = replace(host, dialect=meaning.dialect)
        if not meaning.field:
            if key not in noted:
                source.note(f"{key}= is left out: which cores ranks get, fuelrun decides", line=line)
            noted.add(key)
            continue
        if getattr(host, meaning.field) not in (None, ""):
            raise source.error(f"{word[:40]!r}: {host.name!r} has its {meaning.field} already", line=line)
        if meaning.field == "user" and not _USER.fullmatch(value):
            raise source.error(f"{word[:40]!r}: that is no user", line=line)
        changes: dict[str, Any] = {meaning.field: value}
        if meaning.field != "user":
            changes[meaning.field] = _count(source, value, word, line)
        host = replace(host, **changes)
    if host.max_slots is not None and host.max_slots < (host.slots or 0):
        raise source.error(f"{host.name!r} has {host.slots} slots, but at most {host.max_slots}", line=line)
    return host


def _count(source: Source, text: str, word: str, line: int) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or not 0 < int(text) <= MOST:
        raise source.error(f"{word[:40]!r}: expected a number of slots from 1 to {MOST}", line=line)
    return int(text)


def _uncommented(source: Source) -> Iterator[tuple[int, str]]:
    """Lines that say something, without comments: `#`, `//`, and `/* */` over several lines."""
    lines = _COMMENT.sub(lambda found: "\n" * found[0].count("\n") or " ", source.text).split("\n")
    return ((number, text.strip()) for number, text in enumerate(lines, 1) if text.strip())


def _refuse_open_comment(source: Source) -> None:
    for found in _COMMENT.finditer(source.text):
        if found[0].startswith("/*") and (len(found[0]) < 4 or not found[0].endswith("*/")):
            line = source.text.count("\n", 0, found.start()) + 1
            raise source.error("the comment that begins here has no end", line=line)


def _mlx_lines(source: Source) -> Iterator[Host]:
    """MLX's JSON: each entry is a host, by which ssh reaches it, and a rank."""
    try:
        entries = json.loads(source.text)
    except (ValueError, RecursionError) as reason:
        raise source.error(f"no JSON: {reason}", line=getattr(reason, "lineno", None)) from None
    for number, entry in enumerate(entries if isinstance(entries, list) else [entries]):
        if not isinstance(entry, dict) or not isinstance(entry.get("ssh"), str):
            raise source.error('expected {"ssh": HOST, "ips": [...]}', key=f"entry {number}")
        user, _, name = entry["ssh"].rpartition("@")
        if user and not _USER.fullmatch(user):
            raise source.error(f"{user[:40]!r} is no user", key=f"entry {number}")
        yield Host(check_name(source, name, "host"), slots=1, user=user, line=1, dialect=MLX)
