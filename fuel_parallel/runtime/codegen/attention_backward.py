"""The kernels of attention's backward pass; weights are computed again from the logarithms of sums.

In the first a block has a tile of queries: it gives their cotangents, and for each query the inner product of result
and cotangent. In the second it has a tile of keys and values, and all queries pass that these serve. So no two blocks
add to one number.
"""

from __future__ import annotations

from fuel_parallel.runtime.codegen.attention_writer import AttentionWriter, query_tile, seen_keys
from fuel_parallel.runtime.codegen.tiling import weight_stride

OF_QUERIES, OF_KEYS = "attention_of_queries", "attention_of_keys"
"""Names of the kernels."""


class BackwardWriter(AttentionWriter):
    """Writes `attention_of_queries` and `attention_of_keys`."""

    steps = ("query", "key", "value", "toward")

    def shared_elements(self) -> int:
        """Of the second kernel, which has more."""
        tiling = self.tiling
        tiles = (tiling.rows + tiling.columns) * (self.row.stride + self.value_row.stride)
        return tiles + 2 * tiling.rows * weight_stride(tiling, self.form.computed) + 2 * tiling.columns

    def result_columns(self) -> int:
        """See `AttentionWriter.result_columns`."""
        return self.row.per_lane + self.value_row.per_lane

    def kernels(self) -> list[str]:
        """See `AttentionWriter.kernels`."""
        form = self.form
        inputs = (
            *((name, form.dtype, True) for name in ("query", "key", "value")),
            ("toward", form.computed, True),
            ("result", form.computed, True),
        )
        outputs = (("inner", form.computed, False), ("out", form.dtype, False))
        queries = self.filled(
            _OF_QUERIES,
            head=self.head(OF_QUERIES, (*inputs, *outputs)),
            begin=query_tile(self),
            load_queries=self.load("own", "query", "ROWS", "first", "queries"),
            load_toward=self.load("own_toward", "toward", "ROWS", "first", "queries"),
            seen=seen_keys(self),
            load_keys=self.load("passing", "key", "COLUMNS", "start", "keys"),
            load_values=self.load("passing_values", "value", "COLUMNS", "start", "keys"),
            scores=self.dot("score", "own", "passing", self.row),
            cotangents=self.dot("cotangent", "own_toward", "passing_values", self.value_row),
            is_hidden=self.is_hidden("(first + group * OWN + r)", "(start + lane + c * LANES)"),
            add=self.accumulate("d_query", "weights", "passing", self.row),
            element=self.stored("d_query[r][e] * scale"),
            dim=form.dim,
        )
        keys = self.filled(
            _OF_KEYS,
            head=self.head(OF_KEYS, (*inputs, ("inner", form.computed, True), ("out", form.dtype, False))),
            key_bases="\n".join(self.base(array, "kv_head") for array in ("key", "value")),
            query_bases="\n".join(self.base(array, "head") for array in ("query", "toward")),
            mask_base=self.mask_base(),
            load_keys=self.load("own", "key", "ROWS", "first", "keys"),
            load_values=self.load("own_values", "value", "ROWS", "first", "keys"),
            # The first query that sees the tile's first key, or a tile's beginning before it.
            begin="first + queries - keys" if form.causal else "0",
            load_queries=self.load("passing", "query", "COLUMNS", "start", "queries"),
            load_toward=self.load("passing_toward", "toward", "COLUMNS", "start", "queries"),
            scores=self.dot("score", "own", "passing", self.row),
            cotangents=self.dot("cotangent", "own_values", "passing_toward", self.value_row),
            is_hidden=self.is_hidden("(start + lane + c * LANES)", "(first + group * OWN + r)"),
            add_keys=self.accumulate("d_key", "d_scores", "passing", self.row),
            add_values=self.accumulate("d_value", "weights", "passing_toward", self.value_row),
            key_element=self.stored("d_key[r][e]"),
            value_element=self.stored("d_value[r][e]"),
            dim=form.dim,
        )
        return [queries, keys]


