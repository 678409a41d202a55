"""Imports point one way, importing is light, and what is shipped is what is in the folders."""

from __future__ import annotations

import ast
import configparser
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent

# Folders and the names they are installed under. `launch` comes first: it is a part of `fuelrun` only by name.
FOLDERS = {"launch": "fuelrun.launch", "cli": "fuelrun", "fuel_parallel": "fuel_parallel"}

# The house, from the ground up: each part, and what it may import when it is imported itself.
# A key may be deeper than a part (`pipeline_parallel.run`); the longest one that fits a module holds.
GROUND = {"arguments", "drafts", "errors", "version", "partitioning", "name_patterns", "names_elsewhere", "sizes"}
TENSORS = GROUND | {"backends", "lazy"}
RANKS = TENSORS | {"environment", "failure", "comm", "mesh"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "version": set(),
    "arguments": {"errors"},
    "drafts": set(),
    "partitioning": {"errors", "arguments"},
    "name_patterns": {"errors"},
    "names_elsewhere": set(),
    "sizes": set(),
    "environment": GROUND,
    "failure": GROUND | {"environment"},
    "topology": GROUND | {"environment"},
    "backends": GROUND | {"environment"},
    "lazy": GROUND | {"environment", "backends"},
    "comm": TENSORS | {"environment", "failure"},
    "comm.speed": RANKS | {"topology"},
    "runtime": TENSORS | {"environment", "failure", "comm"},
    "mesh": TENSORS | {"environment", "failure", "topology", "comm"},
    "module": TENSORS,
    "layers": TENSORS | {"module"},
    "attention": TENSORS | {"module", "layers"},
    "stored_matmul": TENSORS,
    "quantization": TENSORS | {"module", "stored_matmul"},
    "experts": TENSORS | {"module"},
    "optim": RANKS | {"module"},
    "progress_bar": RANKS,
    "preemption": RANKS,
    "device_group": RANKS | {"runtime", "topology"},
    "data_parallel": RANKS | {"module", "optim", "checkpoint", "runtime"},
    "tensor_parallel": RANKS | {"module", "layers", "attention"},
    "context_parallel": RANKS | {"module", "attention"},
    "expert_parallel": RANKS | {"module", "experts", "data_parallel"},
    "generation": RANKS | {"runtime", "distributed_cache"},
    "pipeline_parallel": GROUND,
    "pipeline_parallel.draw": GROUND | {"topology", "pipeline_parallel"},
    "pipeline_parallel.on_topology": GROUND | {"topology", "pipeline_parallel"},
    "pipeline_parallel.run": RANKS | {"module", "pipeline_parallel", "data_parallel", "runtime"},
    "distributed_cache": GROUND,
    "distributed_cache.group": RANKS | {"distributed_cache"},
    "distributed_cache.batch": TENSORS | {"distributed_cache"},
    "distributed_cache.pool": RANKS | {"distributed_cache", "module", "runtime"},
    "checkpoint": RANKS | {"module", "runtime"},
}

# What a part may import besides, but only inside of functions or for its type annotations.
MAY_IMPORT_LATE: dict[str, set[str]] = {
    "lazy": {"runtime"},
}

# `fuelrun` starts ranks, so it must start fast and in an environment without MPI or arrays.
LAUNCHER_MAY_IMPORT = GROUND | {"environment", "failure", "topology"}

SHAPELESS_NAMES = {"util", "utils", "helper", "helpers", "manager", "managers", "misc", "common"}


@dataclass(frozen=True)
class Import:
    """One import statement: `importer` imports `imported` (both modules); late when it runs inside of a function."""

    importer: str
    imported: str
    late: bool
    place: str


def source_files() -> Iterator[tuple[str, Path]]:
    """Each module's name as installed, and its file."""
    for folder, name in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            yield ".".join([name, *(part for part in parts if part != "__init__")]), path


MODULES = dict(source_files())


