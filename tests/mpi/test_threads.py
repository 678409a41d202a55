"""Threads and copies where ranks talk to each other; run under mpiexec with 1 to 4 ranks."""

from __future__ import annotations

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel.errors import CommunicatorError
from fuel_parallel.tensor_parallel import ColumnParallel

pytestmark = pytest.mark.mpi
world = fp.init()
N, RANK = world.world_size, world.rank


def losses(batches):
    """A data-parallel fit that also passes a tensor around the ring of ranks in each step."""
    weight = fp.Parameter(ft.asarray(np.ones((4, 3))))
    optimizer = fp.optim.SGD([weight], lr=0.05)
    found = []
    for batch in batches:
        loss = ft.mean(ft.square(batch @ weight))
        gradients = fp.data_parallel.average_gradients(ft.grad(loss, [weight]), world)
        optimizer.update(gradients)
        if N > 1:
            world.send(loss, (RANK + 1) % N)
            loss = world.recv((), ft.float64, (RANK - 1) % N)
        fp.realize(loss, optimizer)
        found.append(loss.item())
    return found


def batch(step):
    return ft.random.Generator(step).normal((8, 4), dtype=ft.float64) * (RANK + 1)


def test_threads_prepare_data_while_another_one_trains() -> None:
    alone = losses(batch(step) for step in range(5))
    over = threading.Event()

    def work(seed):
        while not over.is_set():
            ft.sum(ft.random.Generator(seed).normal((64,))).realize()

    with ThreadPoolExecutor(3) as pool:
        busy = [pool.submit(work, seed) for seed in range(1)]
        prepared = (pool.submit(lambda step=step: batch(step).realize()).result() for step in range(5))
        try:
            assert losses(prepared) == alone
        finally:
            over.set()
    assert [one.result() for one in busy] == [None]


@pytest.mark.mpi(min_size=2)
def test_a_plan_of_another_thread_leaves_sends_alone() -> None:
    big = ft.asarray(np.full(1 << 17, float(RANK)))
    world.send(big, (RANK + 1) % N)
    (node,) = [node for thread, node in fp.lazy.effects._kept if thread is threading.current_thread()]
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: (ft.ones(3) + 1).realize()).result()
    assert node.value is None
    received = world.recv(big.shape, big.dtype, (RANK - 1) % N)
    assert received.numpy()[-1] == (RANK - 1) % N
    assert node.value is not None


def test_collectives_are_handed_from_thread_to_thread_in_one_order() -> None:
    mine = ft.asarray(np.array([float(RANK)]))
    first = world.all_reduce(mine)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(lambda: world.all_gather(mine * 2, 0).realize()).result()
    assert second.tolist() == [2.0 * rank for rank in range(N)]
    assert first.is_realized or N == 1
    assert first.item() == sum(range(N))


def test_a_copied_model_talks_to_the_same_ranks() -> None:
    layer = ColumnParallel(6, 4 * N, ft.random.Generator(1), world)
    again = copy.deepcopy(layer)
    x = ft.ones((2, 6))
    np.testing.assert_array_equal(layer(x).numpy(), again(x).numpy())
    if N > 1:
        with pytest.raises(CommunicatorError, match="cannot be pickled: it is a group of running ranks"):
            pickle.dumps(layer)
