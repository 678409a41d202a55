"""Sizes and rates as people write them: "80 GiB", "24 GB/s", "200 Gb/s", "1.5 us"; and back, exactly."""

from __future__ import annotations

import math
import re

from fuel_parallel.errors import DataError
from fuel_parallel.sizes import BINARY, bytes_of
from fuel_parallel.topology.model import gb_s, mb_s

MOST_BYTES = 1 << 60
_NUMBER = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?(?:[eE][+-]?[0-9]{1,3})?)\s*([A-Za-zµμ/]{1,8})\s*")
_BITS = {"Mb/s": 1e-3, "Gb/s": 1.0, "Tb/s": 1e3}
RATES = {  # in GB/s
    "MB/s": 1e-3,
    "GB/s": 1.0,
    "TB/s": 1e3,
    **{unit: rate / 8 for unit, rate in _BITS.items()},
    **{f"{unit[0]}bit/s": rate / 8 for unit, rate in _BITS.items()},
    **{f"{unit[0]}bps": rate / 8 for unit, rate in _BITS.items()},
}
_BINARY_RATES = {"MiB/s": 1.0, "GiB/s": 1024.0}
TIMES = {"ns": 1e-3, "us": 1.0, "µs": 1.0, "μs": 1.0, "ms": 1e3}


def parse_size(value: int | str) -> int:
    """Bytes. Raises `DataError` when it is no size.

    >>> parse_size("80 GiB") == 80 * 2**30, parse_size("1.5 kB")
    (True, 1500)
    """
    # A text without a unit may be meant in GiB.
    size = value if not isinstance(value, str) else None if value.strip().isdigit() else bytes_of(value)
    if size is None or not 0 <= size <= MOST_BYTES:
        raise DataError(f"{_short(value)} is no size of memory; expected such as '80 GiB', at most 1 EiB")
    return size


def parse_rate(value: float | str) -> float:
    """MB/s of 2**20 bytes, in which a plain number counts already. Raises `DataError` when it is no bandwidth.

    >>> parse_rate("1 GiB/s"), round(parse_rate("200 Gb/s")), parse_rate(5)
    (1024.0, 23842, 5.0)
    """
    rate = float(value) if not isinstance(value, str) else _rate(value)
    if not 0 < rate < math.inf:
        raise DataError(f"{_short(value)} is no bandwidth; expected more than 0, such as '24 GB/s' or '200 Gb/s'")
    return rate


def parse_time(value: float | str) -> float:
    """Microseconds, in which a plain number counts already. Raises `DataError` when it is no time.

    >>> parse_time("800 ns"), parse_time(2)
    (0.8, 2.0)
    """
    if isinstance(value, str):
        number, unit = _split(value, TIMES, "time", "'1.5 us'")
        time = float(number) * TIMES[unit]
    else:
        time = float(value)
    if not 0 <= time < math.inf:
        raise DataError(f"{_short(value)} is no time; expected such as '1.5 us'")
    return time


def format_size(size: int) -> int | str:
    """What `parse_size` reads as this.

    >>> format_size(80 * 2**30), format_size(1000)
    ('80 GiB', 1000)
    """
    for unit, nbytes in reversed(BINARY.items()):
        if size and size % nbytes == 0:
            return f"{size // nbytes} {unit}"
    return size


def format_rate(rate: float, *, bits: bool = False) -> str:
    """What `parse_rate` reads as exactly this, in Gb/s or GB/s where these are round.

    >>> format_rate(mb_s(24)), format_rate(mb_s(25), bits=True), format_rate(1234.5)
    ('24 GB/s', '200 Gb/s', '1234.5 MiB/s')
    """
    for text in (*([f"{gb_s(rate) * 8:.7g} Gb/s"] if bits else []), f"{gb_s(rate):.7g} GB/s"):
        if "e" not in text and _rate(text) == rate:
            return text
    return f"{rate!r} MiB/s"


def format_time(time: float) -> str:
    """What `parse_time` reads as exactly this.

    >>> format_time(1.5), format_time(2.0)
    ('1.5 us', '2 us')
    """
    return f"{int(time) if time == int(time) and time < 1e15 else time!r} us"


def _rate(text: str) -> float:
    number, unit = _split(text, {**RATES, **_BINARY_RATES}, "bandwidth", "'24 GB/s', '200 Gb/s' or '900 MiB/s'")
    return float(number) * _BINARY_RATES[unit] if unit in _BINARY_RATES else mb_s(float(number) * RATES[unit])


def _split(text: str, units: dict[str, float], what: str, such_as: str) -> tuple[str, str]:
    found = _NUMBER.fullmatch(text)
    if found is None or found[2] not in units:
        raise DataError(f"{_short(text)} is no {what}; expected such as {such_as}")
    return found[1], found[2]


def _short(value: object) -> str:
    try:
        return repr(value)[:60]
    except ValueError:  # an integer of more digits than Python writes
        return "a number of thousands of digits"
