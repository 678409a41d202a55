"""What stands here for the names that PyTorch, JAX and NumPy have for it: the remedy in a message about such a name."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

_GRADIENT = "gradients are functions of a loss: ft.grad(loss, wanted)"
_NEVER_CHANGES = "a tensor never changes its value"

_INSTEAD = {
    "backward": _GRADIENT,
    "grad": _GRADIENT,
    "grad_fn": "ft.show(x) lists the graph behind a tensor",
    "requires_grad": f"{_GRADIENT}, by any tensor; ft.stop_gradient(x) is a constant for them",
    "retain_grad": _GRADIENT,
    "zero_grad": f"{_GRADIENT}, and are not accumulated",
    "no_grad": "nothing is kept for gradients unless ft.grad asks for them",
    "detach": "ft.stop_gradient(x)",
    "clone": f"{_NEVER_CHANGES}, so it needs no copy",
    "copy": f"{_NEVER_CHANGES}, so it needs no copy",
    "contiguous": "a tensor has no memory order; nothing needs to be done",
    "block_until_ready": "x.realize()",
    "cpu": "x.to('cpu')",
    "cuda": "x.to('cuda:0')",
    "device_put": "x.to('cuda:0')",
    "float": "x.astype(ft.float32)",
    "double": "x.astype(ft.float64)",
    "half": "x.astype(ft.float16)",
    "bfloat16": "x.astype(ft.bfloat16)",
    "int": "x.astype(ft.int32)",
    "long": "x.astype(ft.int64)",
    "type": "x.astype(dtype)",
    "view": "ft.reshape(x, shape)",
    "view_as": "ft.reshape(x, y.shape)",
    "ravel": "ft.reshape(x, (-1,))",
    "flatten": "ft.reshape(x, (-1,))",
    "permute": "ft.permute_dims(x, axes)",
    "transpose": "ft.permute_dims(x, axes), or x.mT for the last two dimensions",
    "swapaxes": "ft.permute_dims(x, axes)",
    "t": "x.T",
    "unsqueeze": "ft.expand_dims(x, axis=axis)",
    "expand": "ft.broadcast_to(x, shape)",
    "cat": "ft.concat(tensors, axis=axis)",
    "concatenate": "ft.concat(tensors, axis=axis)",
    "chunk": "ft.split(x, parts, axis=axis)",
    "numel": "x.size",
    "dim": "x.ndim",
    "tensor": "ft.asarray(values)",
    "array": "ft.asarray(values)",
    "from_numpy": "ft.asarray(values)",
    "mm": "x @ y",
    "bmm": "x @ y",
    "dot": "x @ y",
    "clamp": "ft.clip(x, low, high)",
    "norm": "ft.linalg.vector_norm(x)",
    "gather": "ft.take_along_axis(x, indices, axis=axis)",
    "index_select": "ft.take(x, indices, axis=axis)",
    "masked_fill": "ft.where(mask, value, x)",
    "at": "x[key] = value rebinds x to a tensor with that change",
    "rand": "ft.random.Generator(seed).uniform(shape)",
    "randn": "ft.random.Generator(seed).normal(shape)",
}


def is_no_mistake(name: str, package: Sequence[str]) -> bool:
    """Whether a name that a package lacks is asked for by those who look what it can do, or before it is imported.

    Args:
        name: What was asked for.
        package: The `__path__` of the package.
    """
    place = os.path.join(package[0], name)
    return name.startswith("_") or os.path.exists(place) or os.path.exists(place + ".py")


def remedy(name: str, functions: Collection[str], attributes: Collection[str] = ()) -> str:
    """What to write instead of a name, after a colon; empty where nothing is near.

    Args:
        name: What was asked for.
        functions: The names of `fuel_parallel.lazy`.
        attributes: Those of a tensor, if a tensor was asked.

    >>> remedy("backward", [])
    ': gradients are functions of a loss: ft.grad(loss, wanted)'
    >>> remedy("exp", ["exp", "log"], ["shape"])
    ': ft.exp(x)'
    >>> remedy("add_", ["add"], ["shape"])
    ': a tensor never changes its value; x = ft.add(x, ...)'
    >>> remedy("shpae", ["exp"], ["shape"])
    ': is x.shape meant?'
    """
    import difflib  # not at every start

    if name in _INSTEAD:
        return f": {_INSTEAD[name]}"
    if attributes and name in functions:
        return f": ft.{name}(x)"
    plain = name.removesuffix("_")
    if plain != name and (plain in functions or plain in attributes):
        return f": {_NEVER_CHANGES}; x = ft.{plain}(x, ...)"
    written = {**{f: f"ft.{f}" for f in functions}, **{a: f"x.{a}" for a in attributes}}
    near = difflib.get_close_matches(name, written, n=1, cutoff=0.75)
    return f": is {written[near[0]]} meant?" if near else ""
