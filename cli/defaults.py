"""Defaults for the options of `fuelrun run`, from files that a user or a project keeps.

What is said on the command line wins over `FUELRUN_…` variables, these over `fuelrun.toml` in the working folder, that
over the user's `~/.config/fuelrun.toml`, and that over what is built in.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

PREFIX = "FUELRUN"
FILE = "fuelrun.toml"
NOT_IN_FILES = ("dry_run", "help", "module")
"""What is meant for one call only."""


def files(environ: Mapping[str, str]) -> Iterator[Path]:
    """Where defaults may be, the weakest first."""
    folder = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME", ""), ".config")
    yield Path(folder) / FILE
    yield Path(FILE)


def from_files(command: click.Command, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The defaults for a command's options by their parameter's name. Raises `click.UsageError` for a bad file."""
    options = {p.name: p for p in command.params if isinstance(p, click.Option) and p.name not in NOT_IN_FILES}
    keys = {_key(option): name for name, option in options.items() if name is not None}
    found: dict[str, Any] = {}
    for path in files(environ):
        for key, value in _read(path).items():
            if key not in keys:
                near = difflib.get_close_matches(key, keys, 1)
                hint = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(sorted(keys))}"
                raise click.UsageError(f"{path}: there is no option '{key}'; {hint}")
            option = options[keys[key]]
            found[keys[key]] = _fitting(path, key, value, option)
    return found


def strange_variables(command: click.Command, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Variables that look like ours and are read by nobody, a misspelt FUELRUN_RANK say."""
    known = {f"{PREFIX}_{p.name.upper()}" for p in command.params if p.name is not None}
    return sorted(name for name in environ if name.startswith(f"{PREFIX}_") and name not in known)


def _key(option: click.Option) -> str:
    """The long name of an option without its dashes: `mpi-args`."""
    return max(option.opts, key=len).lstrip("-")


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as reason:
        raise click.UsageError(f"cannot read {path}: {reason.strerror}") from None
    import tomllib  # not at every start: most users have no such file

    try:
        return tomllib.loads(raw.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as reason:
        raise click.UsageError(f"{path} is no TOML: {reason}") from None


def _fitting(path: Path, key: str, value: Any, option: click.Option) -> Any:
    """The value as click wants it: lists for what may be repeated, a table for `env`, true and false for flags."""
    if isinstance(value, dict) and key == "env":
        value = [f"{name}={text}" for name, text in value.items()]
    if option.multiple:
        value = [value] if isinstance(value, str) else value
        fits = isinstance(value, list) and all(isinstance(one, str) for one in value)
        expected = "a list of texts"
    elif option.is_flag:
        fits, expected = isinstance(value, bool), "true or false"
    else:
        fits = isinstance(value, (str, int, float)) and not isinstance(value, bool)
        expected = "a text or a number"
    if not fits:
        raise click.UsageError(f"{path}: {key} = {value!r}: expected {expected}")
    if option.multiple or option.is_flag:
        return value
    try:
        option.type(str(value), option, None)
    except click.UsageError as reason:
        raise click.UsageError(f"{path}: {key}: {reason.message}") from None
    return str(value)
