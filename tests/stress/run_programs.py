"""Runs random programs on the ranks of a job: `fuelrun -n N tests/stress/run_programs.py --first SEED --count K`.

All ranks draw the same programs. A correct one must leave what numpy computes. One that is broken in its only
communicator must raise on all ranks, after which the same ranks go on with the next program. One that is broken
anywhere is run alone: its error ends the job, as it would end a user's.

Whatever should not be raises and ends the job; FILE of `--progress` then has the seed.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from programs import STYLES, ByRank, Program, Step, data, draw, other_dtype

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel import ReduceOp
from fuel_parallel.comm import guard
from fuel_parallel.comm.mpi import MpiComm
from fuel_parallel.comm.shared_reduction import progress
from fuel_parallel.errors import CollectiveMismatchError
from fuel_parallel.lazy import dtypes, effects


class Run:
    """One program on this rank. `only` are the steps to run; None for all."""

    def __init__(self, program: Program, expected: list[ByRank], world: Any, only: set[int] | None) -> None:
        self.program, self.expected, self.only = program, expected, only
        self.rank = world.rank
        self.comms = {0: world}
        self.values: dict[int, ft.Tensor] = {}
        self.held: list[ft.Tensor] = []  # what a broken call gives

    def run(self) -> None:
        """Every step, every cut, and at the end all values."""
        for number in self.order():
            step = self.program.steps[number]
            if (self.only is None or number in self.only) and step.group in self.comms:
                if not self.broken_at(number):
                    self.call(number, step)
                elif self.break_off(number, step):
                    return
            self.realize(self.program.cuts[self.rank].get(number, ()))
        fp.realize(self.held)
        self.realize(tuple(self.values))
        if self.program.broken is None:
            self.compare()

    def order(self) -> Iterator[int]:
        """The numbers of the steps, in which a broken rank may swap two."""
        broken = self.program.broken
        numbers = list(range(len(self.program.steps)))
        if broken is not None and (broken.how, broken.rank) == ("swap", self.rank):
            at = broken.step
            numbers[at : at + 2] = [at + 1, at]
        yield from numbers

    def broken_at(self, number: int) -> bool:
        broken = self.program.broken
        return broken is not None and (broken.step, broken.rank) == (number, self.rank) and broken.how != "swap"

    def realize(self, places: tuple[int, ...]) -> None:
        wanted = [self.values[place] for place in places if place in self.values]
        if wanted:
            fp.realize(wanted)

    def compare(self) -> None:
        for number, tensor in self.values.items():
            expected = self.expected[number][self.rank]
            found = tensor.numpy()
            right = found.shape == expected.shape and found.dtype == expected.dtype
            if not (right and np.array_equal(found, expected)):
                raise AssertionError(
                    f"v{number} on rank {self.rank}:\n{found!r}\nbut should be\n{expected!r}\n{self.program}"
                )

    # One call.

    def call(self, number: int, step: Step) -> None:
        comm, facts = self.comms[step.group], dict(step.facts)
        if step.kind == "split":
            self.split(number, step)
        elif step.kind == "barrier":
            comm.barrier()
        elif step.kind == "broadcast_object":
            root = facts["root"]
            said = comm.broadcast_object({"step": number} if comm.rank == root else None, root)
            self.check_object(number, said, {"step": number})
        elif step.kind == "all_gather_object":
            said = comm.all_gather_object([number, self.rank])
            self.check_object(number, said, [[number, rank] for rank in self.program.groups[step.group].members])
        elif step.kind == "message":
            self.message(number, step)
        else:
            value = getattr(comm, step.kind)(self.operand(number, step), **facts)
            if not step.dropped:
                self.values[number] = value

    def check_object(self, number: int, said: object, expected: object) -> None:
        if self.program.broken is None and said != expected:
            raise AssertionError(f"v{number} on rank {self.rank}: {said}, not {expected}\n{self.program}")

    def split(self, number: int, step: Step) -> None:
        part = self.comms[step.group].split(step.facts["colors"][self.rank], step.facts["keys"][self.rank])
        for place, group in enumerate(self.program.groups):
            if group.made_by == number and group.color == step.facts["colors"][self.rank]:
                self.comms[place] = part

    def message(self, number: int, step: Step) -> None:
        comm, facts = self.comms[step.group], step.facts
        x = self.operand(number, step)
        if comm.rank == facts["source"]:
            comm.send(x, facts["dest"], facts["tag"])
        if comm.rank == facts["dest"]:
            self.values[number] = comm.recv(x.shape, x.dtype, facts["source"], facts["tag"])

    def operand(self, number: int, step: Step) -> ft.Tensor:
        if step.source is None:
            return ft.asarray(data(number, self.rank, step.dtype, step.shapes[self.rank]))
        x = self.values[step.source]
        kind = dtypes.kind(x.dtype)
        if not step.digits or kind == "bool":
            return x
        real = ft.real(x) if kind == "complex floating" else x
        return ft.astype(real > (1 if kind == "integral" else 1.1), x.dtype)

    # One call that is not what the others do.

    def break_off(self, number: int, step: Step) -> bool:
        """Does what the break says; True if the script ends here."""
        how = self.program.broken.how  # type: ignore[union-attr]
        if how == "end":
            return True
        comm, facts = self.comms[step.group], dict(step.facts)
        if how == "kind":
            comm.barrier()
        elif how == "root":
            root = (facts["root"] + 1) % comm.world_size
            if step.kind == "broadcast_object":
                comm.broadcast_object(None, root)
            else:
                self.held.append(getattr(comm, step.kind)(self.operand(number, step), **{**facts, "root": root}))
        elif how != "drop":
            x = self.operand(number, step)
            if how == "dtype":
                real = ft.real(x) if dtypes.kind(x.dtype) == "complex floating" else x
                x = ft.astype(real, other_dtype(step))
                if facts.get("op") is ReduceOp.AVG and dtypes.kind(x.dtype) == "integral":
                    facts["op"] = ReduceOp.SUM
            if how == "shape":
                x = ft.reshape(x, (1, *x.shape)) if step.kind not in ("all_gather", "all_to_all") else x[..., None]
            if how == "op":
                facts["op"] = ReduceOp.SUM if facts["op"] is not ReduceOp.SUM else ReduceOp.PRODUCT
            if how == "dimension":
                facts["dim"] = (facts["dim"] + 1) % x.ndim
            self.held.append(getattr(comm, step.kind)(x, **facts))
        if self.rank in self.expected[number]:
            wanted = self.expected[number][self.rank]
            self.values[number] = ft.zeros(wanted.shape, dtype=wanted.dtype)
        return False


def to_the_end(guards: list[guard.Guard]) -> list[CollectiveMismatchError]:
    """Does for the communicators of one program what the end of a script does for all; returns the mismatches."""
    found = []
    waiting = list(guards)
    for one in waiting:
        one.publish_end()
    while waiting:
        for one in list(waiting):
            try:
                if one.all_ended():
                    waiting.remove(one)
            except CollectiveMismatchError as error:
                found.append(error)
                one.publish_end()
        progress()
        time.sleep(0)
    for one in guards:
        try:
            one.compare_messages()
        except CollectiveMismatchError as error:
            found.append(error)
    return found


def run_one(program: Program, expected: list[ByRank], only: set[int] | None) -> None:
    """One program of many: with communicators of its own, of which nothing is left afterwards."""
    earlier = list(guard.guards)
    mismatches: list[str] = []
    run = Run(program, expected, MpiComm(), only)
    try:
        effects.run_pending()
        run.run()
        effects.run_pending()
    except CollectiveMismatchError as error:
        mismatches.append(str(error))
    own = [one for one in guard.guards if one not in earlier]
    del run
    gc.collect()  # what was not run would run with the next program
    mismatches += [str(error) for error in to_the_end(own)]
    guard.guards[:] = earlier
    if program.broken is None and mismatches:
        raise AssertionError(f"a mismatch in a correct program:\n{mismatches[0]}\n{program}")
    if program.broken is not None and not mismatches:
        raise AssertionError(f"no mismatch on rank {fp.init().rank} in a broken program\n{program}")


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--style", choices=STYLES, default="correct")
    parser.add_argument("--only", type=lambda text: {int(number) for number in text.split(",")})
    parser.add_argument("--progress", type=Path)
    options = parser.parse_args()
    world = fp.init()
    if options.style == "broken":
        program, expected = draw(options.first, world.world_size, options.style)
        Run(program, expected, world, options.only).run()
        return
    for seed in range(options.first, options.first + options.count):
        if options.progress and world.is_root:
            options.progress.write_text(str(seed))
        program, expected = draw(seed, world.world_size, options.style)
        if options.style == "correct" or program.broken is not None:
            run_one(program, expected, options.only)


if __name__ == "__main__":
    main()
