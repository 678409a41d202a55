"""What the kernels of attention have in common: parameters, tiles that fit, which keys a query sees.

The algorithm is FlashAttention-2's (Dao, 2023, arXiv:2307.08691): the softmax is kept online, and no matrix of scores
leaves the chip. Sums have one order: by tile, in a tile by element, over threads at the end; there are no atomic
operations.

**Intensity.** A tile of `ROWS` queries reads each key and value once: 4 * ROWS * dim operations for 2 * dim elements,
so 32 operations a byte for 64 rows of float32, and the second-level cache has most of it, since blocks of one head run
side by side. From shared memory a thread reads OWN + PASSING pieces of 16 bytes for OWN * PASSING * 4 products. So
arithmetic is the bound; there are no tensor cores in it.

A product and its sum are one `fma` where the text says so, which rounds alike on all devices; compilers contract
nothing. 16-bit floats are computed in float32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.dtypes import DType
from fuel_parallel.runtime.codegen.dialect import Dialect
from fuel_parallel.runtime.codegen.expressions import Unsupported
from fuel_parallel.runtime.codegen.tiling import (
    TILINGS,
    Row,
    Tiling,
    accumulate,
    column_of,
    defines,
    dot,
    filled,
    load,
    row_of,
)

HIDDEN = 1e30
"""See `lazy.ops.attention`: the logarithm of a sum over no key. Its negative is below any score that is seen."""
REGISTERS = 160
"""Words of a thread that may hold results."""

Pointers = tuple[tuple[str, DType, bool], ...]


@dataclass(frozen=True, slots=True)
class Form:
    """What a source is made for. `masked` is the number of leading dimensions that a mask differs over; None without.

    A `dtype` of 16 bits is that of query, key and value alone.
    """

    dtype: DType
    dim: int
    value_dim: int
    causal: bool
    masked: int | None

    @property
    def computed(self) -> DType:
        """The dtype of arithmetic, and of results."""
        return dtypes.accumulated_in(self.dtype)

    def stored_dtypes(self) -> tuple[DType, ...]:
        """The dtypes of arrays in memory."""
        return self.dtype, self.computed


@dataclass(frozen=True, slots=True)
class Source:
    """A source, and how its kernels are launched: a block for each tile of rows of each head."""

    text: str
    tiling: Tiling

    def blocks(self, heads: int, rows: int) -> int:
        """Blocks of a kernel whose tiles are of `rows`."""
        return heads * -(-rows // self.tiling.rows)


class AttentionWriter(ABC):
    """Writes the kernels `names` of a form, of which each has a template among `templates`."""

    steps: ClassVar[tuple[str, ...]]
    """The inputs whose batch, head and row are found by steps; the others lie in C order."""

    def __init__(self, form: Form, tiling: Tiling, dialect: Dialect) -> None:
        self.form, self.tiling, self.dialect = form, tiling, dialect
        self.row = row_of(form.dim, tiling, form.computed)
        self.value_row = row_of(form.value_dim, tiling, form.computed)
        math, lanes = dialect.math[form.computed], tiling.lanes
        self.words: dict[str, object] = {
            "T": dialect.types[form.computed],
            # Aligned, so that compilers read pieces of 16 bytes at once.
            "tile": f"__attribute__((aligned(16))) {dialect.shared} {dialect.types[form.computed]}",
            "barrier": dialect.barrier,
            "unroll": dialect.unroll,
            "fma": math["fma"],
            "exp": math["exp"],
            "log": math["log"],
            "thread": dialect.thread,
            "block": dialect.block,
            "blocks": dialect.blocks,
            "exchange": dialect.exchange.format(threads=tiling.threads),
            "exchange_argument": dialect.exchange_argument,
            "lowest": dialect.literal(-HIDDEN, form.computed),
            "hidden": dialect.literal(HIDDEN, form.computed),
            "infinite": dialect.literal(float("-inf"), form.computed),
            "value_dim": form.value_dim,
            "width": form.value_dim + 1,
            "stride": self.row.stride,
            "value_stride": self.value_row.stride,
            "per_lane": self.row.per_lane,
            "value_per_lane": self.value_row.per_lane,
            "column": column_of(self.row, lanes, "e"),
            "value_column": column_of(self.value_row, lanes, "e"),
        }

    @abstractmethod
    def shared_elements(self) -> int:
        """Elements of all that a kernel has in shared memory."""

    @abstractmethod
    def result_columns(self) -> int:
        """Columns of results in a thread's registers."""

    @abstractmethod
    def kernels(self) -> list[str]:
        """The texts of the kernels."""

    def fits(self) -> bool:
        """Whether a block's memory holds the tiles, and a thread's registers the results."""
        size = self.form.computed.itemsize
        exchange = self.tiling.threads * 8 if self.dialect.exchange else 0
        words = self.result_columns() * self.tiling.own * size // 4
        return words <= REGISTERS and self.shared_elements() * size + exchange <= self.dialect.shared_bytes

    def source(self) -> str:
        """The whole source."""
        dialect = self.dialect
        halves = [dialect.halves.strip()] if any(map(dtypes.is_half, self.form.stored_dtypes())) else []
        head = f"typedef {dialect.types[dtypes.int64]} position;\n{defines(self.tiling, self.form.computed)}"
        lanes = [self.filled(_LANES, name=name, combined=text, **self._shuffle()) for name, text in _OVER_LANES]
        return "\n\n".join([dialect.preamble.strip(), *halves, head, *lanes, *self.kernels()]) + "\n"

    def _shuffle(self) -> dict[str, str]:
        dialect = self.dialect
        shuffle = dialect.shuffle.format(type=self.words["T"])
        return {
            "function": dialect.function,
            "exchange_parameter": dialect.exchange_parameter,
            "shuffle": "\n".join(line.strip() for line in shuffle.splitlines()),
        }

    # Parts of kernels.

    def filled(self, template: str, **words: object) -> str:
        """A template with its words and those of all kernels."""
        return filled(template, {**self.words, **words}).strip()

    def named(self, name: str, pointers: Pointers, counts: tuple[str, ...], others: tuple[str, ...] = ()) -> str:
        """The name and parameters of a kernel: pointers (name, dtype, whether it is only read), counts, others."""
        dialect = self.dialect
        texts = []
        for pointer, dtype, is_input in pointers:
            kind = dialect.const_pointer if is_input else dialect.pointer
            texts.append(f"{kind.format(type=dialect.storage(dtype))} {pointer}")
        texts += [f"const int {count}" for count in counts]
        bounds = dialect.launch_bounds.format(threads=self.tiling.threads)
        return f"{dialect.kernel} {bounds} {name}({', '.join([*texts, *others])})"

    def head(self, name: str, pointers: Pointers) -> str:
        """`named` with what kernels on query, key and value take: a mask in front, counts, the scale, and steps."""
        masked = self.form.masked
        mask: Pointers = () if masked is None else (("mask", dtypes.bool_, True),)
        steps = [f"{array}_{step}" for array in self.steps for step in ("batch", "head", "row")]
        steps += [f"mask_{n}" for d in range(masked or 0) for n in (f"extent{d}", f"step{d}")]
        steps += ["mask_row", "mask_column"] if masked is not None else []
        wide = self.dialect.types[dtypes.int64]
        others = (f"const {self.words['T']} scale", *(f"const {wide} {step}" for step in steps))
        return self.named(name, (*mask, *pointers), ("heads", "served", "queries", "keys"), others)

    def load(self, tile: str, array: str, rows: str, first: str, count: str) -> str:
        """The loop that fills a tile of `rows` with an input from row `first` of `count` on; queries are scaled."""
        row = self.value_row if array in ("value", "toward") else self.row
        text = f"{array}[{array}_base + (position)$row * {array}_row + c]"
        if dtypes.is_half(self.form.dtype) and array != "toward":
            text = f"load_{self.form.dtype.name}({text})"
        return load(tile, rows, row, text + (" * scale" if array == "query" else ""), first, count, self.words)

    def stored(self, text: str) -> str:
        """A value as an element of an input's cotangent."""
        return f"store_{self.form.dtype.name}({text})" if dtypes.is_half(self.form.dtype) else text

    def base(self, array: str, head: str) -> str:
        """Where the head of an input begins."""
        return f"const position {array}_base = batch * {array}_batch + {head} * {array}_head;"

    def mask_base(self) -> str:
        """Statements that find the mask of a query head."""
        if self.form.masked is None:
            return ""
        lines = ["position mask_base = 0, rest = batch * heads + head;"]
        for d in reversed(range(self.form.masked)):
            lines.append(f"mask_base += rest % mask_extent{d} * mask_step{d};")
            lines.append(f"rest /= mask_extent{d};")
        return "\n".join(lines)

    def is_hidden(self, query: str, key: str) -> str:
        """Whether a query does not see a key."""
        terms = [f"{query} >= queries", f"{key} >= keys"]
        if self.form.causal:
            terms.append(f"{key} > {query} + keys - queries")
        if self.form.masked is not None:
            terms.append(f"!mask[mask_base + (position){query} * mask_row + (position){key} * mask_column]")
        return " || ".join(terms)

    def dot(self, result: str, own: str, other: str, row: Row) -> str:
        """See `tiling.dot`."""
        return dot(result, own, other, row, self.words)

    def accumulate(self, result: str, weights: str, other: str, row: Row) -> str:
        """See `tiling.accumulate`."""
        return accumulate(result, weights, other, row, self.tiling.lanes, self.words)


