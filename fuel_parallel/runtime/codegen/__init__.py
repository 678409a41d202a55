"""From a region's `Program` to one kernel in C, and its launch on a GPU.

`lowering` turns the program into values, each by one expression; `expressions` holds the C expression of every
operation; `kernel` arranges them into a kernel; `dialect` holds what differs between CUDA C and others; `launch`
compiles and runs it by CuPy.
"""
