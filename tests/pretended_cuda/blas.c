/* cuBLAS and cuBLASLt: products of matrices become ops of the trace that compute nothing. */
#include "pretended.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { INTERNAL_ERROR = 14 };

/* ---- cuBLAS ---- */

typedef struct Handle {
    Stream *stream;
    void *workspace;
    int math, pointers; /* modes; pointers: 1 if alpha and beta lie on the device */
} Handle;

int cublasCreate_v2(Handle **h) { return *h = calloc(1, sizeof(Handle)), pretended_forbidden("cublasCreate") ? 1 : 0; }
int cublasDestroy_v2(Handle *h) { return free(h), 0; }
int cublasSetStream_v2(Handle *h, Stream *stream) { return h->stream = stream, 0; }
int cublasSetWorkspace_v2(Handle *h, void *workspace, size_t size) { return h->workspace = workspace, 0; }
int cublasSetMathMode(Handle *h, int mode) { return h->math = mode, 0; }
int cublasGetMathMode(Handle *h, int *mode) { return *mode = h->math, 0; }
int cublasSetPointerMode_v2(Handle *h, int mode) { return h->pointers = mode, 0; }
int cublasGetPointerMode_v2(Handle *h, int *mode) { return *mode = h->pointers, 0; }

typedef struct Matrix {
    const void *data;
    int ld;
    long long stride;
} Matrix;

static int gemm(Handle *h, const char *name, int ta, int tb, int m, int n, int k, Matrix a, Matrix b, Matrix c, int count,
                double beta) {
    Op op = {.kind = LIBRARY, .name = name, .pointer_count = 4, .pointers = {(uint64_t)c.data, (uint64_t)a.data,
             (uint64_t)b.data, (uint64_t)h->workspace}};
    if (pretended_is_read(h->stream))
        snprintf(op.text, sizeof(op.text), "%c%c m=%d n=%d k=%d ld=%d,%d,%d strides=%lld,%lld,%lld batch=%d beta=%g",
                 "NTC"[ta % 3], "NTC"[tb % 3], m, n, k, a.ld, b.ld, c.ld, a.stride, b.stride, c.stride, count, beta);
    return pretended_put(h->stream, &op) ? INTERNAL_ERROR : 0;
}

