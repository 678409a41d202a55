"""Compiles CUDA C for the host: a source becomes a shared library whose kernels run on host memory."""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

SHIM = Path(__file__).parent / "runtime" / "codegen" / "cuda_on_host.hpp"
COMPILER = shutil.which("g++") or shutil.which("clang++")
FLAGS = ["-std=gnu++17", "-O0", "-fPIC", "-w", "-ffp-contract=off"]
KERNEL = re.compile(r"__global__[^;{]*?\b(\w+)\((?!\d)")


def compiled(source: str, folder: Path) -> ctypes.CDLL:
    """The source as a shared library; `launch` runs its kernels."""
    source = source.replace("__restrict__", "")  # kernels that differ in that alone are compiled once
    header = folder / SHIM.name
    if not header.exists():
        shutil.copy(SHIM, header)
        subprocess.run([str(COMPILER), *FLAGS, "-x", "c++-header", header, "-o", f"{header}.gch"], check=True)
    path = folder / f"{hashlib.sha256(source.encode()).hexdigest()[:24]}.cpp"
    library = path.with_suffix(".so")
    if not library.exists():
        runners = [
            f'extern "C" void run_{name}(unsigned blocks, unsigned threads, void** arguments) {{\n'
            f"    run_grid([](void** a) {{ call({name}, a); }}, blocks, threads, arguments);\n}}"
            for name in KERNEL.findall(source)
        ]
        path.write_text("\n".join([f'#include "{SHIM.name}"', source, *runners]))
        done = subprocess.run(
            [str(COMPILER), *FLAGS, "-shared", "-o", str(library), str(path)], capture_output=True, text=True
        )
        assert done.returncode == 0, f"{done.stderr}\n{source}"
    return ctypes.CDLL(str(library))


def launch(library: ctypes.CDLL, name: str, grid: Sequence[int], block: Sequence[int], cells: Sequence[Any]) -> None:
    """Runs a kernel. Each of `cells` is an array of one element: a number, or an address."""
    # As CUDA's driver wants them: the address of each argument.
    pointers = (ctypes.c_void_p * len(cells))(*[cell.ctypes.data for cell in cells])
    getattr(library, f"run_{name}")(grid[0], block[0], pointers)


def cell(argument: Any) -> Any:
    """An argument of a kernel as an array of one element: a host array is passed by its address."""
    return np.array([argument.ctypes.data if isinstance(argument, np.ndarray) else argument])
