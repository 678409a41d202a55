"""Regions on the CPU: a `Program` becomes one Python function that runs it block of rows by block of rows.

The function is generated once for each program: straight-line calls of numpy's ufuncs on slices of the inputs, on the
outputs, and on scratch that stays in the second-level cache. A value that is read for the last time gives its scratch
to the result that is made of it. Calls on small arrays cost as much as 4,000 additions, so nothing is looked up, made
or reshaped between them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from fuel_parallel.lazy.dtypes import DType, is_half
from fuel_parallel.runtime.program import Extent, Operation, Program, kernel_on_rows

Runner = Callable[..., None]
"""Runs a whole region: first its inputs, then its outputs."""


def run_blocks(program: Program, inputs: list[Any], outputs: list[Any]) -> None:
    """Runs a region; `outputs` are the contiguous arrays to fill."""
    runner = _runners.get(program)
    if runner is None:
        runner = _runners[program] = _Source(program).function()
    runner(*inputs, *outputs)


def source_of(program: Program) -> str:
    """The text of the function that runs a region, to read."""
    return _Source(program).text()


_runners: WeakKeyDictionary[Program, Runner] = WeakKeyDictionary()
_scratch: dict[tuple[int, DType], Any] = {}


def _scratch_array(index: int, shape: tuple[int, ...], dtype: DType) -> Any:
    """All regions share their scratch, so that it stays in the cache from one to the next."""
    size = reduce(int.__mul__, shape)
    array = _scratch.get((index, dtype))
    if array is None or array.size < size:
        array = _scratch[index, dtype] = np.empty(size, dtype)
    return array[:size].reshape(shape)


class _Source:
    """The function of one program, line by line. Names: `i` inputs, `o` outputs, `a` and `b` their blocks, `s` scratch,
    `t` inputs that repeat, laid out for a whole block, `k` what was made before.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.first = len(program.inputs)
        self.step = min(program.block_rows, program.rows)
        self.tail = program.rows % self.step
        self.flat = program.is_flat
        self.known: dict[str, Any] = {"np": np}
        self.setup: list[str] = []
        self.at_tail: list[str] = []
        self.body: list[str] = []
        self.after: list[str] = []
        self.names: list[str] = []
        # Which scratch a register lies in, and which registers lie in a scratch.
        self.scratch_of: dict[int, str] = {}
        self.held: dict[str, set[int]] = {}
        self.free: dict[tuple[DType, int], list[str]] = {}
        self.kinds: dict[str, tuple[DType, int]] = {}
        self.targets: dict[int, list[int]] = {}
        for number, (register, _) in enumerate(program.outputs):
            self.targets.setdefault(register, []).append(number)
        self.last_use = {v: p for p, o in enumerate(program.operations) for v in o.inputs}

    def function(self) -> Runner:
        """The function."""
        text = self.text()
        exec(compile(text, f"{self.program}", "exec"), self.known)  # made of our own words and numbers alone
        runner: Runner = self.known.pop("region")
        return runner

    def text(self) -> str:
        """Its text."""
        if not self.names:
            self._lay_over_grid()
            for register in range(self.first):
                self._input(register)
            for position, operation in enumerate(self.program.operations):
                self._operation(position, operation)
        p = self.program
        parameters = [f"i{r}" for r in range(self.first)] + [f"o{n}" for n in range(len(p.outputs))]
        lines = [f"def region({', '.join(parameters)}):", *_indented(self.setup, 1)]
        if p.rows > self.step:
            lines += [f"    for start in range(0, {p.rows}, {self.step}):", f"        stop = start + {self.step}"]
            if self.tail:
                lines += [f"        if stop > {p.rows}:", f"            stop = {p.rows}", *_indented(self.at_tail, 3)]
            lines += _indented(self.body, 2)
        else:
            lines += [f"    start, stop = 0, {p.rows}", *_indented(self.body, 1)]
        return "\n".join([*lines, *_indented(self.after, 1), "    return", ""])

    # Inputs and memory.

    def _lay_over_grid(self) -> None:
        p = self.program
        extents = {f"i{register}": extent for register, (extent, _) in enumerate(p.inputs)}
        extents |= {f"o{number}": p.extent_of(register) for number, (register, _) in enumerate(p.outputs)}
        for name, extent in extents.items():
            self.setup.append(f"{name} = {name}.reshape({p.on_grid(extent)})")

    def _input(self, register: int) -> None:
        extent, period = self.program.inputs[register]
        name = f"a{register}"
        if extent is Extent.SCALAR:
            name = f"i{register}"
        elif extent in (Extent.FULL, Extent.ROW):
            self.body.append(f"{name} = i{register}[start:stop]")
        elif extent is Extent.PERIODIC and period > self.step:
            # Blocks are cut so that each lies within one period, or is a whole number of them.
            self.body.append(f"begin = start % {period}")
            self.body.append(f"{name} = i{register}[begin : begin + stop - start]")
        else:
            name = f"t{register}"
            times = self.step if extent is Extent.COLUMN else self.step // period
            source = f"i{register}"
            # Numpy adds two equal forms faster than it broadcasts, and the copy stays in the cache.
            if times > 1:
                one_row = extent is Extent.COLUMN
                source = f"np.repeat({source}, {times}, 0)" if one_row else f"np.concatenate([{source}] * {times})"
            self.setup.append(f"{name} = {source}")
            self._cut_at_tail(name)
        self.names.append(name)

    def _cut_at_tail(self, name: str) -> None:
        self.at_tail.append(f"{name} = {name}[:{self.tail}]")

    def _constant(self, name: str, value: Any) -> str:
        self.known[name] = value
        return name

    def _take_scratch(self, register: int, operation: Operation) -> str:
        width = 1 if operation.extent is Extent.ROW else self.program.columns
        pool = self.free.setdefault((operation.dtype, width), [])
        name = pool.pop() if pool else self._new_scratch(operation.dtype, width)
        self._hold(register, name)
        return name

    def _new_scratch(self, dtype: DType, width: int) -> str:
        name = f"s{len(self.kinds)}"
        self.kinds[name] = dtype, width
        shape = (self.step,) if self.flat else (self.step, width)
        self._constant(f"k{name}", _scratch_array(len(self.kinds), shape, dtype))
        self.setup.append(f"{name} = k{name}")
        self._cut_at_tail(name)
        return name

    def _hold(self, register: int, name: str) -> None:
        self.scratch_of[register] = name
        self.held.setdefault(name, set()).add(register)

    def _let_go(self, position: int, operation: Operation) -> None:
        """Frees the scratch of values that this operation is the last to read."""
        for value in set(operation.inputs):
            name = self.scratch_of.get(value)
            if name is not None and self.last_use[value] <= position:
                self.held[name].discard(value)
                if not self.held[name]:
                    self.free[self.kinds[name]].append(name)
                    del self.scratch_of[value]

    # Operations.

    def _operation(self, position: int, operation: Operation) -> None:
        register = self.first + position
        op = operation.op
        if operation.extent in (Extent.COLUMN_SUM, Extent.TOTAL):
            self._accumulate(register, operation)
            self.names.append("")
            self._let_go(position, operation)
            return
        writer = self._writer(register, operation)
        if writer is None:
            self._compute(register, operation)
            self._let_go(position, operation)
            return
        # Element by element the result may lie where an input lies that is not read any more.
        in_place = op.elementwise or op.name == "scale_and_subtract"
        if in_place:
            self._let_go(position, operation)
        targets = self.targets.get(register)
        if targets:
            # A value that leaves the region is written to its place at once.
            out = f"b{targets[0]}"
            self.body.append(f"{out} = o{targets[0]}[start:stop]")
        else:
            out = self._take_scratch(register, operation)
        self.body += [line.format(out=out) for line in writer]
        self.body += [f"o{n}[start:stop] = {out}" for n in (targets or ())[1:]]
        self.names.append(out)
        if not in_place:
            self._let_go(position, operation)

    def _writer(self, register: int, operation: Operation) -> list[str] | None:
        """Lines that write the result to `{out}`, or None where the kernel makes its own memory."""
        op, dtype = operation.op, operation.dtype
        inputs = [self.names[v] for v in operation.inputs]
        if is_half(dtype) or any(is_half(self.program.dtype_of(v)) for v in operation.inputs):
            return None
        if op.ufunc:
            return [f"{self._function(op.ufunc)}({', '.join(inputs)}, out={{out}})"]
        if op.name in ("sum", "mean", "max", "min"):
            return self._reduction(operation, inputs[0])
        if op.name == "row_dot":
            return [f"{self._function('vecdot')}({inputs[0]}, {inputs[1]}, out={{out}}[:, 0])", *self._mean(operation)]
        if op.name == "scale_and_subtract":
            e, rows, g, index = inputs
            scaled = f"{self._function('multiply')}({e}, {rows}, out={{out}})"
            if register not in self.last_use and all(self._is_row(v) for v in operation.inputs[2:]):
                # Nothing here reads the result: all rows are subtracted from at one time, at the end.
                every = self._constant("k_rows", np.arange(self.program.rows))
                g, index = (f"i{v}" for v in operation.inputs[2:])
                self.after += [f"o{n}[{every}, {index}[:, 0]] -= {g}[:, 0]" for n in self.targets[register]]
                return [scaled]
            return [scaled, f"{{out}}[{self._row_numbers()}, {index}[:, 0]] -= {g}[:, 0]"]
        if op.name == "pick":
            return [f"{{out}}[:, 0] = {inputs[0]}[{self._row_numbers()}, {inputs[1]}[:, 0]]"]
        return None

    def _is_row(self, register: int) -> bool:
        """Whether it is an input with one element a row, which no output is written over."""
        return register < self.first and self.program.inputs[register][0] is Extent.ROW

    def _reduction(self, operation: Operation, source: str) -> list[str]:
        name = operation.op.name
        if name in ("max", "min"):
            return [
                f"{self._function('maximum' if name == 'max' else 'minimum')}.reduce({source}, 1, None, {{out}}, True)"
            ]
        if operation.dtype.kind == "f":
            # As a product with ones: twice as fast as numpy's sum along rows.
            ones = self._constant(f"ones_{operation.dtype.name}", np.ones(self.program.columns, operation.dtype))
            return [f"{self._function('matmul')}({source}, {ones}, out={{out}}[:, 0])", *self._mean(operation)]
        add = self._function("add")
        return [f"{add}.reduce({source}, 1, {{out}}.dtype, {{out}}, True)", *self._mean(operation)]

    def _mean(self, operation: Operation) -> list[str]:
        if operation.op.name != "mean" and operation.attrs != ("mean",):
            return []
        count = self._constant(f"count_{operation.dtype.name}", operation.dtype.type(self.program.columns))
        return [f"{self._function('divide')}({{out}}, {count}, out={{out}})"]

    def _compute(self, register: int, operation: Operation) -> None:
        """By the operation's kernel, which makes memory of its own or gives its input back."""
        op, inputs = operation.op, [self.names[v] for v in operation.inputs]
        name = f"r{register}"
        if op.name == "broadcast_to":
            shape = "stop - start," if self.flat else f"stop - start, {self.program.columns}"
            self.body.append(f"{name} = np.broadcast_to({inputs[0]}, ({shape}))")
        elif op.name == "reshape":
            name = inputs[0]
        else:
            kernel = self._constant(f"kernel{register}", kernel_on_rows(op))
            attrs = self._constant(f"attrs{register}", operation.attrs)
            self.body.append(f"{name} = {kernel}(np, {', '.join(inputs)}, *{attrs})")
        if op.name in _MAY_ALIAS and operation.inputs[0] in self.scratch_of:
            self._hold(register, self.scratch_of[operation.inputs[0]])
        self.body += [f"o{n}[start:stop] = {name}" for n in self.targets.get(register, ())]
        self.names.append(name)

    def _accumulate(self, register: int, operation: Operation) -> None:
        (source,) = operation.inputs
        name, dtype = self.names[source], operation.dtype
        blocks = -(-self.program.rows // self.step)
        for number in self.targets.get(register, ()):
            out = f"o{number}"
            if operation.extent is Extent.TOTAL:
                self.setup.append(f"{out}.fill(0)")
                self.body.append(f"{out} += {name}.sum()")
            elif blocks > 2 and dtype == self.program.dtype_of(source):
                # Blocks are added up, and their rows once at the end: additions of equal forms are the fastest.
                sums, add = self._new_scratch(dtype, self.program.columns), self._function("add")
                self.setup.append(f"{sums}.fill(0)")
                self.body.append(f"{add}({sums}, {name}, out={sums})")
                self.after.append(f"{add}.reduce(k{sums}, 0, None, {out}, True)")
            else:
                self.setup.append(f"{out}.fill(0)")
                self.body.append(f"{out} += {name}.sum(axis=0, keepdims=True)")

    # Small things.

    def _function(self, name: str) -> str:
        return self._constant(name, getattr(np, name))

    def _row_numbers(self) -> str:
        if "k_numbers" not in self.known:
            self._constant("k_numbers", np.arange(self.step))
            self.setup.append("numbers = k_numbers")
            self._cut_at_tail("numbers")
        return "numbers"


_MAY_ALIAS = ("reshape", "broadcast_to", "positive", "real", "floor", "ceil", "trunc", "round")
"""Operations whose kernel may give back its input: the input's scratch must live as long."""


def _indented(lines: list[str], depth: int) -> list[str]:
    return ["    " * depth + line for line in lines]
