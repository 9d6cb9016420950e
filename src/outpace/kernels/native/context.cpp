#include "context.h"

#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <new>

Buffer::~Buffer() { free(data); }

bool Buffer::reserve(size_t bytes) {
    if (bytes <= held) return true;
    free(data);
    held = 0;
    size_t rounded = (bytes + 4095) / 4096 * 4096;
    data = (char *)aligned_alloc(4096, rounded);
    if (data) held = rounded;
    return data != nullptr;
}

static int64_t line_floats(int64_t floats) { return (floats + 15) / 16 * 16; }

bool Context::reserve_scratch(int64_t floats) {
    scratch_bytes = sizeof(float) * line_floats(floats);
    return scratches.reserve(pool.threads() * scratch_bytes);
}

// The input of any matrix of so many columns, whatever its format.
bool Context::reserve_encoded(int64_t rows, int64_t cols) {
    int64_t blocks = (rows + BLOCK - 1) / BLOCK * BLOCK;
    int64_t bytes = 0;
    for (int format : {F32, BF16, Q8_0}) bytes = std::max(bytes, ops->encoded_bytes(format, blocks, cols));
    if (!encoded_buffer.reserve(bytes)) return false;
    encoded = encoded_buffer.data;
    return true;
}

bool Context::prepare_product(const Matrix *w, int64_t rows) {
    return reserve_encoded(rows, w->cols) && reserve_scratch(rows * MAX_CHUNK_ROWS);
}

bool Context::prepare(const Model *m, const Pass *pass) {
    int64_t rows = pass->rows, attention = (int64_t)m->heads * m->head_dim;
    int64_t widths[] = {m->hidden, m->hidden, (m->heads + 2 * m->kv_heads) * (int64_t)m->head_dim, attention, m->ffn};
    float **starts[] = {&x, &normed, &qkv, &attended, &inner};
    int64_t floats = 0, keys = 0;
    for (int64_t width : widths) floats += line_floats(rows * width);
    for (int i = 0; i < pass->sequences; i++)
        keys = std::max<int64_t>(keys, pass->sequence[i].first + pass->sequence[i].count);
    int64_t widest = std::max<int64_t>({m->hidden, attention, m->ffn});
    int64_t work = std::max(rows * 2 * MAX_CHUNK_ROWS, keys * (m->heads / m->kv_heads));
    own_bytes = sizeof(int32_t) * line_floats(rows);
    size_t threads = pool.threads();
    if (!rows_buffer.reserve(sizeof(float) * floats) || !reserve_encoded(rows, widest) ||
        !places_buffer.reserve(sizeof(RowPlace) * rows) || !reserve_scratch(work) ||
        !candidates_buffer.reserve(sizeof(Candidate) * rows * threads) || !owns.reserve(threads * own_bytes))
        return false;
    float *at = (float *)rows_buffer.data;
    for (int i = 0; i < 5; i++) {
        *starts[i] = at;
        at += line_floats(rows * widths[i]);
    }
    places = (RowPlace *)places_buffer.data;
    candidates = (Candidate *)candidates_buffer.data;
    RowPlace *place = places;
    for (int i = 0; i < pass->sequences; i++)
        for (int row = 0; row < pass->sequence[i].count; row++) *place++ = {i, row};
    return true;
}

namespace {

struct Candidate {
    const Ops *ops;
    bool runs;
};

// Best first.
const Candidate *candidates(int *count) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    static const Candidate found[] = {
#ifndef NO_OPS_AMX
                                      {&ops_amx, v4 && amx_permitted()},
#endif
#ifndef NO_OPS_V4BF16
                                      {&ops_v4bf16, v4 && __builtin_cpu_supports("avx512bf16")},
#endif
                                      {&ops_v4, v4},
                                      {&ops_v3, v3},
                                      {&ops_generic, true}};
#else
    static const Candidate found[] = {{&ops_generic, true}};
#endif
    *count = sizeof(found) / sizeof(found[0]);
    return found;
}

struct QuantiseCall {
    Context *ctx;
    const Matrix *from;
    int format;
    uint8_t *to;
};

void quantise_task(void *context, int64_t row, int thread) {
    const QuantiseCall *c = (const QuantiseCall *)context;
    const Matrix *m = c->from;
    float *x = c->ctx->scratch(thread);
    c->ctx->ops->read_row(m->format, (const char *)m->data + row * row_bytes(m->format, m->cols), m->cols, x);
    c->ctx->ops->quantise_row(c->format, x, m->cols, c->to + row * row_bytes(c->format, m->cols));
}

struct MeasureCall {
    Context *ctx;
    const char *from;
    char *to;
    int64_t bytes;
    int format;
    std::atomic<uint64_t> sum{0};
    std::atomic<int64_t> done{0};

    int64_t left(int64_t task) const { return std::min<int64_t>(MEASURE_BYTES, bytes - task * MEASURE_BYTES); }
    int64_t tasks() const { return (bytes + MEASURE_BYTES - 1) / MEASURE_BYTES; }
};

void read_task(void *context, int64_t index, int) {
    MeasureCall *c = (MeasureCall *)context;
    const char *from = c->from + index * MEASURE_BYTES;
    c->sum += c->ctx->ops->measure_read((const uint64_t *)from, c->left(index) / (int64_t)sizeof(uint64_t));
}

void copy_task(void *context, int64_t index, int) {
    const MeasureCall *c = (const MeasureCall *)context;
    memcpy(c->to + index * MEASURE_BYTES, c->from + index * MEASURE_BYTES, c->left(index));
}

void multiply_task(void *context, int64_t, int) {
    MeasureCall *c = (MeasureCall *)context;
    c->done += (int64_t)c->ctx->ops->measure_multiply(c->format, MEASURE_ROUNDS);
}

}  // namespace

Context *outpace_open(int threads, const char *isa) {
    int count;
    const Candidate *all = candidates(&count);
    for (int i = 0; i < count; i++)
        if (all[i].runs && (!isa || !strcmp(isa, all[i].ops->name))) return new (std::nothrow) Context(threads, all[i].ops);
    return nullptr;
}

void outpace_close(Context *ctx) { delete ctx; }

const char *outpace_isa(const Context *ctx) { return ctx->ops->name; }

const char *outpace_isas(void) {
    static char names[128];
    int count;
    const Candidate *all = candidates(&count);
    names[0] = 0;
    for (int i = 0; i < count; i++)
        if (all[i].runs) {
            if (names[0]) strcat(names, " ");
            strcat(names, all[i].ops->name);
        }
    return names;
}

int outpace_quantise(Context *ctx, const Matrix *from, int format, void *to) {
    if (!ctx->reserve_scratch(from->cols)) return 1;
    QuantiseCall call = {ctx, from, format, (uint8_t *)to};
    ctx->pool.run(from->rows, quantise_task, &call);
    return 0;
}

uint64_t outpace_measure_read(Context *ctx, const void *data, int64_t bytes) {
    MeasureCall call = {ctx, (const char *)data, nullptr, bytes, F32};
    ctx->pool.run(call.tasks(), read_task, &call);
    return call.sum;
}

void outpace_measure_copy(Context *ctx, void *to, const void *from, int64_t bytes) {
    MeasureCall call = {ctx, (const char *)from, (char *)to, bytes, F32};
    ctx->pool.run(call.tasks(), copy_task, &call);
}

int64_t outpace_measure_multiply(Context *ctx, int format, int64_t tasks) {
    MeasureCall call = {ctx, nullptr, nullptr, 0, format};
    ctx->pool.run(tasks, multiply_task, &call);
    return call.done;
}
