"""Sizes in bytes as people write them: "4096", "80 GiB", "1.5 kB"."""

from __future__ import annotations

import re
from fractions import Fraction

BINARY = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "PiB": 1 << 50}
"""Bytes of each unit, the least first."""

_UNITS = {"": 1, "B": 1, **BINARY, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BY_LOWER_CASE = {unit.lower(): nbytes for unit, nbytes in _UNITS.items()}
_SIZE = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([A-Za-z]{0,3})\s*")


def bytes_of(text: str) -> int | None:
    """The bytes, None where the text is no size. Units in upper or lower case: 1 KiB has 1024 bytes, 1 kB has 1000.

    >>> bytes_of("4096"), bytes_of("16MiB") == 16 * 2**20, bytes_of("1.5 kB"), bytes_of("4 apples"), bytes_of("1.5")
    (4096, True, 1500, None, None)
    """
    found = _SIZE.fullmatch(text)
    unit = _BY_LOWER_CASE.get(found[2].lower()) if found else None
    if found is None or unit is None or ("." in found[1] and not found[2]):
        return None
    return round(Fraction(found[1]) * unit)
