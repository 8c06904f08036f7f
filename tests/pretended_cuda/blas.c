/* cuBLAS and cuBLASLt: products of matrices become ops of the trace that compute nothing. */
#include "pretended.h"

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

static int gemm(Handle *h, const char *name, int ta, int tb, int m, int n, int k, Matrix a, Matrix b, Matrix c,
                int count, double beta) {
    void *pointers[] = {(void *)c.data, (void *)a.data, (void *)b.data, h->workspace};
    int error = pretended_library(h->stream, name, 4, pointers,
                                  "%c%c m=%d n=%d k=%d ld=%d,%d,%d strides=%lld,%lld,%lld batch=%d beta=%g",
                                  "NTC"[ta % 3], "NTC"[tb % 3], m, n, k, a.ld, b.ld, c.ld, a.stride, b.stride, c.stride,
                                  count, beta);
    return error ? INTERNAL_ERROR : 0;
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
                                      int ldb, long long sb, const type *beta, type *c, int ldc, long long sc, \
                                      int count) { \
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
int cublasGemmStridedBatchedEx(SHAPE, const void *alpha, const void *a, int type_a, int lda, long long sa,
                               const void *b, int type_b, int ldb, long long sb, const float *beta, void *c, int type_c,
                               int ldc, long long sc, int count, int compute, int algo) {
    return GEMM("cublasGemmStridedBatchedEx", M(a, lda, sa), M(b, ldb, sb), M(c, ldc, sc), count, *beta);
}

int cublasDotEx(Handle *h, int n, void *x, int tx, int incx, void *y, int ty, int incy, void *out, int to, int by) {
    return pretended_library(h->stream, "cublasDot", 3, (void *[]){out, x, y}, "n=%d", n) ? INTERNAL_ERROR : 0;
}
int cublasSdot_v2(Handle *h, int n, void *x, int incx, void *y, int incy, void *out) {
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
int cublasLtMatmulAlgoGetHeuristic(void *h, Layout *product, Layout *a, Layout *b, Layout *c, Layout *d,
                                   Layout *preference, int wanted, char *results, int *found) {
    memset(results, 0, RESULT_SIZE); /* an algorithm, the size of its workspace, and a status */
    return *found = 1, 0;
}
int cublasLtMatmul(void *h, Layout *product, const void *alpha, void *a, Layout *la, void *b, Layout *lb,
                   const float *beta, void *c, Layout *lc, void *d, Layout *ld, const void *algo, void *workspace,
                   size_t workspace_size, Stream *stream) {
    void *pointers[] = {d, a, b, c, (void *)product->attributes[BIAS], workspace};
    int error = pretended_library(stream, "cublasLtMatmul", 6, pointers,
                                  "%lux%lu %lux%lu -> %lux%lu ld=%ld,%ld,%ld epilogue=%u beta=%g", la->rows,
                                  la->columns, lb->rows, lb->columns, ld->rows, ld->columns, la->ld, lb->ld, ld->ld,
                                  (unsigned)product->attributes[EPILOGUE], *beta);
    return error ? INTERNAL_ERROR : 0;
}
