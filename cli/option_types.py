"""What options take, with errors that say what was expected and what came instead; and options of several commands."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click


class Count(click.ParamType[int]):
    """A whole number of at least one."""

    name = "count"

    def __init__(self, what: str) -> None:
        self.what = what

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Say what was expected, and what came instead."""
        if str(value).isascii() and str(value).isdigit() and int(value) > 0:
            return int(value)
        option = param.opts[0] if param else ""
        raise click.UsageError(f"{option} takes {self.what}, a whole number of at least 1; got '{value}'")


class Threads(click.ParamType[str]):
    """A whole number of at least one, or auto."""

    name = "threads"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Say what was expected, and what came instead."""
        return "auto" if value == "auto" else str(Count("auto, or the threads of a rank").convert(value, param, ctx))


class Words(click.ParamType[tuple[str, ...]]):
    """Words as a shell parts them."""

    name = "words"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        """Say where a quotation is open."""
        if isinstance(value, tuple):
            return value
        try:
            return tuple(shlex.split(value))
        except ValueError as error:
            raise click.UsageError(
                f"{param.opts[0] if param else ''} {value!r}: {error}; quote it as in a shell"
            ) from None


class Seconds(click.ParamType[float]):
    """A time of zero or more."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Say what was expected, and what came instead."""
        try:
            seconds = float(value)
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds < float("inf"):
            raise click.UsageError(f"{param.opts[0] if param else ''} takes seconds, 0 or more; got '{value}'")
        return seconds


def ranks_option(help: str) -> Callable[[Any], Any]:
    """-n, --ranks: the argument `ranks`, an int or None."""
    return click.option("-n", "--ranks", type=Count("the number of ranks"), metavar="N", help=help)


def output_option(help: str, metavar: str = "FILE") -> Callable[[Any], Any]:
    """-o, --output: the argument `output`, the path of a file or None."""
    kind = click.Path(path_type=Path, dir_okay=False)
    return click.option("-o", "--output", type=kind, metavar=metavar, help=help)
