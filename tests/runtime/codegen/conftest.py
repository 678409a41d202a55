"""Runs generated kernels on the host: a stand-in for CuPy that compiles with g++ and works on numpy arrays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kernels_on_host
import numpy as np
import pytest

from fuel_parallel.runtime.codegen import launch
from fuel_parallel.runtime.codegen.arrangement import Limits
from fuel_parallel.runtime.codegen.kernel import kernel_for
from fuel_parallel.runtime.program import Program, reusable
from fuel_parallel.runtime.region import region_into


class HostCupy:
    """CuPy's names that the launcher uses, on numpy arrays. `launches` lists (kernel, grid, block, arguments)."""

    __name__ = "cupy"

    def __init__(self, folder: Path, run: bool = True, is_hip: bool = False) -> None:
        self.folder, self.run = folder, run
        self.device = 0
        self.sources: list[str] = []
        self.options: list[tuple[str, ...]] = []
        self.launches: list[tuple[str, tuple[int, ...], tuple[int, ...], tuple[Any, ...]]] = []
        self.cuda = SimpleNamespace(runtime=SimpleNamespace(getDevice=lambda: self.device, is_hip=is_hip))

    asarray = staticmethod(np.asarray)
    zeros = staticmethod(np.zeros)
    ascontiguousarray = staticmethod(np.ascontiguousarray)

    @staticmethod
    def empty(shape: Any, dtype: Any) -> Any:
        array = np.empty(shape, dtype)
        array.reshape(-1).view(np.uint8).fill(0xAB)  # what is read before it is written shows
        return array

    def RawModule(self, *, code: str, options: tuple[str, ...]) -> Any:
        self.sources.append(code)
        self.options.append(options)
        library = kernels_on_host.compiled(code, self.folder) if self.run else None
        return SimpleNamespace(get_function=lambda name: Function(self, library, name))


class Function:
    """A kernel that can be called as CuPy's are."""

    def __init__(self, cupy: HostCupy, library: Any, name: str) -> None:
        self.cupy, self.library, self.name = cupy, library, name

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...]) -> None:
        self.cupy.launches.append((self.name, grid, block, args))
        if self.library is None:
            return
        kernels_on_host.launch(self.library, self.name, grid, block, [kernels_on_host.cell(a) for a in args])


Runner = Callable[..., list[Any]]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="session")
def on_host(host_cupy: HostCupy) -> Runner:
    """A function that runs a program as a generated kernel on the host, and gives its outputs."""
    if kernels_on_host.COMPILER is None:
        pytest.skip("no C++ compiler: neither g++ nor clang++ is installed")
    cupy = host_cupy

    def run(program: Program, arrays: list[Any], limits: Limits | None = None, in_place: bool = False) -> list[Any]:
        outputs = [cupy.empty(shape, program.dtype_of(register)) for register, shape in program.outputs]
        kernel = kernel_for(program, limits=limits)
        if in_place:
            # Each output that may lies over an input.
            arrays = [array.copy() for array in arrays]
            for output, register in reusable(program, [set(range(len(arrays)))] * len(outputs)):
                if (output, register) in kernel.replaceable:
                    outputs[output] = arrays[register].reshape(outputs[output].shape)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "kernel_or_reason", lambda *_: kernel)
            assert launch.launch(cupy, outputs, arrays, program, in_place)
        return outputs

    return run


@pytest.fixture(scope="session")
def host_cupy(folder: Path) -> HostCupy:
    """Compiles and runs kernels on the host."""
    if kernels_on_host.COMPILER is None:
        pytest.skip("no C++ compiler: neither g++ nor clang++ is installed")
    return HostCupy(folder)


@pytest.fixture
def recording_cupy(folder: Path) -> HostCupy:
    """Notes what is compiled and launched, and runs nothing."""
    return HostCupy(folder, run=False)


@pytest.fixture(scope="session")
def by_blocks() -> Runner:
    """A function that runs a program by numpy."""

    def run(program: Program, arrays: list[Any]) -> list[Any]:
        outputs = [np.empty(shape, program.dtype_of(register)) for register, shape in program.outputs]
        with np.errstate(all="ignore"):
            region_into(np, outputs, arrays, program)
        return outputs

    return run