def imports(module: str) -> Iterator[Import]:
    """All imports of our own packages, NumPy and mpi4py in a module."""
    path = MODULES[module]

    def visit(node: ast.AST, late: bool) -> Iterator[Import]:
        place = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            yield from (Import(module, alias.name, late, place) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module if path.name == "__init__.py" else module.rpartition(".")[0]
            for _ in range(node.level - 1):
                package = package.rpartition(".")[0]
            origin = ".".join(filter(None, [package if node.level else "", node.module]))
            for alias in node.names:
                inner = f"{origin}.{alias.name}"
                yield Import(module, inner if inner in MODULES else origin, late, place)
        late = late or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        late = late or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        for child in ast.iter_child_nodes(node):
            yield from visit(child, late)

    yield from visit(ast.parse(path.read_text()), late=False)


def part(module: str) -> str:
    """`lazy` for `fuel_parallel.lazy.node`; empty for `fuel_parallel` itself."""
    return module.partition("fuel_parallel.")[2].partition(".")[0]


def rule(module: str, table: dict[str, set[str]]) -> set[str] | None:
    """The entry of the longest key that `module` lies in."""
    inner = module.partition("fuel_parallel.")[2]
    fitting = [key for key in table if inner == key or inner.startswith(key + ".")]
    return table[max(fitting, key=len)] if fitting else None


LIBRARY = [name for name in MODULES if name.startswith("fuel_parallel.")]
LAUNCHER = [name for name in MODULES if name.startswith("fuelrun.launch")]
COMMANDS = [name for name in MODULES if name.startswith("fuelrun") and name not in LAUNCHER]


@pytest.mark.parametrize("module", LIBRARY)
def test_the_library_imports_only_downwards(module: str) -> None:
    now = rule(module, MAY_IMPORT)
    assert now is not None, f"{module} is new: give it its place in MAY_IMPORT"
    late = now | (rule(module, MAY_IMPORT_LATE) or set())
    wrong = [
        f"{one.place} imports {one.imported}{' inside of a function' if one.late else ''}"
        for one in imports(module)
        if one.imported.startswith("fuel_parallel")
        and part(one.imported) not in (late if one.late else now) | {part(module)}
    ]
    assert not wrong


@pytest.mark.parametrize("module", [*LIBRARY, "fuel_parallel"])
def test_the_library_does_not_know_its_command_line(module: str) -> None:
    assert not [one.place for one in imports(module) if one.imported.startswith("fuelrun")]


@pytest.mark.parametrize("module", LAUNCHER)
def test_the_launcher_knows_only_the_light_parts_of_the_library(module: str) -> None:
    wrong = [
        f"{one.place} imports {one.imported}"
        for one in imports(module)
        if (one.imported.startswith("fuel_parallel") and part(one.imported) not in LAUNCHER_MAY_IMPORT)
        or (one.imported.startswith("fuelrun") and not one.imported.startswith("fuelrun.launch"))
    ]
    assert not wrong


@pytest.mark.parametrize("module", COMMANDS)
def test_a_command_imports_the_library_only_when_it_runs(module: str) -> None:
    wrong = [
        f"{one.place} imports {one.imported}"
        for one in imports(module)
        if one.imported.startswith("fuel_parallel") and part(one.imported) not in LAUNCHER_MAY_IMPORT and not one.late
    ]
    assert not wrong


def test_the_environment_is_read_without_arrays_or_mpi() -> None:
    heavy = {"numpy", "mpi4py"}
    assert not [one for one in imports("fuel_parallel.environment") if one.imported.partition(".")[0] in heavy]


def test_no_file_is_named_after_nothing() -> None:
    paths = [*MODULES.values(), *(ROOT / "tests").rglob("*.py")]
    assert not [path for path in paths if SHAPELESS_NAMES & set(path.stem.split("_"))]


def test_setup_lists_every_package() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    folders = {name if path.name == "__init__.py" else name.rpartition(".")[0] for name, path in MODULES.items()}
    listed = set(setup["options"]["packages"].split())
    assert listed == folders, "setup.cfg must list every package, or a regular install lacks it"
    assert {name for name, path in MODULES.items() if path.name == "__init__.py"} == folders


def evaluate(expression: str, tmp_path: Path, after: list[str]) -> Any:
    """The value of `expression` in a fresh interpreter, outside of the repository, after some statements."""
    program = "\n".join(["import json, sys", *after, f"print(); print(json.dumps({expression}))"])
    run = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def modules_after(statements: list[str], tmp_path: Path) -> set[str]:
    return set(evaluate("sorted(sys.modules)", tmp_path, statements))


def test_importing_the_library_does_not_start_mpi(tmp_path: Path) -> None:
    assert "mpi4py.MPI" not in modules_after(["import fuel_parallel"], tmp_path)


def test_reading_the_environment_loads_no_arrays(tmp_path: Path) -> None:
    assert not modules_after(["import fuel_parallel.environment"], tmp_path) & {"numpy", "mpi4py"}


def test_help_loads_neither_mpi_nor_arrays(tmp_path: Path) -> None:
    statements = [
        "from fuelrun.main import main",
        "sys.argv = ['fuelrun', '--help']",
        "try: main()",
        "except SystemExit as end: assert not end.code",
    ]
    assert not modules_after(statements, tmp_path) & {"numpy", "mpi4py.MPI"}


def test_a_public_function_is_not_replaced_by_the_module_of_its_name(tmp_path: Path) -> None:
    kinds = "{name: type(getattr(fp, name)).__name__ for name in fp.__all__}"
    every = [f"import {name}" for name in LIBRARY if name.count(".") == 1]
    plain = evaluate(kinds, tmp_path, ["import fuel_parallel as fp"])
    assert evaluate(kinds, tmp_path, [*every, "import fuel_parallel as fp"]) == plain
