"""Tables from the names of a module's variables to those of a file's tensors, and how one becomes the other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fuel_parallel.checkpoint.tensor_file import Entry
from fuel_parallel.errors import ArgumentError
from fuel_parallel.name_patterns import NamePattern

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class StoredAs:
    """One line of a table: a variable, or several, and the tensor of a file that holds them.

    Args:
        ours: The name of the variable, in which `*` stands for any characters between two dots and `**` for any at all.
            Several names: the tensor is these variables joined along their last dimension, such as queries, keys and
            values.
        stored: The name of the tensor, with the same wildcards in the same order.
        transpose: The tensor has the last two dimensions the other way round, as weights of torch's Linear, [out, in],
            have. Variables of one dimension are never transposed.
        otherwise: The name of the tensor to read where there is none called `stored`: of tied weights.

    >>> StoredAs(("h.*.query.weight", "h.*.key.weight"), "h.*.c_attn.weight").stored
    'h.*.c_attn.weight'
    """

    ours: str | tuple[str, ...]
    stored: str
    transpose: bool = False
    otherwise: str | None = None

    def __post_init__(self) -> None:
        counts = {one: NamePattern(one).wildcards for one in (*self.variables, *self.tensors)}
        if len(set(counts.values())) > 1:
            raise ArgumentError(f"StoredAs: all names need the same number of wildcards; they have {counts}")

    @property
    def variables(self) -> tuple[str, ...]:
        """The names in `ours`."""
        return (self.ours,) if isinstance(self.ours, str) else self.ours

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names that a tensor may have."""
        return (self.stored,) if self.otherwise is None else (self.stored, self.otherwise)


@dataclass(frozen=True)
class Binding:
    """A line of a table with its wildcards filled in."""

    variables: tuple[str, ...]
    tensors: tuple[str, ...]
    transpose: bool


class NameTable:
    """How the variables of a model are called in files.

    Args:
        lines: Of the lines that name a variable the first counts.
        ignored: Tensors of files that are no variables, as patterns: buffers such as causal masks.
        prefix: What the names of files may lack, if all do: the name of the model within a larger one, with its dot.

    >>> table = NameTable([StoredAs("norm.weight", "model.norm.weight")], prefix="model.")
    >>> [binding.tensors for binding in table.bindings(["norm.weight"], ["norm.weight"])]
    [('norm.weight',)]
    """

    def __init__(self, lines: Iterable[StoredAs], *, ignored: Sequence[str] = (), prefix: str = "") -> None:
        self.lines = tuple(lines)
        self.ignored = tuple(NamePattern(one) for one in ignored)
        self.prefix = prefix

    def bindings(self, variables: Iterable[str], stored: Iterable[str] | None = None) -> list[Binding]:
        """The lines for these variables, with the names of a file that has these tensors, or with the full names."""
        bare = bool(self.prefix) and stored is not None and not any(one.startswith(self.prefix) for one in stored)
        found: list[Binding] = []
        taken: set[str] = set()
        for variable in variables:
            if variable in taken:
                continue
            binding = self._binding(variable)
            if binding is not None:
                if bare:
                    tensors = tuple(one.removeprefix(self.prefix) for one in binding.tensors)
                    binding = Binding(binding.variables, tensors, binding.transpose)
                found.append(binding)
                taken |= set(binding.variables)
        return found

    def ignores(self, tensor: str) -> bool:
        """Whether a tensor of a file is no variable on purpose."""
        return any(one.captures(tensor) is not None for one in self.ignored)

    def stored(self, entries: Sequence[Entry]) -> list[Entry]:
        """Entries under our names as those of files. Raises `ArgumentError` for a name that no line is for."""
        by_name = {entry.key: entry for entry in entries}
        bindings = self.bindings(by_name)
        bound = {name for binding in bindings for name in binding.variables}
        if bound != by_name.keys():
            problems = [f"no line of the table names {name}" for name in by_name.keys() - bound]
            problems += [f"the model has no {name}, which the table joins to others" for name in bound - by_name.keys()]
            raise ArgumentError(f"export_huggingface: {'; '.join(sorted(problems))}")
        return [
            joined([by_name[name] for name in binding.variables], binding.tensors[0], binding.transpose)
            for binding in bindings
        ]

    def _binding(self, variable: str) -> Binding | None:
        for line in self.lines:
            for name in line.variables:
                captures = NamePattern(name).captures(variable)
                if captures is not None:
                    ours, tensors = (
                        tuple(NamePattern(one).filled(captures) for one in names)
                        for names in (line.variables, line.tensors)
                    )
                    return Binding(ours, tensors, line.transpose)
        return None


SAME_NAMES = NameTable([StoredAs("**", "**")])
"""Files that call everything as the model does."""


def joined(parts: Sequence[Entry], key: str, transpose: bool) -> Entry:
    """One entry of several, joined along their last dimension and then transposed."""
    (*lead, _), transpose = parts[0].shape or (1,), transpose and len(parts[0].shape) > 1
    if len(parts) == 1 and not transpose:
        return Entry(key, parts[0].dtype, parts[0].shape, parts[0].array)
    for part in parts[1:]:
        if part.shape[:-1] != tuple(lead) or part.dtype != parts[0].dtype:
            raise ArgumentError(
                f"export_huggingface: {parts[0].key} and {part.key} cannot be joined as {key}: they are "
                f"{parts[0].dtype.name}{list(parts[0].shape)} and {part.dtype.name}{list(part.shape)}"
            )
    shape = (*lead, sum(part.shape[-1] for part in parts))

    def array() -> Array:
        whole = np.concatenate([part.array() for part in parts], axis=-1) if len(parts) > 1 else parts[0].array()
        return np.ascontiguousarray(whole.swapaxes(-1, -2)) if transpose else whole

    return Entry(key, parts[0].dtype, turned(shape) if transpose else shape, array)


def turned(shape: Shape) -> Shape:
    """A shape with the last two dimensions the other way round."""
    return (*shape[:-2], shape[-1], shape[-2])
