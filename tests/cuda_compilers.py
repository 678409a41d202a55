"""CUDA's compilers, which need no GPU: NVRTC, from NVIDIA's wheel or the toolkit, and nvcc."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from fuel_parallel.runtime.codegen.launch import CUDA_OPTIONS

Compile = Callable[..., str]

NVCC = shutil.which("nvcc")
QUIET = "--diag-suppress=177,186"
"""A preamble may define more than a kernel needs, and one expression serves signed and unsigned integers."""
NO_NVCC = "no CUDA toolkit: nvcc is not on the PATH"
NO_NVRTC = "no NVRTC: pip install nvidia-cuda-nvrtc (it needs no GPU)"


@functools.cache
def _nvrtc() -> ctypes.CDLL | None:
    found = importlib.util.find_spec("nvidia")
    places = [Path(place) for place in found.submodule_search_locations or ()] if found else []
    wheels = [path for place in places for path in place.glob("*/lib/libnvrtc.so.[0-9]*")]
    for name in [*map(str, wheels), "libnvrtc.so.13", "libnvrtc.so.12"]:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def nvrtc() -> Compile | None:
    """A function of a source, an architecture and options that gives PTX; None where there is no NVRTC.

    Raises `RuntimeError` with the compiler's log when it fails, or has anything to say.
    """
    library = _nvrtc()
    return None if library is None else functools.partial(_by_nvrtc, library)


def _by_nvrtc(library: ctypes.CDLL, source: str, architecture: str, options: tuple[str, ...] = CUDA_OPTIONS) -> str:
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    if library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None):
        raise RuntimeError("nvrtcCreateProgram failed")
    try:
        words = [word.encode() for word in (f"--gpu-architecture={architecture}", QUIET, *options)]
        status = library.nvrtcCompileProgram(program, len(words), (ctypes.c_char_p * len(words))(*words))
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, log)
        if status or log.value.strip():
            raise RuntimeError(f"NVRTC ended with {status}:\n{log.value.decode()}\n{source}")
        library.nvrtcGetPTXSize(program, ctypes.byref(size))
        ptx = ctypes.create_string_buffer(size.value)
        library.nvrtcGetPTX(program, ptx)
        return ptx.value.decode()
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def nvcc() -> Compile | None:
    """The same by nvcc."""
    return None if NVCC is None else _by_nvcc


def _by_nvcc(source: str, architecture: str, options: tuple[str, ...] = CUDA_OPTIONS) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cu")
        path.write_text(source)
        to = path.with_suffix(".ptx")
        command = [str(NVCC), "--ptx", f"-arch={architecture}", QUIET, *options, "-o", str(to), str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or done.stderr.strip():
            raise RuntimeError(f"nvcc ended with {done.returncode}:\n{done.stderr}\n{source}")
        return to.read_text()