def source_for(
    writer: type[AttentionWriter], form: Form, queries: int, dialect: Dialect, tilings: tuple[Tiling, ...] = TILINGS
) -> Source:
    """The source that a writer makes with the first tiling that fits; `Unsupported` if none does."""
    fitting = [w for w in (writer(form, tiling, dialect) for tiling in tilings) if w.fits()]
    if not fitting:
        raise Unsupported(
            f"heads of {form.dim} and {form.value_dim} {form.computed.name} are too large for tiles in "
            f"{dialect.shared_bytes >> 10} KiB of shared memory"
        )
    # A tile that is mostly empty is work for nothing.
    chosen = next((w for w in fitting if w.tiling.rows < 2 * queries), fitting[-1])
    return Source(chosen.source(), chosen.tiling)


_OVER_LANES = (("largest", "x >= y || x != x ? x : y"), ("total", "x + y"))
_LANES = """
$function $T ${name}_over_lanes($T x$exchange_parameter) {
    $unroll
    for (int mask = LANES / 2; mask > 0; mask /= 2) {
        $shuffle
        x = $combined;
    }
    return x;
}
"""

QUERY_TILE = """
const int thread = (int)$thread, lane = thread % LANES, group = thread / LANES;
const int tiles = (queries + ROWS - 1) / ROWS;
const position place = (position)$block / tiles;
const int head = (int)(place % heads);
const position batch = place / heads;
const int first = $tile * ROWS;
$bases
$mask_base
$exchange
"""
"""How a block with a tile of queries begins. `served` query heads have one head of keys."""


def query_tile(writer: AttentionWriter) -> str:
    """`QUERY_TILE`. Of causal tiles the last ones see most: they begin first."""
    tile = f"(int)({writer.dialect.block} % tiles)"
    heads = {"key": "head / served", "value": "head / served"}
    return writer.filled(
        QUERY_TILE,
        tile=f"(tiles - 1 - {tile})" if writer.form.causal else tile,
        bases="\n".join(writer.base(array, heads.get(array, "head")) for array in writer.steps),
        mask_base=writer.mask_base(),
    )


def seen_keys(writer: AttentionWriter) -> str:
    """The statement that says how many keys a tile of queries sees."""
    if not writer.form.causal:
        return "const int seen = keys;"
    return "const int last = first + ROWS + keys - queries, seen = last < keys ? last : keys;"
