// What a forward pass works in: threads, an instruction set, and buffers that grow with the largest pass.
#pragma once
#include <stddef.h>

#include "ops.h"
#include "pool.h"

class Buffer {
  public:
    ~Buffer();
    bool reserve(size_t bytes);
    char *data = nullptr;

  private:
    size_t held = 0;
};

struct Context {
    struct RowPlace {
        int32_t sequence, row;  // which sequence of the pass, which of its rows
    };

    struct Candidate {
        float value;
        int64_t id;
    };

    Context(int threads, const Ops *ops) : pool(threads), ops(ops) {}
    // Size the buffers and find each row's sequence. False without memory.
    bool prepare(const Model *m, const Pass *pass);
    // The same for one product outside of a pass.
    bool prepare_product(const Matrix *w, int64_t rows);
    bool reserve_scratch(int64_t floats);
    float *scratch(int thread) { return (float *)(scratches.data + thread * scratch_bytes); }
    int32_t *own(int thread) { return (int32_t *)(owns.data + thread * own_bytes); }

    Pool pool;
    const Ops *ops;
    float *x, *normed, *qkv, *attended, *inner;  // [rows][...]
    char *encoded;                               // input of the next matrix
    RowPlace *places;                            // [rows]
    Candidate *candidates;                       // [threads][rows], see project_best

  private:
    bool reserve_encoded(int64_t rows, int64_t cols);

    Buffer rows_buffer, encoded_buffer, places_buffer, candidates_buffer, scratches, owns;
    size_t scratch_bytes = 0, own_bytes = 0;
};

// Largest number of outputs of one task, per activation row (see forward.cpp).
enum { MAX_CHUNK_ROWS = 128 };
// Sizes of the tasks of a measurement: long beside the taking of a task, and within what a float counts exactly.
enum { MEASURE_BYTES = 256 * 1024, MEASURE_ROUNDS = 1 << 16 };

extern "C" {
// threads >= 1; isa: a name from outpace_isas, or null for the best one of this machine. Null if it cannot run here.
Context *outpace_open(int threads, const char *isa);
void outpace_close(Context *ctx);
const char *outpace_isa(const Context *ctx);
// Names of the instruction sets that this machine can run, best first, separated by spaces.
const char *outpace_isas(void);
// 0 = done, 1 = out of memory.
int outpace_forward(Context *ctx, const Model *m, const Pass *pass);
// Format Q8_0 or Q4_0 from a float32 or bfloat16 matrix whose columns are a multiple of 32. As above.
int outpace_quantise(Context *ctx, const Matrix *from, int format, void *to);
// y [rows][w->rows] = x [rows][w->cols] w^T + bias, for tests and the bench.
int outpace_linear(Context *ctx, const Matrix *w, const float *x, int64_t rows, float *y);
// Sum of the 64-bit words at `data`, modulo 2^64. `bytes` is a multiple of 8.
uint64_t outpace_measure_read(Context *ctx, const void *data, int64_t bytes);
void outpace_measure_copy(Context *ctx, void *to, const void *from, int64_t bytes);
// Multiply-adds done by `tasks` tasks of MEASURE_ROUNDS rounds, in registers: of float32, or of bfloat16 where the
// instruction set has a unit for its dot products, else 0.
int64_t outpace_measure_multiply(Context *ctx, int format, int64_t tasks);
}
