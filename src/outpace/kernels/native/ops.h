// The arithmetic of one instruction set. Each ops_*.cpp compiles ops.inc once more with other flags.
#pragma once
#include "abi.h"

struct AttendArgs {
    const float *q;  // [group][head_dim], scaled
    const char *keys, *values;
    const int32_t *own;  // rows of this pass that are seen, counted from `past`; null: 0, 1, ...
    float *scores;       // scratch [group][keys_seen]
    float *out;          // [group][head_dim]
    int32_t group, head_dim, format;
    int32_t first, past, keys_seen;  // keys first..past-1, then the own ones
};

struct Ops {
    const char *name;
    // Activations as `linear` wants them: bytes of `rows` rows, and their encoding. Blocks of BLOCK rows are independent.
    int64_t (*encoded_bytes)(int format, int64_t rows, int64_t cols);
    void (*encode)(int format, const float *x, int64_t rows, int64_t cols, void *out);
    // y[r][n] = x[r] . w[n] for n in first..last-1 (bias not added)
    void (*linear)(const Matrix *w, int64_t first, int64_t last, const void *x, int64_t rows, float *y, int64_t y_stride);
    void (*read_row)(int format, const void *row, int64_t n, float *out);
    void (*write_row)(int format, const float *row, int64_t n, void *out);
    void (*quantise_row)(int format, const float *row, int64_t n, void *out);  // Q8_0 or Q4_0
    void (*rms_norm)(const float *x, const float *weight, float eps, int64_t n, float *out);
    void (*rotate)(float *x, const float *cos, const float *sin, int64_t half);
    void (*gate)(int activation, const float *gate, const float *up, int64_t n, float *out);
    void (*attend)(const AttendArgs *args);
    float (*largest)(const float *x, int64_t n);  // NaN left aside; -inf if nothing else is there
    // For the bench, see measure.inc.
    uint64_t (*measure_read)(const uint64_t *words, int64_t count);
    double (*measure_multiply)(int format, int64_t rounds);
};

// Rows per block of an encoding: what one tile of a matrix unit holds.
enum { BLOCK = 16 };

// Whether the system lets this process use the matrix unit; asks for it.
bool amx_permitted();

extern const Ops ops_generic, ops_v3, ops_v4, ops_v4bf16, ops_amx;
