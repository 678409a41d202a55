"""Patterns over a graph, written as they would be in a script.

    divide(e := exp(subtract(x, top := max(x))), sum(e))

A name stands for any value, the same one wherever it stands; `name := part` also names what a part matches. `sum`,
`max` and `softmax` mean along the last dimension, which stays; `mT` swaps the last two.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from fuel_parallel.lazy.node import Spec
from fuel_parallel.runtime.graph import Graph, Instruction
from fuel_parallel.runtime.passes.constants import computed

Bound = dict[str, int]
"""The values that names of a pattern stand for."""


class Values:
    """What the values of a graph are made of and who reads them.

    Equal work counts as one value, named by the first that does it, and a reshape to the same shape counts as none.
    Values below are such first ones (`same` gives them).
    """

    def __init__(self, graph: Graph) -> None:
        self.specs = graph.specs()
        self.same = list(range(graph.first))
        self._made: dict[int, Instruction] = {}
        self._readers: dict[int, list[int]] = {}
        self._fixed = set(range(len(graph.leaves), graph.first))
        self._known = dict(enumerate(graph.constants, len(graph.leaves)))
        found: dict[Any, int] = {}
        for number, i in enumerate(graph.instructions, graph.first):
            i = Instruction(i.op, tuple(self.same[v] for v in i.inputs), i.attrs, i.spec, i.origin)
            if i.op.name == "reshape":
                source = i.inputs[0]
                if self.specs[source] is i.spec:
                    self.same.append(source)
                    continue
            key = number if i.op.crosses_ranks else (i.op, i.inputs, i.attrs)
            self.same.append(found.setdefault(key, number))
            if self.same[number] == number:
                self._made[number] = i
                for v in dict.fromkeys(i.inputs):
                    self._readers.setdefault(v, []).append(number)
                if not i.op.crosses_ranks and self._fixed.issuperset(i.inputs):
                    self._fixed.add(number)
        self.outputs = {self.same[v] for v in graph.outputs}

    def firsts(self) -> list[int]:
        """All values that instructions make, each once."""
        return list(self._made)

    def readers(self, value: int) -> list[int]:
        """The values that are made of this one."""
        return self._readers.get(value, [])

    def match(self, pattern: str, value: int, bound: Bound) -> set[int] | None:
        """The values that the pattern goes through, or None if it is not what the value is made of.

        `bound` has the names that are known, and gets the others; after a failure some may be there, too.
        """
        passed: set[int] = set()
        return passed if self._match(_parsed(pattern), value, bound, passed) else None

    def _match(self, part: ast.expr, value: int, bound: Bound, passed: set[int]) -> bool:
        if isinstance(part, ast.Name):
            return bound.setdefault(part.id, value) == value
        if isinstance(part, ast.NamedExpr):
            return self._match(part.target, value, bound, passed) and self._match(part.value, value, bound, passed)
        if not isinstance(part, ast.Call) or not isinstance(part.func, ast.Name):
            raise ValueError(f"not a pattern: {ast.unparse(part)}")
        i = self._made.get(value)
        name, holds = _MEANINGS.get(part.func.id, (part.func.id, _always))
        if name == "sum" and i is not None and i.op.name == "reshape":
            # As the cotangent of what was repeated along the last dimension is written.
            passed.add(value)
            value, i = i.inputs[0], self._with_last_kept(i)
        if i is None or i.op.name != name or not holds(i, self.specs[i.inputs[0]]):
            return False
        passed.add(value)
        return all(self._match(p, v, bound, passed) for p, v in zip(part.args, i.inputs, strict=True))

    def _with_last_kept(self, reshape: Instruction) -> Instruction | None:
        """The sum along the last dimension, kept, that a reshape makes of one that does not keep it."""
        i = self._made.get(reshape.inputs[0])
        if i is None or i.op.name != "sum":
            return None
        source = self.specs[i.inputs[0]].shape
        kept = i.attrs == ((len(source) - 1,), False) and reshape.spec.shape == (*source[:-1], 1)
        return Instruction(i.op, i.inputs, (i.attrs[0], True), reshape.spec, i.origin) if kept else None

    def filled_with(self, value: int) -> float | None:
        """The number that all elements of a value are, where it is written as such."""
        while (i := self._made.get(value)) is not None and i.op.name in ("reshape", "broadcast_to", "copy"):
            value = i.inputs[0]
        if i is None or i.op.name != "full":
            return None
        return float(i.attrs[1].value)

    def constant(self, value: int, limit: int) -> Any:
        """The value, if it depends on no leaf and nothing on the way takes more than `limit` bytes; else None."""
        if value not in self._fixed:
            return None
        needed: set[int] = set()
        stack = [value]
        while stack:
            v = stack.pop()
            if v not in needed and v not in self._known:
                needed.add(v)
                stack.extend(self._made[v].inputs)
        if any(self.specs[v].nbytes > limit for v in needed):
            return None
        for v in sorted(needed):
            i = self._made[v]
            arguments = [self._known[x] for x in i.inputs]
            # Wherever the plan will run: what it is for here is to be looked at.
            self._known[v] = arguments[0] if i.op.name == "copy" else computed(i, arguments)
            if self._known[v] is None:
                return None
        return self._known[value]


@lru_cache(maxsize=256)
def _parsed(pattern: str) -> ast.expr:
    return ast.parse(pattern, mode="eval").body


def _always(i: Instruction, source: Spec) -> bool:
    return True


def _along_last(i: Instruction, source: Spec) -> bool:
    return bool(i.attrs == ((len(source.shape) - 1,), True))


def _of_rows(i: Instruction, source: Spec) -> bool:
    return bool(i.attrs == (len(source.shape) - 1,))


def _swaps_last_two(i: Instruction, source: Spec) -> bool:
    *before, last, second = range(len(source.shape))
    return bool(i.attrs == ((*before, second, last),))


_MEANINGS: dict[str, tuple[str, Callable[[Instruction, Spec], bool]]] = {
    "sum": ("sum", _along_last),
    "max": ("max", _along_last),
    "softmax": ("softmax", _of_rows),
    "mT": ("permute_dims", _swaps_last_two),
}
