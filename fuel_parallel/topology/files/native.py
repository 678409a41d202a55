"""The native format: what a topology is, in TOML, YAML or JSON, short enough to write by hand.

docs/topology-files.md explains it by example, `schema()` is its JSON Schema. Every topology can be written, exactly;
what is left out of a file is unknown.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from fuel_parallel.errors import DataError, TopologyError, TopologyFileError
from fuel_parallel.topology.files.native_entries import Mistake, shown
from fuel_parallel.topology.files.native_expand import Expansion, expand
from fuel_parallel.topology.files.native_fold import fold_topology
from fuel_parallel.topology.files.native_schema import File
from fuel_parallel.topology.files.native_text import language, lines_of, parse
from fuel_parallel.topology.files.native_toml import ordered, to_toml
from fuel_parallel.topology.files.native_yaml import Path
from fuel_parallel.topology.files.source import Source
from fuel_parallel.topology.topology import DeviceTopology


def matches(source: Source) -> bool:
    """Whether it begins with a field of ours, or has TOML's tables in double brackets."""
    return language(source) is not None


def read(source: Source) -> DeviceTopology:
    r"""The topology. Raises `TopologyFileError`.

    >>> read(Source("pair.toml", '[[device]]\nid = "cuda:[0-1]"\nmemory = "80 GiB"')).device_ids()
    ['cuda:0', 'cuda:1']
    """
    return read_expansion(source).topology()


def read_expansion(source: Source) -> Expansion:
    """The parts and links, with the keys of the file that each comes from. Raises `TopologyFileError`."""
    form = language(source) or "toml"
    data = parse(source, form)
    try:
        found = expand(msgspec.convert(data, File))
    except Mistake as mistake:
        raise _error(source, form, mistake.path, mistake.reason) from None
    except msgspec.ValidationError as reason:
        what, path = _explained(str(reason))
        raise _error(source, form, path, what) from None
    except (OverflowError, RecursionError):
        raise source.error("a number is larger than any figure of a machine") from None
    if not found.parts:
        source.note("there are no parts: neither devices nor anything else")
    return found


def write(topology: DeviceTopology, form: str = "toml") -> str:
    """The text of a file in `toml`, `yaml` or `json`. Raises `TopologyError` when a part has no id.

    >>> from fuel_parallel.topology import DeviceInfo, DeviceKind
    >>> t = DeviceTopology("pair")
    >>> for n in range(2):
    ...     t.add_device(DeviceInfo(id=f"cuda:{n}", kind=DeviceKind.CUDA, memory_bytes=80 * 2**30))
    >>> print(write(t))
    format = "fuel-parallel 1"
    name = "pair"
    <BLANKLINE>
    [[device]]
    id = "cuda:[0-1]"
    memory = "80 GiB"
    <BLANKLINE>
    """
    try:
        plain = ordered(msgspec.to_builtins(fold_topology(topology)))
    except DataError as reason:
        raise TopologyError(str(reason)) from None
    return _WRITERS[form](plain)


def schema() -> dict[str, Any]:
    """The JSON Schema of a native file, for editors and other programs."""
    return msgspec.json.schema(File)


def form_of(name: str) -> str:
    """What a file of that name is written in: `json`, `yaml`, or else `toml`."""
    suffix = name.rpartition(".")[2].lower()
    return {"json": "json", "yaml": "yaml", "yml": "yaml"}.get(suffix, "toml")


def _yaml(plain: dict[str, Any]) -> str:
    import yaml

    class Dumper(yaml.SafeDumper):
        """Lists of values in one line, and tables never, so that a file begins with a field of ours."""

        def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> Any:
            return super().represent_mapping(tag, mapping, flow_style=False)

    return str(yaml.dump(plain, Dumper=Dumper, sort_keys=False, width=120, default_flow_style=None))


def _json(plain: dict[str, Any]) -> str:
    return json.dumps(plain, indent=2) + "\n"


_WRITERS = {"toml": to_toml, "yaml": _yaml, "json": _json}
FORMS = tuple(_WRITERS)
"""The languages that a native file can be written in."""


def _explained(message: str) -> tuple[str, Path]:
    """The reason and the keys of a message of msgspec: "Expected `int`, got `str` - at `$.node[0].name`"."""
    reason, _, place = message.partition(" - at `")
    path: Path = ()
    for name, index in re.findall(r"\.([A-Za-z_]+)|\[([0-9]+)\]", place):
        path = (*path, name or int(index))
    unknown = re.search(r"unknown field `(.*)`", reason, re.DOTALL)
    if unknown:
        reason = f"there is no field {unknown[1][:60]!r} here; expected one of {', '.join(_fields(path))}"
        return reason, (*path, unknown[1][:60])
    return reason[:300], path


def _fields(path: Path) -> list[str]:
    """The fields of the table that a path leads to."""
    table: Any = File
    for key in path:
        if isinstance(key, str):
            info = msgspec.inspect.type_info(table)
            inner = next(f.type for f in info.fields if f.encode_name == key)  # type: ignore[attr-defined]
            table = inner.item_type.cls
    return [name for name in table.__struct_fields__ if name != "node" or table is File]


def _error(source: Source, form: str, path: Path, reason: str) -> TopologyFileError:
    """At the line of the path, or of the nearest table around it."""
    lines = lines_of(source, form)
    at = next((path[:n] for n in range(len(path), -1, -1) if path[:n] in lines), None)
    return source.error(reason, line=None if at is None else lines[at], key=shown(path))
