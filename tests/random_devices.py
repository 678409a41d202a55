"""Random programs over several devices of one process: the CPU and two that know a few ops only (`third_party`)."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import third_party
from hypothesis import strategies as st

import fuel_parallel.lazy as ft
from fuel_parallel import backends

DEVICES = ("cpu", "abacus:0", "abacus:1")
SHAPE = (4, 3)

OPS = {
    "add": lambda a, b: a + b,
    "multiply": lambda a, b: a * b,
    "tanh": lambda a, b: ft.tanh(a),
    "exp": lambda a, b: ft.exp(a * 0.1),  # not on an abacus: on the host, between copies
    "update": lambda a, b: updated(a, b),
    "again": lambda a, b: twice_updated(a, b),
    "turn": lambda a, b: ft.permute_dims(ft.permute_dims(a, (1, 0)), (1, 0)),  # on the host a view
    "rows": lambda a, b: ft.concat([a[2:], b[:2]], axis=0),
}


def updated(a, b):
    """`a` with two rows of `b`, written in place where a plan may."""
    result = a + 0
    result[1:3] = b[:2]
    return result


def twice_updated(a, b):
    """The second write is in place: what is there before was copied to another device."""
    first = ft.exp(a * 0.1)
    first[0:1] = b[:1]
    seen = ft.tanh(first.to("abacus:1" if a.device != "abacus:1" else "cpu"))
    first[2:] = b[2:]
    return first + seen.to(a.device)


steps = st.lists(
    st.tuples(st.sampled_from(sorted(OPS)), st.integers(0, 99), st.integers(0, 99), st.sampled_from(DEVICES)),
    min_size=3,
    max_size=25,
)


@contextmanager
def installed(*devices):
    """Within it, these devices are there, each named by a pair of its name and backend."""
    backends._found.update(devices)
    try:
        yield
    finally:
        for name, _ in devices:
            del backends._found[name]


def two_abaci():
    return installed(*((f"abacus:{n}", third_party.Abacus(n)) for n in range(2)))


def values_of(program, leaves=3):
    """The tensors that a program makes, none of them computed: each step takes two that are there, on its device."""
    made = [
        ft.asarray(np.random.default_rng(n).normal(size=SHAPE)).to(DEVICES[n % len(DEVICES)]).realize()
        for n in range(leaves)
    ]
    for name, first, second, device in program:
        a, b = (made[-1 - n % len(made)].to(device) for n in (first, second))
        made.append(OPS[name](a, b))
    return made[leaves:]