_OF_QUERIES = """
$head {
    $tile own[ROWS * $stride], own_toward[ROWS * $value_stride], weights[ROWS * WEIGHT_STRIDE];
    $tile passing[COLUMNS * $stride], passing_values[COLUMNS * $value_stride];
    $begin
    $load_queries
    $load_toward
    $barrier
    $T level[OWN], product[OWN], d_query[OWN][$per_lane];
    $unroll
    for (int r = 0; r < OWN; ++r) {
        const int row = first + group * OWN + r;
        const position at = (place * queries + row) * $width;
        const int own_at = (group * OWN + r) * $value_stride;
        $T part = 0;
        for (int c = lane; c < $value_dim; c += LANES)
            if (row < queries) part = $fma(own_toward[own_at + c], result[at + c], part);
        product[r] = total_over_lanes(part$exchange_argument);
        level[r] = row < queries ? result[at + $value_dim] : $hidden;
        if (row < queries && lane == 0) inner[place * queries + row] = product[r];
        $unroll
        for (int e = 0; e < $per_lane; ++e) d_query[r][e] = 0;
    }
    $seen
    for (int start = 0; start < seen; start += COLUMNS) {
        $barrier
        $load_keys
        $load_values
        $barrier
        $scores
        $cotangents
        $unroll
        for (int r = 0; r < OWN; ++r)
            $unroll
            for (int c = 0; c < PASSING; ++c) {
                if ($is_hidden) score[r][c] = $infinite;
                weights[(group * OWN + r) * WEIGHT_STRIDE + lane + c * LANES] =
                    $exp(score[r][c] - level[r]) * (cotangent[r][c] - product[r]);
            }
        $barrier
        $add
    }
    $unroll
    for (int r = 0; r < OWN; ++r) {
        const int row = first + group * OWN + r;
        $unroll
        for (int e = 0; e < $per_lane; ++e)
            if (row < queries && $column < $dim) out[(place * queries + row) * $dim + $column] = $element;
    }
}
"""

_OF_KEYS = """
$head {
    $tile own[ROWS * $stride], own_values[ROWS * $value_stride];
    $tile passing[COLUMNS * $stride], passing_toward[COLUMNS * $value_stride];
    $tile weights[ROWS * WEIGHT_STRIDE], d_scores[ROWS * WEIGHT_STRIDE], level[COLUMNS], product[COLUMNS];
    const int thread = (int)$thread, lane = thread % LANES, group = thread / LANES;
    const int tiles = (keys + ROWS - 1) / ROWS, kv_heads = heads / served;
    const position place = (position)$block / tiles;
    const int kv_head = (int)(place % kv_heads);
    const position batch = place / kv_heads, batches = (position)$blocks / tiles / kv_heads;
    const int first = (int)($block % tiles) * ROWS;
    $key_bases
    $load_keys
    $load_values
    $T d_key[OWN][$per_lane], d_value[OWN][$value_per_lane];
    $unroll
    for (int r = 0; r < OWN; ++r) {
        $unroll
        for (int e = 0; e < $per_lane; ++e) d_key[r][e] = 0;
        $unroll
        for (int e = 0; e < $value_per_lane; ++e) d_value[r][e] = 0;
    }
    const int begin = $begin;
    for (int head = kv_head * served; head < (kv_head + 1) * served; ++head) {
        const position at = (batch * heads + head) * queries;
        $query_bases
        $mask_base
        for (int start = begin > 0 ? begin / COLUMNS * COLUMNS : 0; start < queries; start += COLUMNS) {
            $barrier
            $load_queries
            $load_toward
            for (int i = thread; i < COLUMNS; i += THREADS) {
                level[i] = start + i < queries ? result[(at + start + i) * $width + $value_dim] : $hidden;
                product[i] = start + i < queries ? inner[at + start + i] : 0;
            }
            $barrier
            $scores
            $cotangents
            $unroll
            for (int r = 0; r < OWN; ++r)
                $unroll
                for (int c = 0; c < PASSING; ++c) {
                    if ($is_hidden) score[r][c] = $infinite;
                    const int i = (group * OWN + r) * WEIGHT_STRIDE + lane + c * LANES;
                    weights[i] = $exp(score[r][c] - level[lane + c * LANES]);
                    d_scores[i] = weights[i] * (cotangent[r][c] - product[lane + c * LANES]);
                }
            $barrier
            $add_keys
            $add_values
        }
    }
    const position keys_at = batches * heads * queries * $dim, values_at = keys_at + batches * kv_heads * keys * $dim;
    $unroll
    for (int r = 0; r < OWN; ++r) {
        const int row = first + group * OWN + r;
        $unroll
        for (int e = 0; e < $per_lane; ++e)
            if (row < keys && $column < $dim) out[keys_at + (place * keys + row) * $dim + $column] = $key_element;
        $unroll
        for (int e = 0; e < $value_per_lane; ++e)
            if (row < keys && $value_column < $value_dim)
                out[values_at + (place * keys + row) * $value_dim + $value_column] = $value_element;
    }
}
"""
