"""From a region's `Program` to one kernel in C, and its launch on a GPU.

`lowering` turns the program into values, each by one expression; `expressions` holds the C expression of every
operation; `arrangement` decides which threads do what and what they hold; `kernel`, with `sums` and `writer`, writes
the source; `dialect` holds what differs between CUDA C and others; `launch` compiles and runs it by CuPy.

Attention is no region: `tiling` has the products of tiles, `attention_writer` what its kernels share,
`attention_forward`, `attention_backward` and `attention_paged` those of an op each; `attention` launches the first two.
"""