#define SHAPE Handle *h, int ta, int tb, int m, int n, int k
#define GEMM(name, a, b, c, count, beta) gemm(h, name, ta, tb, m, n, k, (Matrix)a, (Matrix)b, (Matrix)c, count, beta)
#define M(...) {__VA_ARGS__}
#define OF_TYPE(T, type) \
    int cublas##T##gemm_v2(SHAPE, const type *alpha, const type *a, int lda, const type *b, int ldb, const type *beta, \
                           type *c, int ldc) { \
        return GEMM("cublas" #T "gemm", M(a, lda), M(b, ldb), M(c, ldc), 1, h->pointers ? 0 : *beta); \
    } \
    int cublas##T##gemmStridedBatched(SHAPE, const type *alpha, const type *a, int lda, long long sa, const type *b, \
                                      int ldb, long long sb, const type *beta, type *c, int ldc, long long sc, int count) { \
        return GEMM("cublas" #T "gemmStridedBatched", M(a, lda, sa), M(b, ldb, sb), M(c, ldc, sc), count, *beta); \
    } \
    int cublas##T##gemv_v2(Handle *h, int ta, int m, int n, const type *alpha, const type *a, int lda, const type *x, \
                           int incx, const type *beta, type *y, int incy) { \
        int tb = 0, k = 1; \
        return GEMM("cublas" #T "gemv", M(a, lda), M(x, incx), M(y, incy), 1, *beta); \
    }
OF_TYPE(S, float)
OF_TYPE(D, double)

int cublasGemmEx(SHAPE, const void *alpha, const void *a, int type_a, int lda, const void *b, int type_b, int ldb,
                 const float *beta, void *c, int type_c, int ldc, int compute, int algo) {
    return GEMM("cublasGemmEx", M(a, lda), M(b, ldb), M(c, ldc), 1, *beta);
}
int cublasGemmStridedBatchedEx(SHAPE, const void *alpha, const void *a, int type_a, int lda, long long sa, const void *b,
                               int type_b, int ldb, long long sb, const float *beta, void *c, int type_c, int ldc,
                               long long sc, int count, int compute, int algo) {
    return GEMM("cublasGemmStridedBatchedEx", M(a, lda, sa), M(b, ldb, sb), M(c, ldc, sc), count, *beta);
}

int cublasDotEx(Handle *h, int n, const void *x, int tx, int incx, const void *y, int ty, int incy, void *out, int to, int te) {
    Op op = {.kind = LIBRARY, .name = "cublasDot", .pointer_count = 3, .pointers = {(uint64_t)out, (uint64_t)x, (uint64_t)y}};
    return pretended_put(h->stream, &op) ? INTERNAL_ERROR : 0;
}
int cublasSdot_v2(Handle *h, int n, const float *x, int incx, const float *y, int incy, float *out) {
    return cublasDotEx(h, n, x, 0, incx, y, 0, incy, out, 0, 0);
}

/* ---- cuBLASLt ---- */

enum { EPILOGUE = 7, BIAS = 8, ATTRIBUTES = 64, RESULT_SIZE = 96 };
typedef struct Layout { /* and descriptions of products, and preferences */
    uint64_t rows, columns;
    int64_t ld;
    uint64_t attributes[ATTRIBUTES];
} Layout;

static int store(Layout *of, int number, const void *value, size_t size) {
    if (number >= 0 && number < ATTRIBUTES && size <= 8)
        memcpy(&of->attributes[number], value, size);
    return 0;
}

#define KIND(name) \
    int cublasLt##name##Destroy(Layout *of) { return free(of), 0; } \
    int cublasLt##name##SetAttribute(Layout *of, int number, const void *value, size_t size) { \
        return store(of, number, value, size); \
    }
KIND(MatmulDesc)
KIND(MatmulPreference)
KIND(MatrixLayout)

size_t cublasLtGetVersion(void) { return 130000; }
int cublasLtMatmulDescCreate(Layout **out, int compute, int scale) { return *out = calloc(1, sizeof(Layout)), 0; }
int cublasLtMatmulPreferenceCreate(Layout **out) { return *out = calloc(1, sizeof(Layout)), 0; }
int cublasLtMatrixLayoutCreate(Layout **out, int type, uint64_t rows, uint64_t columns, int64_t ld) {
    *out = calloc(1, sizeof(Layout));
    **out = (Layout){rows, columns, ld};
    return 0;
}
int cublasLtMatmulAlgoGetHeuristic(void *h, Layout *product, Layout *a, Layout *b, Layout *c, Layout *d, Layout *preference,
                                   int wanted, char *results, int *found) {
    memset(results, 0, RESULT_SIZE); /* an algorithm, the size of its workspace, and a status */
    return *found = 1, 0;
}
int cublasLtMatmul(void *h, Layout *product, const void *alpha, const void *a, Layout *of_a, const void *b, Layout *of_b,
                   const float *beta, const void *c, Layout *of_c, void *d, Layout *of_d, const void *algo, void *workspace,
                   size_t workspace_size, Stream *stream) {
    Op op = {.kind = LIBRARY, .name = "cublasLtMatmul", .pointer_count = 6, .pointers = {(uint64_t)d, (uint64_t)a,
             (uint64_t)b, (uint64_t)c, product->attributes[BIAS], (uint64_t)workspace}};
    if (pretended_is_read(stream))
        snprintf(op.text, sizeof(op.text), "%lux%lu %lux%lu -> %lux%lu ld=%ld,%ld,%ld epilogue=%u beta=%g", of_a->rows,
                 of_a->columns, of_b->rows, of_b->columns, of_d->rows, of_d->columns, of_a->ld, of_b->ld, of_d->ld,
                 (unsigned)product->attributes[EPILOGUE], *beta);
    return pretended_put(stream, &op) ? INTERNAL_ERROR : 0;
}
