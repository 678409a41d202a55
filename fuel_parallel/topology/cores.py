"""Sets of cores as text: lists "0-3,8" and masks "0x0000000f" or "000000ff,fff00000"."""

from __future__ import annotations

from collections.abc import Iterable

from fuel_parallel.errors import DataError

MOST = 1 << 16
"""No machine has more cores; a file that says so is wrong, or wants our memory."""


def parse_list(text: str) -> tuple[int, ...]:
    """The cores of a list, ascending, each once. Raises `DataError` if it is none.

    >>> parse_list("0-2,8")
    (0, 1, 2, 8)
    """
    found: set[int] = set()
    for part in filter(None, (p.strip() for p in text.split(","))):
        first, dash, last = part.partition("-")
        if not (first.isascii() and first.isdigit() and (not dash or (last.isascii() and last.isdigit()))):
            raise DataError(f"{text!r} is not a list of cores; expected one such as '0-3,8'")
        start, stop = (int(end) if len(end) < 10 else MOST for end in (first, last or first))
        if stop >= MOST or stop < start:
            raise DataError(f"{text!r} is not a list of cores: {part!r} must ascend and stay below {MOST}")
        found.update(range(start, stop + 1))
    return tuple(sorted(found))


def parse_mask(text: str) -> tuple[int, ...]:
    """The cores of a mask: words of 32 bits in hexadecimal, the most significant first; an empty one is 0.

    >>> parse_mask("0x00000003,,0x1")
    (0, 64, 65)
    """
    bits = f"{mask_number(text):b}"  # as text: a shift for each bit takes quadratic time
    return tuple(bit for bit, digit in enumerate(reversed(bits)) if digit == "1")


def mask_number(text: str) -> int:
    """A mask as a number, bit 0 for core 0. Raises `DataError` if it is none.

    >>> mask_number("0x1,,0x3") == 2**64 + 3
    True
    """
    words = [word.strip().lower().removeprefix("0x") for word in text.split(",")]
    digits = "".join(word.rjust(8, "0") for word in words) if len(words) > 1 else words[0]
    if len(digits) * 4 > MOST or not set(digits) <= set("0123456789abcdef") or any(len(w) > 8 for w in words[1:]):
        raise DataError(f"{text[:80]!r} is not a mask of cores; expected hexadecimal words such as '000000ff,fff00000'")
    return int(digits or "0", 16)


def format_list(cores: Iterable[int]) -> str:
    """The shortest list.

    >>> format_list([8, 0, 1, 2])
    '0-2,8'
    """
    ranges: list[list[int]] = []
    for core in sorted(set(cores)):
        if ranges and ranges[-1][1] == core - 1:
            ranges[-1][1] = core
        else:
            ranges.append([core, core])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
