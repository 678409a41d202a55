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
    """The state of a call, and why.

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
    if len(found) != len(wanted):
        return "wrong", f"{len(found)} results, expected {len(wanted)}"
    for one, other in zip(found, wanted, strict=True):
        value, expected = np.asarray(one), np.asarray(other)
        if value.dtype != expected.dtype or value.shape != expected.shape:
            return "wrong", f"{value.dtype}{list(value.shape)}, expected {expected.dtype}{list(expected.shape)}"
        if not np.allclose(value, expected, rtol=1e-9, atol=1e-12, equal_nan=True):
            return "wrong", f"{value.ravel()[:4]}, expected {expected.ravel()[:4]}"
    for x, array in given:
        if not np.array_equal(x.numpy(), array):
            return "wrong", "changed what it was given"
    return state, ""


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
