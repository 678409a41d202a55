"""Loading files of Hugging Face into a module, each rank its own bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass

import numpy as np

from fuel_parallel.arguments import checked
from fuel_parallel.checkpoint.boxes import Box, whole
from fuel_parallel.checkpoint.huggingface import Array, StoredArray, read_huggingface
from fuel_parallel.checkpoint.names import SAME_NAMES, Binding, NameTable, turned
from fuel_parallel.comm.communicator import Communicator
from fuel_parallel.errors import CheckpointError
from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.ops import creation
from fuel_parallel.module import Module, Variable

_BAND = 16  # rows that are read and transposed at once: they stay in the cache
_SHOWN = 8  # names that an error lists of each kind


@checked
def load_huggingface(
    module: Module, path: str | os.PathLike[str], names: NameTable | None = None, *, pp: Communicator | None = None
) -> None:
    """Sets all variables of a module from a folder, index or safetensors file.

    A rank reads the bytes of its part of each tensor and no others; `fp.tensor_parallel.parallelize` comes before. No
    rank waits for another, but for names where there are stages. What is floating is cast to the dtype of the variable.
    In memory there is, besides the parts, one of them twice while it is cast; initial values that were not computed yet
    never are.

    Args:
        module: Whose variables; all of them, or none if an error is raised before the first is read.
        path: The folder, or a file.
        names: How the variables are called there; None if they have the same names.
        pp: The ranks that have the other stages of the model: together they take all tensors. A collective call then.

    Raises `CheckpointError` for a folder that cannot be read, and one that lists all variables that are missing, all
    tensors that no variable takes, and all shapes and dtypes that do not fit.

    >>> import tempfile
    >>> import fuel_parallel as fp
    >>> from fuel_parallel.checkpoint import NameTable, StoredAs, export_huggingface
    >>> names = NameTable([StoredAs("weight", "fc.weight", transpose=True), StoredAs("bias", "fc.bias")])
    >>> layer, fresh = (fp.Linear(3, 2, fp.lazy.random.Generator(seed)) for seed in (0, 1))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = export_huggingface(layer, folder, names=names)
    ...     stored = fp.checkpoint.read_huggingface(folder)["fc.weight"].shape
    ...     load_huggingface(fresh, folder, names)
    >>> stored, bool(fp.lazy.all(fresh.weight == layer.weight))
    ((2, 3), True)
    """
    stored = read_huggingface(path)
    names = SAME_NAMES if names is None else names
    variables = module.named_variables()
    others: set[str] = set()
    if pp is not None:
        others = {name for found in pp.all_gather_object(list(variables), type=list[str]) for name in found}
    reads = _reads(path, variables, others - variables.keys(), stored, names)
    for read in reads:
        read.variable.assign(creation.asarray(read.array(), copy=False))


@dataclass(frozen=True)
class _Read:
    """A box of a stored tensor that is a variable of this rank."""

    variable: Variable
    stored: StoredArray
    box: Box
    transpose: bool

    def array(self) -> Array:
        """Its value, of the variable's shape and dtype."""
        at = self.box.within(whole(self.stored.shape))
        if not self.transpose:
            return np.asarray(self.stored[at], self.variable.dtype, order="C")
        out = np.empty(self.variable.shape, self.variable.dtype)
        for begin in range(0, out.shape[-1], _BAND):
            end = min(begin + _BAND, out.shape[-1])
            rows = slice(at[-2].start + begin, at[-2].start + end)
            out[..., begin:end] = self.stored[(*at[:-2], rows, at[-1])].swapaxes(-1, -2)
        return out


def _reads(
    path: str | os.PathLike[str],
    variables: Mapping[str, Variable],
    others: Set[str],
    stored: Mapping[str, StoredArray],
    names: NameTable,
) -> list[_Read]:
    """What is to be read, or the error that lists all that does not fit. `others` are variables of other stages."""
    reads: list[_Read] = []
    missing, mismatched = [], []
    used: set[str] = set()
    bindings = names.bindings([*variables, *sorted(others)], stored)
    unnamed = set(variables)
    for binding in bindings:
        unnamed -= set(binding.variables)
        found = next((one for one in binding.tensors if one in stored), None)
        lacking = [one for one in binding.variables if one not in variables]
        used |= set(binding.tensors)
        if lacking and others >= set(binding.variables):
            continue
        if found is None:
            missing.append(f"{binding.tensors[0]} (for {', '.join(binding.variables)})")
            continue
        if lacking:
            mismatched += [f"{found} (the model has no {one})" for one in lacking]
            continue
        problem = _problem(binding, variables, found, stored[found])
        if problem:
            mismatched.append(problem)
        else:
            reads += _reads_of(binding, variables, stored[found])
    missing += [f"{one} (no line of the name table is for it)" for one in sorted(unnamed)]
    unexpected = sorted(one for one in stored if one not in used and not names.ignores(one))
    told = _told(missing=missing, unexpected=unexpected, mismatched=mismatched)
    if told:
        raise CheckpointError(
            f"{os.fspath(path)} does not fit the model: {told}; check the model's sizes and the table"
        )
    return reads


def _told(**kinds: list[str]) -> str:
    return "; ".join(
        f"{len(found)} {kind}: {', '.join(found[:_SHOWN])}{', …' if len(found) > _SHOWN else ''}"
        for kind, found in kinds.items()
        if found
    )


def _whole(variable: Variable) -> tuple[int, ...]:
    return variable.shape if variable.shard is None else variable.shard.global_shape


def _problem(binding: Binding, variables: Mapping[str, Variable], name: str, stored: StoredArray) -> str:
    """Why a tensor cannot be these variables; empty if it can."""
    wholes = [_whole(variables[one]) for one in binding.variables]
    shape = wholes[0]
    if len(wholes) > 1:
        if not shape or any(one[:-1] != shape[:-1] for one in wholes):
            return f"{name} ({', '.join(binding.variables)} of shapes {', '.join(map(str, wholes))} cannot be joined)"
        shape = (*shape[:-1], sum(one[-1] for one in wholes))
    shape = turned(shape) if binding.transpose and len(shape) > 1 else shape
    dtype = variables[binding.variables[0]].dtype
    both_floating = dtypes.kind(dtype) == dtypes.kind(stored.dtype) == "real floating"
    if shape == stored.shape and (both_floating or dtype == stored.dtype):
        return ""
    wanted, there = f"{dtype.name}{list(shape)}", f"{stored.dtype.name}{list(stored.shape)}"
    return f"{name} (there {there}, here {wanted} for {', '.join(binding.variables)})"


def _reads_of(binding: Binding, variables: Mapping[str, Variable], stored: StoredArray) -> Iterator[_Read]:
    column = 0
    for name in binding.variables:
        variable = variables[name]
        start = (0,) * variable.ndim if variable.shard is None else variable.shard.start
        shape = variable.shape
        transpose = binding.transpose and variable.ndim > 1
        if start:
            start = (*start[:-1], start[-1] + column)
            column += _whole(variable)[-1]
        box = Box(turned(start), turned(shape)) if transpose else Box(start, shape)
        yield _Read(variable, stored, box, transpose)
