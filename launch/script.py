"""The script or module that a rank runs: checked before any rank starts, run as Python itself would.

`python train.py` and `python -m pkg.train` have exact meanings for `sys.argv`, `sys.path[0]`, `__file__`, `__spec__`
and the `__main__` module. All of them hold here, because pickling, multiprocessing and relative imports need them.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import warnings
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

from fuel_parallel.errors import LaunchError


class Script(NamedTuple):
    """What to run, and its arguments.

    Args:
        name: Path of the script, or name of the module.
        arguments: Passed on untouched.
        module: True for `-m name`.
    """

    name: str
    arguments: tuple[str, ...] = ()
    module: bool = False

    @classmethod
    def from_command(cls, words: list[str]) -> Script:
        """Read `[-m] NAME ARGS…`, what `command` writes."""
        module = words[:1] == ["-m"]
        name, *arguments = words[1:] if module else words
        return cls(name, tuple(arguments), module)

    def command(self) -> tuple[str, ...]:
        """The words `[-m] NAME ARGS…`."""
        return (*(("-m",) if self.module else ()), self.name, *self.arguments)

    def check(self) -> None:
        """Raise LaunchError when there is nothing to run, SyntaxError when it cannot be compiled.

        Nothing of the user's is executed or imported.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # each rank will say them
            if self.module:
                path = _find_module(self.name)
                if path is not None and path.suffix == ".py":
                    _compile(path.read_bytes(), str(path))
            else:
                self._compile_script()

    def run(self) -> None:
        """Run it as `__main__` in this process, to its end."""
        if self.module:
            spec = _spec_of_main(self.name)
            code = spec.loader.get_code(spec.name)  # type: ignore[union-attr]
            file = spec.origin or self.name
            facts = {"__spec__": spec, "__package__": spec.parent, "__loader__": spec.loader}
            folder = os.getcwd()
        else:
            code, spec, file = self._compile_script(), None, self._path()
            loader = importlib.machinery.SourceFileLoader("__main__", file)
            facts = {"__spec__": None, "__package__": None, "__loader__": loader}
            folder = str(Path(file).resolve().parent)
        main = ModuleType("__main__")
        main.__dict__.update({"__file__": file, "__cached__": spec.cached if spec else None, **facts})
        sys.modules["__main__"] = main
        sys.argv[:] = [file if self.module else self.name, *self.arguments]
        if "PYTHONSAFEPATH" not in os.environ and not self.module:
            sys.path[0] = folder  # where this process was started from stands there so far
        exec(code, main.__dict__)

    def _compile_script(self) -> CodeType:
        path = Path(self.name)
        if path.is_dir():
            raise LaunchError(
                f"'{self.name}' is a directory; give a script inside it, or its name with -m if it is a package"
            )
        try:
            source = path.read_bytes()
        except FileNotFoundError:
            raise LaunchError(f"there is no script '{self.name}' in {os.getcwd()}{_similar(path)}") from None
        except OSError as error:
            raise LaunchError(f"cannot read the script '{self.name}': {error.strerror}") from None
        return _compile(source, self._path())

    def _path(self) -> str:
        """Absolute, as in Python: tracebacks find the source after an `os.chdir` too."""
        return os.path.join(os.getcwd(), self.name)


def _compile(source: bytes, name: str) -> CodeType:
    if b"\0" in source:
        raise LaunchError(f"'{name}' is no Python script: it holds binary data")
    code: CodeType = compile(source, name, "exec", dont_inherit=True)
    return code


def _similar(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.suffix == ".py"]
    except OSError:
        return ""
    import difflib  # not at every start

    close = difflib.get_close_matches(path.name, names, n=1) or [name for name in names if name == f"{path.name}.py"]
    return f"; did you mean '{path.parent / close[0]}'?" if close else ""


def _put_folder_first() -> None:
    """`python -m` looks in the current directory first."""
    if "PYTHONSAFEPATH" not in os.environ:
        sys.path[0] = os.getcwd()


def _find_module(name: str) -> Path | None:
    """Where `-m name` finds its code, without importing the packages around it; None for what is no file."""
    _put_folder_first()
    top, *rest = name.split(".")
    spec: Any = None
    if all(part.isidentifier() for part in (top, *rest)):
        spec = importlib.util.find_spec(top)
        full = top
        for part in rest:
            if spec is None:
                break
            full = f"{full}.{part}"
            spec = importlib.machinery.PathFinder.find_spec(full, spec.submodule_search_locations or [])
    if spec is None:
        hint = f"; for a script leave -m out: {name}" if Path(name).is_file() else ""
        raise LaunchError(f"there is no module '{name}' for -m (looked from {os.getcwd()}){hint}")
    if spec.submodule_search_locations is not None:
        main = importlib.machinery.PathFinder.find_spec(f"{name}.__main__", spec.submodule_search_locations)
        if main is None:
            raise LaunchError(f"'{name}' is a package that cannot be run: it has no __main__.py")
        spec = main
    return Path(spec.origin) if spec.has_location and spec.origin else None


def _spec_of_main(name: str) -> importlib.machinery.ModuleSpec:
    _put_folder_first()
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    if spec is None or spec.loader is None:
        raise LaunchError(f"there is no module '{name}' for -m")
    return spec
