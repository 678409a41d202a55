"""TOML as a person would write it: tables in double brackets, a blank line between them, caches on one line each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

WIDEST = 100
_FIRST = ("format", "id", "name", "part", "between", "pairs", "one_way", "level")
_LAST = ("numa", "switch", "device", "nic", "link", "override")
_TABLES = ("node", *_LAST)


def ordered(value: Any) -> Any:
    """Data with the keys of each table in the order in which they are best read."""
    if isinstance(value, list | tuple):
        return [ordered(one) for one in value]
    if not isinstance(value, dict):
        return value
    keys = [*(k for k in _FIRST if k in value), *(k for k in value if k not in _FIRST and not _is_table(k, value))]
    keys += [key for key in _TABLES if _is_table(key, value)]
    return {key: ordered(value[key]) for key in keys if value[key] is not None}


def to_toml(plain: dict[str, Any]) -> str:
    """The text of a file."""
    return "\n".join(_table(plain, "")).strip() + "\n"


def _is_table(key: str, value: dict[str, Any]) -> bool:
    """`numa` is a table of domains, and the number of a device's domain."""
    inner = value.get(key)
    return key in _TABLES and isinstance(inner, list) and bool(inner) and isinstance(inner[0], dict)


def _table(table: dict[str, Any], path: str) -> Iterator[str]:
    for key, value in table.items():
        if not _is_table(key, table):
            yield f"{key} = {_value(value)}"
    for key, value in table.items():
        if _is_table(key, table):
            for entry in value:
                yield ""
                yield f"[[{path}{key}]]"
                yield from _table(entry, f"{path}{key}.")


def _value(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_value(one)}" for key, one in value.items()) + " }"
    if isinstance(value, list):
        words = [_value(one) for one in value]
        short = f"[{', '.join(words)}]"
        if len(short) <= WIDEST and not any(isinstance(one, dict) for one in value):
            return short
        return "[\n" + "".join(f"  {word},\n" for word in words) + "]"
    return repr(value)
