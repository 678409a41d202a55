"""The kernel of attention: a block has a tile of queries of one head, and keys and values pass.

A thread keeps its part of the result, the running maximum and its part of the running sum in registers.
"""

from __future__ import annotations

from fuel_parallel.runtime.codegen.attention_writer import AttentionWriter, query_tile, seen_keys
from fuel_parallel.runtime.codegen.tiling import weight_stride

FORWARD = "attention"
"""Name of the kernel."""


class ForwardWriter(AttentionWriter):
    """Writes `attention`."""

    steps = ("query", "key", "value")

    def shared_elements(self) -> int:
        """Keys and values take turns in one tile: a second one would halve the blocks that run side by side."""
        tiling = self.tiling
        weights = weight_stride(tiling, self.form.computed)
        return tiling.rows * (self.row.stride + weights) + tiling.columns * self._widest()

    def _widest(self) -> int:
        return max(self.row.stride, self.value_row.stride)

    def result_columns(self) -> int:
        """See `AttentionWriter.result_columns`."""
        return self.value_row.per_lane

    def kernels(self) -> list[str]:
        """See `AttentionWriter.kernels`."""
        return [self.filled(_FORWARD, **self.parts())]

    def parts(self) -> dict[str, object]:
        """The parts of the kernel that follow from where things lie."""
        form = self.form
        inputs = tuple((name, form.dtype, True) for name in self.steps)
        return {
            "head": self.head(FORWARD, (*inputs, ("out", form.computed, False))),
            "widest": self._widest(),
            "begin": query_tile(self),
            "load_queries": self.load("own", "query", "ROWS", "first", "queries"),
            "seen": seen_keys(self),
            "load_keys": self.load("passing", "key", "COLUMNS", "start", "keys"),
            "scores": self.dot("score", "own", "passing", self.row),
            "is_hidden": self.is_hidden("(first + group * OWN + r)", "(start + lane + c * LANES)"),
            "load_values": self.load("passing", "value", "COLUMNS", "start", "keys"),
            "add": self.accumulate("result", "weights", "passing", self.value_row),
            "from": "0",
            "rows": "queries",
            "leave": self.filled(LEAVE, out="out", at="place * queries + row"),
        }


LEAVE = """
const position at = ($at) * $width;
$unroll
for (int e = 0; e < $value_per_lane; ++e)
    if ($value_column < $value_dim) $out[at + $value_column] = result[r][e] / by;
const $T most = top[r] <= $lowest ? $lowest : top[r];
if (lane == 0) $out[at + $value_dim] = whole == 0 ? $hidden : $log(whole) + most;
"""
"""Leaves the result of a row, and behind it the logarithm of its sum."""

_FORWARD = """
$head {
    $tile own[ROWS * $stride], passing[COLUMNS * $widest], weights[ROWS * WEIGHT_STRIDE];
    $begin
    $load_queries
    $T top[OWN], sum[OWN], result[OWN][$value_per_lane];
    $unroll
    for (int r = 0; r < OWN; ++r) {
        top[r] = $infinite;
        sum[r] = 0;
        $unroll
        for (int e = 0; e < $value_per_lane; ++e) result[r][e] = 0;
    }
    $seen
    for (int start = $from; start < seen; start += COLUMNS) {
        $barrier
        $load_keys
        $barrier
        $scores
        $unroll
        for (int r = 0; r < OWN; ++r) {
            $T highest = top[r], count = 0;
            $unroll
            for (int c = 0; c < PASSING; ++c) {
                if ($is_hidden) score[r][c] = $infinite;
                highest = score[r][c] <= highest || highest != highest ? highest : score[r][c];
            }
            highest = largest_over_lanes(highest$exchange_argument);
            const $T anchor = highest <= $lowest ? $lowest : highest;
            const $T fade = $exp(top[r] - anchor);
            $unroll
            for (int c = 0; c < PASSING; ++c) {
                const $T weight = $exp(score[r][c] - anchor);
                weights[(group * OWN + r) * WEIGHT_STRIDE + lane + c * LANES] = weight;
                count += weight;
            }
            top[r] = highest;
            sum[r] = $fma(sum[r], fade, count);
            $unroll
            for (int e = 0; e < $value_per_lane; ++e) result[r][e] *= fade;
        }
        $barrier
        $load_values
        $barrier
        $add
    }
    $unroll
    for (int r = 0; r < OWN; ++r) {
        const int row = first + group * OWN + r;
        const $T whole = total_over_lanes(sum[r]$exchange_argument);
        const $T by = whole == 0 ? 1 : whole;
        if (row < $rows) {
            $leave
        }
    }
}
"""
