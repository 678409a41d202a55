// A stand-in for cuBLAS on host memory: the functions that the library calls, with cuBLAS's meaning of each argument.
// Matrices lie column by column, `lda` and the like are checked, and a handle forgets its workspace with a new stream.
#include <cmath>
#include <complex>
#include <cstdint>
#include <cstring>

typedef long long Long;
enum { SUCCESS = 0, NOT_INITIALIZED = 1, INVALID_VALUE = 7, NOT_SUPPORTED = 15 };
enum { R_32F = 0, R_64F = 1, R_16F = 2, C_32F = 4, C_64F = 5, R_16BF = 14 };
enum { COMPUTE_32F = 68, COMPUTE_64F = 70, COMPUTE_32F_FAST_TF32 = 77 };

struct Handle {
    void *stream, *workspace;
    size_t workspace_bytes;
    int pointer_mode, math_mode;
};

// What tests look at: of the last product, and how many there were.
struct Seen {
    void* stream;
    size_t workspace_bytes;
    int math_mode, compute, batch, products;
    Long stride_a, stride_b, stride_c;
};
extern "C" { Seen seen; }

static float from_bits(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
static uint32_t to_bits(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }
static float to_tf32(float x) { return std::isfinite(x) ? from_bits((to_bits(x) + 0x1000u) & 0xffffe000u) : x; }

struct Bfloat16 {
    uint16_t bits;
    operator float() const { return from_bits((uint32_t)bits << 16); }
    Bfloat16(float x) : bits((to_bits(x) + 0x7fffu + ((to_bits(x) >> 16) & 1u)) >> 16) { if (x != x) bits = 0x7fc0; }
};

struct Float16 {
    uint16_t bits;
    operator float() const {
        int exponent = (bits >> 10) & 31, fraction = bits & 1023;
        float size = exponent == 31 ? (fraction ? NAN : INFINITY)
                     : exponent     ? std::ldexp(1024.0f + fraction, exponent - 25)
                                    : std::ldexp((float)fraction, -24);
        return bits & 0x8000 ? -size : size;
    }
    Float16(float x) {
        uint16_t sign = std::signbit(x) ? 0x8000 : 0;
        float size = std::fabs(x);
        if (x != x) { bits = 0x7e00; return; }
        if (size >= 65520.0f) { bits = sign | 0x7c00; return; }
        int exponent = size < 6.103515625e-05f ? -14 : std::ilogb(size);
        int steps = (int)std::nearbyint(std::ldexp(size, 10 - exponent));  // may carry into the exponent, which is right
        bits = sign | (uint16_t)(steps + ((exponent + 14) << 10));
    }
};

static float rounded(float x, bool tf32) { return tf32 ? to_tf32(x) : x; }
static double rounded(double x, bool) { return x; }
static std::complex<float> rounded(std::complex<float> x, bool tf32) {
    return {rounded(x.real(), tf32), rounded(x.imag(), tf32)};
}
static std::complex<double> rounded(std::complex<double> x, bool) { return x; }

template <typename T, typename Sum>
static void multiply(int transa, int transb, int m, int n, int k, const void* alpha, const void* a, int lda, const void* b,
                     int ldb, const void* beta, void* c, int ldc, bool tf32) {
    const T *A = (const T*)a, *B = (const T*)b;
    T* C = (T*)c;
    const Sum factor = *(const Sum*)alpha, keep = *(const Sum*)beta;
    for (Long column = 0; column < n; ++column)
        for (Long row = 0; row < m; ++row) {
            Sum sum = 0;
            for (Long i = 0; i < k; ++i)
                sum += rounded((Sum)A[transa ? i + row * lda : row + i * lda], tf32) *
                       rounded((Sum)B[transb ? column + i * ldb : i + column * ldb], tf32);
            T& out = C[row + column * ldc];
            out = keep == Sum(0) ? T(factor * sum) : T(factor * sum + keep * (Sum)out);
        }
}

extern "C" {

int cublasSetStream_v2(void* handle, void* stream) {
    Handle& h = *(Handle*)handle;
    h.stream = stream, h.workspace = nullptr, h.workspace_bytes = 0;
    return SUCCESS;
}

int cublasSetWorkspace_v2(void* handle, void* workspace, size_t bytes) {
    if ((uintptr_t)workspace % 256) return INVALID_VALUE;
    ((Handle*)handle)->workspace = workspace, ((Handle*)handle)->workspace_bytes = bytes;
    return SUCCESS;
}

int cublasSetPointerMode_v2(void* handle, int mode) { ((Handle*)handle)->pointer_mode = mode; return SUCCESS; }
int cublasSetMathMode(void* handle, int mode) { ((Handle*)handle)->math_mode = mode; return SUCCESS; }

int cublasGemmStridedBatchedEx(void* handle, int transa, int transb, int m, int n, int k, const void* alpha, const void* a,
                               int type_a, int lda, Long stride_a, const void* b, int type_b, int ldb, Long stride_b,
                               const void* beta, void* c, int type_c, int ldc, Long stride_c, int batch, int compute,
                               int algorithm) {
    const Handle& h = *(Handle*)handle;
    if (!h.workspace || h.pointer_mode != 0) return NOT_INITIALIZED;
    if (m < 0 || n < 0 || k < 0 || batch < 0 || algorithm != -1) return INVALID_VALUE;
    if (lda < (transa ? k : m) || lda < 1 || ldb < (transb ? n : k) || ldb < 1 || ldc < m || ldc < 1) return INVALID_VALUE;
    if (type_a != type_b || type_b != type_c) return NOT_SUPPORTED;
    const bool wide = type_a == R_64F || type_a == C_64F, halves = type_a == R_16F || type_a == R_16BF;
    if (wide ? compute != COMPUTE_64F : compute != COMPUTE_32F && (halves || compute != COMPUTE_32F_FAST_TF32))
        return NOT_SUPPORTED;
    seen = {h.stream, h.workspace_bytes, h.math_mode, compute, batch, seen.products + 1, stride_a, stride_b, stride_c};
    const bool tf32 = compute == COMPUTE_32F_FAST_TF32;
#define EACH(T, Sum)                                                                                              \
    for (Long i = 0; i < batch; ++i)                                                                              \
        multiply<T, Sum>(transa, transb, m, n, k, alpha, (const T*)a + i * stride_a, lda, (const T*)b + i * stride_b, ldb, \
                         beta, (T*)c + i * stride_c, ldc, tf32);                                                  \
    return SUCCESS;
    switch (type_a) {
        case R_16F: EACH(Float16, float)
        case R_16BF: EACH(Bfloat16, float)
        case R_32F: EACH(float, float)
        case R_64F: EACH(double, double)
        case C_32F: EACH(std::complex<float>, std::complex<float>)
        case C_64F: EACH(std::complex<double>, std::complex<double>)
        default: return NOT_SUPPORTED;
    }
}

int cublasGemmEx(void* handle, int transa, int transb, int m, int n, int k, const void* alpha, const void* a, int type_a,
                 int lda, const void* b, int type_b, int ldb, const void* beta, void* c, int type_c, int ldc, int compute,
                 int algorithm) {
    return cublasGemmStridedBatchedEx(handle, transa, transb, m, n, k, alpha, a, type_a, lda, 0, b, type_b, ldb, 0, beta, c,
                                      type_c, ldc, 0, 1, compute, algorithm);
}
}
