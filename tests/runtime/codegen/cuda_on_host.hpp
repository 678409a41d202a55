// The part of CUDA C that generated kernels use, as C++ for the host. The threads of a block are fibres: each runs to the
// next shuffle or barrier, then the next one has its turn. The threads of a warp meet at shuffles, those of a block at
// barriers; blocks run one after the other.
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#include <utility>

using std::memcpy;

struct Index { unsigned x; };
static Index threadIdx, blockIdx, gridDim;

#define __global__ __attribute__((visibility("default")))
#define __device__
#define __restrict__
#define __shared__ static
#define __launch_bounds__(threads)

static float __uint_as_float(unsigned bits) { float x; memcpy(&x, &bits, 4); return x; }
static unsigned __float_as_uint(float x) { unsigned bits; memcpy(&bits, &x, 4); return bits; }

static ucontext_t scheduler, fibres[1024];
static bool finished[1024];
static unsigned current;
static unsigned char exchange[1024][8];

static bool at_shuffle;

static void stop(bool shuffle) {
    at_shuffle = shuffle;
    swapcontext(&fibres[current], &scheduler);
}

static void __syncthreads() { stop(false); }

template <typename T> static T __shfl_xor_sync(unsigned, T x, int mask, int) {
    memcpy(exchange[current], &x, sizeof x);
    stop(true);
    T y;
    memcpy(&y, exchange[current ^ (unsigned)mask], sizeof y);
    stop(true);
    return y;
}

static void (*body)(void **);
static void **body_arguments;

static void fibre() {
    body(body_arguments);
    finished[current] = true;
    at_shuffle = false;
    swapcontext(&fibres[current], &scheduler);
}

static void run_grid(void (*kernel)(void **), unsigned blocks, unsigned threads, void **arguments) {
    static const size_t stack = 64 * 1024;
    static char *stacks = static_cast<char *>(std::malloc(stack * 1024));
    body = kernel;
    body_arguments = arguments;
    gridDim.x = blocks;
    for (unsigned b = 0; b < blocks; ++b) {
        blockIdx.x = b;
        for (unsigned t = 0; t < threads; ++t) {
            getcontext(&fibres[t]);
            fibres[t].uc_stack.ss_sp = stacks + t * stack;
            fibres[t].uc_stack.ss_size = stack;
            fibres[t].uc_link = nullptr;
            makecontext(&fibres[t], fibre, 0);
            finished[t] = false;
        }
        for (unsigned left = threads; left;) {
            for (unsigned warp = 0; warp < threads; warp += 32) {
                do {
                    for (unsigned t = warp; t < warp + 32; ++t) {
                        if (finished[t]) continue;
                        threadIdx.x = current = t;
                        swapcontext(&scheduler, &fibres[t]);
                        left -= finished[t];
                    }
                } while (at_shuffle);
            }
        }
    }
}

// Calls a kernel with arguments given as pointers to their values, as CUDA's driver does.
template <typename... A, size_t... I>
static void call_with(void (*kernel)(A...), void **arguments, std::index_sequence<I...>) {
    kernel(*static_cast<A *>(arguments[I])...);
}

template <typename... A> static void call(void (*kernel)(A...), void **arguments) {
    call_with(kernel, arguments, std::index_sequence_for<A...>());
}
