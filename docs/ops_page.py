"""The reference page of ops and functions, made of the registry and of the namespace: it lists what there is."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import fuel_parallel
import fuel_parallel.lazy as ft
from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.draw import NAMES
from fuel_parallel.lazy.node import OPS, Op
from fuel_parallel.lazy.outline import category_of
from fuel_parallel.runtime.codegen.expressions import EXPRESSIONS
from fuel_parallel.runtime.codegen.lowering import LOWERINGS
from fuel_parallel.runtime.program import not_inferred

MADE_BY_PASSES = "made by passes and the memory plan"
KINDS = {
    "bool": (dtypes.bool_,),
    "integers": (*dtypes.SIGNED, *dtypes.UNSIGNED),
    "floats": dtypes.FLOATING,
    "complex": dtypes.COMPLEX,
}

ABOUT = """
Every op of the registry, and every function of `fuel_parallel.lazy`; docs/graph.md tells how they come together.

- *shapes*: extents of the inputs, and of the result. Attributes, which stand behind the op, are named as they are.
- *dtypes*: of the first input; the others have the same after promotion, or are indices.
- *vjp*: whether `grad` passes: yes, as a zero, or not at all.
- *backends*: every kernel is written for numpy's functions and runs on numpy and CuPy arrays. An op that is *fused* may
  also be part of a region: a loop over blocks on a CPU, a generated kernel on a GPU. What other devices compute
  themselves, and what they leave to the host, tells docs/devices.md.
"""


def page(rest_of: Callable[[str], str] = str) -> str:
    """The page in reST; `rest_of` makes reST of a line of a docstring."""
    for module in pkgutil.walk_packages(fuel_parallel.__path__, "fuel_parallel."):
        importlib.import_module(module.name)
    sections: dict[str, list[Op]] = {}
    for op in OPS.values():
        sections.setdefault(section_of(op), []).append(op)
    lines = [*heading("Ops and functions", "="), ABOUT]
    for name, ops in sections.items():
        rows = [(called(op), op.shapes, words(op.domain), vjp(op), backends(op)) for op in ops]
        lines += [*heading(f"Ops: {name}", "-"), *table(("op", "shapes", "dtypes", "vjp", "backends"), rows)]
    rows = [(linked(name, f), rest_of(summary(f))) for name, f in functions()]
    lines += [*heading("Functions", "-"), *table(("function", "gives"), rows)]
    return "\n".join(lines) + "\n"


def section_of(op: Op) -> str:
    """What kind of op it is, as in the legend of a graph's picture."""
    if op.infer is not_inferred:
        return MADE_BY_PASSES
    category = category_of(op)
    return NAMES.get(category, category.replace("_", " "))


def called(op: Op) -> str:
    """Its name and attributes."""
    return f"``{op.name}``" + (f" {', '.join(op.attr_names)}" if op.attr_names else "")


def words(domain: Iterable[dtypes.DType]) -> str:
    """Dtypes by kind, those of a kind that is not complete by name."""
    left = set(domain)
    if left == set(dtypes.ALL):
        return "any"
    found = []
    for name, kind in KINDS.items():
        if left >= set(kind):
            found.append(name)
            left -= set(kind)
    return ", ".join([*found, *sorted(d.name for d in left)])


def vjp(op: Op) -> str:
    """Whether it has a derivative."""
    return "none" if op.vjp is None else "yes" if op.vjp else "zero"


def backends(op: Op) -> str:
    """Where it can run, and how."""
    if category_of(op) == "data":
        return ""
    fused_on_gpu = op.name in EXPRESSIONS or op.name in LOWERINGS
    fused = op.elementwise or fused_on_gpu
    return "numpy, cupy" + (", fused" if fused_on_gpu else ", fused on numpy" if fused else "")


def functions() -> list[tuple[str, Callable[..., Any]]]:
    """The public functions of the namespace."""
    found = [(name, getattr(ft, name)) for name in ft.__all__]
    return [(name, f) for name, f in found if isinstance(f, FunctionType) and not name.startswith("__")]


def linked(name: str, function: Callable[..., Any]) -> str:
    """Its name and parameters, without types, as a link to its own reference."""
    signature = inspect.signature(function)
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return f":func:`{name}{inspect.Signature(plain)} <fuel_parallel.lazy.{name}>`"


def summary(function: Callable[..., Any]) -> str:
    """What its docstring begins with."""
    text = inspect.getdoc(function) or ""
    return " ".join(text.partition("\n\n")[0].split())


def heading(text: str, line: str) -> list[str]:
    """A heading."""
    return ["", text, line * len(text), ""]


def table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """A list-table."""
    lines = [".. list-table::", "   :header-rows: 1", ""]
    for row in (header, *rows):
        marks = ["* -", *["  -"] * (len(row) - 1)]
        lines += [f"   {mark} {cell}".rstrip() for mark, cell in zip(marks, row, strict=True)]
    return [*lines, ""]
