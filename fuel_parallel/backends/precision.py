"""How exactly products of float32 matrices are computed, where a device has a choice.

NVIDIA's tensor cores (compute capability 8.0 and newer) multiply float32 several times as fast in TF32: operands are
rounded to 10 bits of fraction, sums are float32. That is off unless asked for.
"""

from __future__ import annotations

import os

from fuel_parallel.errors import ArgumentError

VARIABLE = "FUEL_MATMUL_PRECISION"
PRECISIONS = {"highest": "float32 products in float32", "high": "float32 products in TF32 where the device has it"}
"""The choices, and what each means."""

_chosen = ""


def matmul_precision(precision: str | None = None) -> str:
    """How products of float32 and complex64 matrices are computed; with an argument, sets it for this process first.

    `highest`, the default, multiplies and adds in float32; `high` lets a CUDA device round the operands to TF32. What
    was not set here is read from FUEL_MATMUL_PRECISION. It holds for what is computed from now on, also of a graph
    that is built already. Other devices and dtypes always compute as exactly as they can: 16-bit floats are summed in
    float32.

    >>> matmul_precision("high"), matmul_precision(), matmul_precision("highest")
    ('high', 'high', 'highest')
    """
    global _chosen
    if precision is not None:
        _chosen = _checked(precision, "matmul_precision")
    return _chosen or _checked(os.environ.get(VARIABLE) or "highest", VARIABLE)


def describe_precision() -> str:
    """The precision, what it means and where it comes from, for `fuelrun doctor`."""
    precision = matmul_precision()
    source = f", from {VARIABLE}" if not _chosen and os.environ.get(VARIABLE) else ""
    return f"{precision}{source}: {PRECISIONS[precision]}"


def _checked(precision: str, where: str) -> str:
    if precision not in PRECISIONS:
        raise ArgumentError(f"{where}: unknown precision {precision!r}; expected one of {', '.join(PRECISIONS)}")
    return precision
