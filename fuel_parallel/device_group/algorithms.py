"""The collectives of a `DeviceGroup`, each algorithm written once: for tensors, and for what tells how long it takes.

Values are whatever `Hands` move and combine. A *combining order* is a list of hops (source, target) between numbers of
the group's devices: the target combines what it has with what the source has, in this order, until device 0 has all.
Turned round it is a broadcast from device 0.

- `fold`: each device sends to the first, which combines in the order of devices.
- `tree`: devices with quick hops between them combine first, and then what they have. Among equals it is a binomial
  tree.
- `parts`: device i combines part i of all, and each gets the parts of all others, as in Rabenseifner's all-reduce
  (Thakur, Rabenseifner and Gropp, IJHPCA 19, 2005), every device sending straight to every other one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
Order = tuple[tuple[int, int], ...]


class Hands(Protocol[T]):
    """What algorithms do with values."""

    @abstractmethod
    def stops(self, x: T, device: str) -> list[str]:
        """The devices on the way of a value to a device, the last included; none where it is there."""

    @abstractmethod
    def copy(self, x: T, device: str) -> T:
        """A value, copied to the next stop."""

    @abstractmethod
    def combine(self, a: T, b: T) -> T:
        """Two values of one device combined."""

    @abstractmethod
    def finish(self, x: T) -> T:
        """What is done once to all values combined: the division of an average."""

    @abstractmethod
    def cut(self, x: T, parts: int) -> list[T]:
        """The parts of a value along the dimension at hand."""

    @abstractmethod
    def join(self, xs: Sequence[T]) -> T:
        """Values of one device one after the other along that dimension."""


def fold(size: int) -> Order:
    """All to the first, in order.

    >>> fold(3)
    ((1, 0), (2, 0))
    """
    return tuple((n, 0) for n in range(1, size))


def tree(size: int, us: Callable[[int, int], float]) -> Order:
    """Those between which a hop takes least combine first; `us` is the time of a hop.

    >>> tree(4, lambda a, b: 1.0)
    ((1, 0), (3, 2), (2, 0))
    >>> tree(4, lambda a, b: 1.0 if a % 2 == b % 2 else 5.0)      # 0 and 2 are neighbours, and 1 and 3
    ((2, 0), (3, 1), (1, 0))
    """
    pairs = {(a, b): max(us(a, b), us(b, a)) for b in range(size) for a in range(b)}
    cluster = list(range(size))  # the least number in it stands for a cluster
    order: list[tuple[int, int]] = []
    for limit in sorted(set(pairs.values())):
        before = list(cluster)
        for (a, b), time in pairs.items():
            if time <= limit and cluster[a] != cluster[b]:
                low, high = sorted((cluster[a], cluster[b]))
                cluster = [low if c == high else c for c in cluster]
        rounds = [_binomial([h for h in dict.fromkeys(before) if cluster[h] == low]) for low in dict.fromkeys(cluster)]
        # Round by round, so that clusters go on side by side.
        order += [hop for n in range(max(map(len, rounds))) for each in rounds if n < len(each) for hop in each[n]]
    return tuple(order)


def _binomial(members: Sequence[int]) -> list[list[tuple[int, int]]]:
    """The rounds of a binomial tree."""
    n = len(members)
    spans = [1 << k for k in range((n - 1).bit_length())]
    return [[(members[i + span], members[i]) for i in range(0, n - span, 2 * span)] for span in spans]


def meetings(size: int) -> Order:
    """Each device to each other one, so that neighbours in the list have no device in common where that can be.

    Both ways at once, in rounds in which each device meets one other: the circle method of tournaments.

    >>> meetings(3)
    ((1, 2), (2, 1), (2, 0), (0, 2), (0, 1), (1, 0))
    """
    ring = size - 1 + size % 2
    found: list[tuple[int, int]] = []
    for n in range(ring):
        pairs = [((n + k) % ring, (n - k) % ring) for k in range(1, ring // 2 + 1)]
        if ring < size:
            pairs.append((n, ring))
        found += [hop for a, b in pairs for hop in ((a, b), (b, a))]
    return tuple(found)


class ByOrder(Generic[T]):
    """Collectives over a combining order. Those that end on one device return a list of one."""

    def __init__(self, hands: Hands[T], devices: Sequence[str], order: Order) -> None:
        self.hands, self.devices, self.order = hands, devices, order

    def all_reduce(self, xs: Sequence[T], to_all: bool) -> list[T]:
        """All combined, on the first device or on each."""
        total = self._combined(xs)
        return self.broadcast(total) if to_all else [total]

    def reduce_scatter(self, xs: Sequence[T]) -> list[T]:
        """All combined, and of that part i on device i."""
        parts = self.hands.cut(self._combined(xs), len(self.devices))
        return [self._moved(part, device) for part, device in zip(parts, self.devices, strict=True)]

    def all_gather(self, xs: Sequence[T], to_all: bool) -> list[T]:
        """All joined, on the first device or on each."""
        whole = self.hands.join([self._moved(x, self.devices[0]) for x in xs])
        return self.broadcast(whole) if to_all else [whole]

    def broadcast(self, x: T) -> list[T]:
        """A value of the first device on each."""
        there: dict[str, T] = {self.devices[0]: x}
        for target, source in reversed(self.order):
            self._spread(there, self.devices[source], self.devices[target])
        return [there[device] for device in self.devices]

    def _combined(self, xs: Sequence[T]) -> T:
        held = list(xs)
        for source, target in self.order:
            held[target] = self.hands.combine(held[target], self._moved(held[source], self.devices[target]))
        return self.hands.finish(held[0])

    def _moved(self, x: T, device: str) -> T:
        for stop in self.hands.stops(x, device):
            x = self.hands.copy(x, stop)
        return x

    def _spread(self, there: dict[str, T], source: str, target: str) -> None:
        """Copies from `source` to `target` what is on neither the target nor a stop on the way."""
        if target in there:
            return
        x = there[source]
        for stop in self.hands.stops(x, target):
            x = there[stop] if stop in there else self.hands.copy(x, stop)
            there[stop] = x


class ByParts(ByOrder[T]):
    """Collectives in which each device has the work of one part."""

    def all_reduce(self, xs: Sequence[T], to_all: bool) -> list[T]:
        """See `ByOrder.all_reduce`."""
        return self.all_gather(self.reduce_scatter(xs), to_all)

    def reduce_scatter(self, xs: Sequence[T]) -> list[T]:
        """See `ByOrder.reduce_scatter`."""
        n = len(self.devices)
        cut = [self.hands.cut(x, n) for x in xs]
        held = [cut[i][i] for i in range(n)]
        for source, target in meetings(n):
            there = self._moved(cut[source][target], self.devices[target])
            held[target] = self.hands.combine(held[target], there)
        return [self.hands.finish(x) for x in held]

    def all_gather(self, xs: Sequence[T], to_all: bool) -> list[T]:
        """See `ByOrder.all_gather`."""
        if not to_all:
            return super().all_gather(xs, to_all)
        n = len(self.devices)
        there: list[dict[str, T]] = [{device: x} for device, x in zip(self.devices, xs, strict=True)]
        for source, target in meetings(n):
            self._spread(there[source], self.devices[source], self.devices[target])
        joined: dict[str, T] = {}
        for device in self.devices:
            if device not in joined:
                joined[device] = self.hands.join([places[device] for places in there])
        return [joined[device] for device in self.devices]

    def broadcast(self, x: T) -> list[T]:
        """See `ByOrder.broadcast`."""
        pieces = self.hands.cut(x, len(self.devices))
        placed = [self._moved(piece, device) for piece, device in zip(pieces, self.devices, strict=True)]
        return self.all_gather(placed, to_all=True)
