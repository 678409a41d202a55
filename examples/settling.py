"""How a script of many ranks begins: all of them go on, or all end with one message and code 2."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

import click

import fuel_parallel as fp
import fuel_parallel.lazy as ft

T = TypeVar("T")


def settle(world: fp.Communicator, prepare: Callable[[], T]) -> T:
    """What `prepare()` returns; if a rank had a problem, the first of those tells it and all ranks exit with code 2."""
    problem = None
    try:
        with contextlib.redirect_stdout(sys.stdout if world.is_root else None):  # --help once
            result = prepare()
    except click.ClickException as error:
        problem = error.format_message()
    except fp.FuelError as error:
        problem = str(error)
    failed = world.all_gather(ft.asarray([problem is not None])).tolist()
    if True in failed:
        give_up(problem, failed.index(True) == world.rank, world)
    return result


def give_up(problem: str | None, tell: bool, world: fp.Communicator) -> NoReturn:
    """Ends all ranks with code 2, after the one that is to `tell` has told."""
    if tell:
        print(f"{Path(sys.argv[0]).name}: {problem}", file=sys.stderr, flush=True)
    world.barrier()
    sys.exit(2)
