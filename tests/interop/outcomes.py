"""What other libraries make of lazy tensors: `python outcomes.py scipy` prints the outcome of each of its calls.

A process of its own, since SciPy reads `SCIPY_ARRAY_API` when it is first imported.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import sys
import warnings
from typing import Any

os.environ["SCIPY_ARRAY_API"] = "1"

import numpy as np

import fuel_parallel.lazy as ft
from fuel_parallel.runtime import realize as realizing

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from calls import Call, calls_of

DISTRIBUTIONS = {"sklearn": "scikit-learn"}


def outcome(call: Call) -> tuple[str, str]:
    """The state of a call, and why, or the dtype if it is not numpy's.

    `lazy`: gives tensors and computes nothing. `computes`: gives tensors, and computes something before. `leaves`:
    gives numpy arrays or Python numbers. `fails`: raises. `wrong`: gives something else than for numpy arrays, or
    changes what it was given.
    """
    wanted = leaves_of(call(np.array))
    given: list[tuple[ft.Tensor, np.ndarray[Any, Any]]] = []
    runs: list[int] = []

    def tensor(array: np.ndarray[Any, Any]) -> ft.Tensor:
        # Without a value, so that it shows who asks for one.
        given.append((ft.stop_gradient(ft.asarray(array)), array))
        return given[-1][0]

    run = realizing._run
    realizing._run = lambda *arguments: (runs.append(1), run(*arguments))[1]
    try:
        found = leaves_of(call(tensor))
    except Exception as reason:
        return "fails", cause(reason)
    finally:
        realizing._run = run
    state = "leaves"
    if all(isinstance(x, ft.Tensor) for x in found):
        state = "computes" if runs or all(x.is_realized for x in found) else "lazy"
    if any(not np.array_equal(x.numpy(), array) for x, array in given):
        return "wrong", "changed what it was given"
    if len(found) != len(wanted):
        return "wrong", f"{len(found)} results, expected {len(wanted)}"
    pairs = [(np.asarray(one), np.asarray(other)) for one, other in zip(found, wanted, strict=True)]
    # What is made of integers alone has the namespace's own floats: float32, where numpy's are float64.
    narrow = any(one.dtype == np.float32 for one, _ in pairs) or all(array.dtype.kind in "bi" for _, array in given)
    for one, other in pairs:
        if one.dtype.kind != other.dtype.kind or one.shape != other.shape:
            return "wrong", f"{one.dtype}{list(one.shape)}, expected {other.dtype}{list(other.shape)}"
        if not np.allclose(one, other, rtol=1e-6 if narrow else 1e-9, atol=1e-12, equal_nan=True):
            return "wrong", f"{one.ravel()[:4]}, expected {other.ravel()[:4]}"
    return state, "float32" if any(one.dtype == np.float32 for one, _ in pairs) else ""


def leaves_of(result: Any) -> list[Any]:
    """The arrays and numbers of a result: of a tuple, a list, or an object with fields such as `statistic`."""
    if isinstance(result, list | tuple):
        return [leaf for part in result for leaf in leaves_of(part)]
    if isinstance(result, ft.Tensor | np.ndarray | np.generic | int | float | complex):
        return [result]
    return [leaf for name in ("statistic", "pvalue") for leaf in leaves_of(getattr(result, name))]


def cause(reason: Exception) -> str:
    """What is missing, in a word or two."""
    text = str(reason)
    if missing := re.search(r"fuel_parallel\.lazy' has no attribute '(\w+)'", text):
        return missing[1]
    if "x[mask]" in text:
        return "x[mask]"
    return f"{type(reason).__name__}: {text.splitlines()[0] if text else ''}"


def main(library: str) -> None:
    """Prints version and outcomes as JSON."""
    warnings.simplefilter("ignore")
    if library == "sklearn":
        import sklearn

        sklearn.set_config(array_api_dispatch=True)
    version = importlib.metadata.version(DISTRIBUTIONS.get(library, library))
    found = {name: outcome(call) for name, call in calls_of(library).items()}
    print(json.dumps({"version": version, "outcomes": found}))


if __name__ == "__main__":
    main(sys.argv[1])
