// One forward pass of a decoder in one call: embedding, layers, output projection. Buffers live in the context and are
// reused; nothing is allocated per pass once they are large enough.
#include <math.h>
#include <string.h>

#include <algorithm>
#include "context.h"

namespace {

// Bytes of weights per task. What a task fetches ahead is lost at its end, so tasks are large; but each thread gets several.
enum { NARROW_ROWS = 16, NARROW_CHUNK = 192 << 10, WIDE_CHUNK = 256 << 10, CHUNKS_PER_THREAD = 8 };

// A matrix product cut into tasks: chunks of outputs, small enough to share and to stay in the second-level cache.
struct Product {
    Context *ctx;
    const Matrix *w;
    const void *x;
    int64_t rows, chunk;
    float *y;
    int64_t y_stride;
    bool add;  // to what y holds

    int64_t tasks() const { return (w->rows + chunk - 1) / chunk; }
};

int64_t chunk_rows(Context *ctx, const Matrix *w, int64_t rows) {
    int64_t bytes = row_bytes(w->format, w->cols), most = rows <= NARROW_ROWS ? NARROW_CHUNK : WIDE_CHUNK;
    int64_t chunk = std::min(most / bytes, w->rows / (CHUNKS_PER_THREAD * ctx->pool.threads())) / BLOCK * BLOCK;
    return std::min<int64_t>(std::max<int64_t>(chunk, BLOCK), MAX_CHUNK_ROWS);
}

Product product(Context *ctx, const Matrix *w, const void *x, int64_t rows, float *y, int64_t y_stride, bool add = false) {
    return {ctx, w, x, rows, chunk_rows(ctx, w, rows), y, y_stride, add};
}

void product_chunk(const Product *p, int64_t index, int thread) {
    int64_t first = index * p->chunk, last = std::min(first + p->chunk, p->w->rows);
    if (!p->add && !p->w->bias) {
        p->ctx->ops->linear(p->w, first, last, p->x, p->rows, p->y, p->y_stride);
        return;
    }
    float *part = p->ctx->scratch(thread);
    int64_t width = last - first;
    p->ctx->ops->linear(p->w, first, last, p->x, p->rows, part - first, width);
    for (int64_t r = 0; r < p->rows; r++)
        for (int64_t n = first; n < last; n++) {
            float value = part[r * width + n - first] + (p->w->bias ? p->w->bias[n] : 0.0f);
            float *at = p->y + r * p->y_stride + n;
            *at = p->add ? *at + value : value;
        }
}

// Several products of one list of tasks.
struct Products {
    Product part[3];
    int count;
};

void products_task(void *context, int64_t index, int thread) {
    const Products *all = (const Products *)context;
    for (int i = 0; i < all->count; i++) {
        int64_t tasks = all->part[i].tasks();
        if (index < tasks) return product_chunk(&all->part[i], index, thread);
        index -= tasks;
    }
}

void run(Context *ctx, const Products &all) {
    int64_t tasks = 0;
    for (int i = 0; i < all.count; i++) tasks += all.part[i].tasks();
    ctx->pool.run(tasks, products_task, (void *)&all);
}

// ---- rows in blocks ---------------------------------------------------------------------------------------------------

// Calls f(first, last) for blocks of rows: on this thread for a few rows, on all for many.
template <class F> void by_block(Context *ctx, int64_t rows, F f) {
    struct Call {
        F *f;
        int64_t rows;
    } call = {&f, rows};
    auto task = [](void *context, int64_t index, int) {
        Call *c = (Call *)context;
        (*c->f)(index * BLOCK, std::min<int64_t>((index + 1) * BLOCK, c->rows));
    };
    ctx->pool.run((rows + BLOCK - 1) / BLOCK, task, &call);
}

void encode(Context *ctx, const Matrix *w, const float *x, int64_t rows) {
    by_block(ctx, rows, [=](int64_t first, int64_t last) {
        char *out = ctx->encoded + ctx->ops->encoded_bytes(w->format, first, w->cols);
        ctx->ops->encode(w->format, x + first * w->cols, last - first, w->cols, out);
    });
}

void norm_encode(Context *ctx, const Model *m, const float *weight, const Matrix *w, int64_t rows) {
    by_block(ctx, rows, [=](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; r++)
            ctx->ops->rms_norm(ctx->x + r * m->hidden, weight, m->norm_eps, m->hidden, ctx->normed + r * m->hidden);
        char *out = ctx->encoded + ctx->ops->encoded_bytes(w->format, first, w->cols);
        ctx->ops->encode(w->format, ctx->normed + first * m->hidden, last - first, w->cols, out);
    });
}

// x += post(y): the end of attention and MLP where a norm stands between them and the residual stream.
void add_normed(Context *ctx, const Model *m, const float *weight, int64_t rows) {
    by_block(ctx, rows, [=](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; r++) {
            float *x = ctx->x + r * m->hidden, *y = ctx->normed + r * m->hidden;
            ctx->ops->rms_norm(y, weight, m->norm_eps, m->hidden, y);
            for (int64_t i = 0; i < m->hidden; i++) x[i] += y[i];
        }
    });
}

// Output of a sublayer into the residual stream, through its post-norm where there is one.
void residual(Context *ctx, const Model *m, const Matrix *w, const float *post_norm, int64_t rows) {
    if (!post_norm) {
        run(ctx, {{product(ctx, w, ctx->encoded, rows, ctx->x, m->hidden, true)}, 1});
        return;
    }
    run(ctx, {{product(ctx, w, ctx->encoded, rows, ctx->normed, m->hidden)}, 1});
    add_normed(ctx, m, post_norm, rows);
}

// ---- attention --------------------------------------------------------------------------------------------------------

struct Attention {
    Context *ctx;
    const Model *m;
    const Layer *layer;
    const Pass *pass;
    int32_t index;
};

char *key_at(const Attention *a, const SequenceRows *s, int head, int64_t row, bool value) {
    int64_t itemsize = a->m->kv_format == BF16 ? 2 : 4;
    return s->kv + a->index * s->layer_stride + (value ? s->value_stride : 0) + head * s->head_stride + row * a->m->head_dim * itemsize;
}

// Per-head norms and rotation of one row's queries and keys; keys and values go to the store.
void place_row(const Attention *a, int64_t row) {
    const Model *m = a->m;
    const Ops *ops = a->ctx->ops;
    const Context::RowPlace &place = a->ctx->places[row];
    int64_t dim = m->head_dim, half = dim / 2, position = a->pass->position[row];
    float *q = a->ctx->qkv + row * (m->heads + 2 * m->kv_heads) * dim;
    for (int h = 0; h < m->heads + m->kv_heads; h++) {
        float *head = q + h * dim;
        const float *norm = h < m->heads ? a->layer->q_norm : a->layer->k_norm;
        if (norm) ops->rms_norm(head, norm, m->norm_eps, dim, head);
        ops->rotate(head, a->layer->cos + position * half, a->layer->sin + position * half, half);
        if (h < m->heads)
            for (int64_t i = 0; i < dim; i++) head[i] *= m->attn_scale;
    }
    const SequenceRows *s = a->pass->sequence + place.sequence;
    for (int g = 0; g < m->kv_heads; g++) {
        float *k = q + (m->heads + g) * dim, *v = k + m->kv_heads * dim;
        ops->write_row(m->kv_format, k, dim, key_at(a, s, g, s->first + place.row, false));
        ops->write_row(m->kv_format, v, dim, key_at(a, s, g, s->first + place.row, true));
    }
}

// Ancestors of a tree's row in this pass and the row itself. A node's position is its depth, so an ancestor may lie
// before the window.
const int32_t *own_rows(const Attention *a, const SequenceRows *s, int64_t row, int32_t *own, int32_t *count) {
    int32_t at = a->ctx->places[row].row, window = a->layer->window;
    const int32_t *position = a->pass->position + row - at;
    const uint8_t *sees = s->visible + (int64_t)at * s->count;
    for (int32_t i = 0; i <= at; i++)
        if (sees[i] && (!window || position[at] - position[i] < window)) own[(*count)++] = i;
    return own;
}

// One row, one key-value head.
void attend_task(void *context, int64_t index, int thread) {
    const Attention *a = (const Attention *)context;
    const Model *m = a->m;
    int64_t row = index / m->kv_heads, dim = m->head_dim, group = m->heads / m->kv_heads;
    int g = (int)(index % m->kv_heads);
    const Context::RowPlace &place = a->ctx->places[row];
    const SequenceRows *s = a->pass->sequence + place.sequence;
    int32_t position = a->pass->position[row], window = a->layer->window;
    AttendArgs args = {};
    args.q = a->ctx->qkv + (row * (m->heads + 2 * m->kv_heads) + g * group) * dim;
    args.keys = key_at(a, s, g, 0, false);
    args.values = key_at(a, s, g, 0, true);
    args.scores = a->ctx->scratch(thread);
    args.out = a->ctx->attended + (row * m->heads + g * group) * dim;
    args.group = (int32_t)group;
    args.head_dim = (int32_t)dim;
    args.format = m->kv_format;
    args.first = window ? std::max(0, position - window + 1) : 0;
    if (!s->visible) {  // a chain: the rows of this pass are simply the last keys
        args.past = s->first + place.row + 1;
        args.keys_seen = args.past - args.first;
    } else {
        args.past = s->first;
        args.first = std::min(args.first, args.past);
        args.own = own_rows(a, s, row, a->ctx->own(thread), &args.keys_seen);
        args.keys_seen += args.past - args.first;
    }
    a->ctx->ops->attend(&args);
}

void attention(Context *ctx, const Model *m, const Pass *pass, int32_t index) {
    const Layer *layer = m->layer + index;
    int64_t dim = m->head_dim, q = m->heads * dim, kv = m->kv_heads * dim, width = q + 2 * kv;
    norm_encode(ctx, m, layer->attn_norm, &layer->q, pass->rows);
    run(ctx, {{product(ctx, &layer->q, ctx->encoded, pass->rows, ctx->qkv, width),
               product(ctx, &layer->k, ctx->encoded, pass->rows, ctx->qkv + q, width),
               product(ctx, &layer->v, ctx->encoded, pass->rows, ctx->qkv + q + kv, width)},
              3});
    Attention a = {ctx, m, layer, pass, index};
    by_block(ctx, pass->rows, [&a](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; row++) place_row(&a, row);
    });
    ctx->pool.run((int64_t)pass->rows * m->kv_heads, attend_task, &a);
    encode(ctx, &layer->o, ctx->attended, pass->rows);
    residual(ctx, m, &layer->o, layer->post_attn_norm, pass->rows);
}

// ---- gated MLP --------------------------------------------------------------------------------------------------------

struct Gated {
    Context *ctx;
    const Model *m;
    const Layer *layer;
    int64_t rows, chunk;
};

void gated_task(void *context, int64_t index, int thread) {
    const Gated *g = (const Gated *)context;
    int64_t first = index * g->chunk, last = std::min(first + g->chunk, g->layer->gate.rows), width = last - first;
    float *gates = g->ctx->scratch(thread), *ups = gates + g->rows * width;
    g->ctx->ops->linear(&g->layer->gate, first, last, g->ctx->encoded, g->rows, gates - first, width);
    g->ctx->ops->linear(&g->layer->up, first, last, g->ctx->encoded, g->rows, ups - first, width);
    for (int64_t r = 0; r < g->rows; r++)
        g->ctx->ops->gate(g->m->activation, gates + r * width, ups + r * width, width, g->ctx->inner + r * g->m->ffn + first);
}

void mlp(Context *ctx, const Model *m, const Layer *layer, int64_t rows) {
    norm_encode(ctx, m, layer->mlp_norm, &layer->gate, rows);
    Gated g = {ctx, m, layer, rows, chunk_rows(ctx, &layer->gate, rows)};
    ctx->pool.run((layer->gate.rows + g.chunk - 1) / g.chunk, gated_task, &g);
    encode(ctx, &layer->down, ctx->inner, rows);
    residual(ctx, m, &layer->down, layer->post_mlp_norm, rows);
}

// ---- ends -------------------------------------------------------------------------------------------------------------

void embed(Context *ctx, const Model *m, const Pass *pass) {
    int64_t bytes = row_bytes(m->embed.format, m->hidden);
    for (int64_t r = 0; r < pass->rows; r++) {
        float *x = ctx->x + r * m->hidden;
        ctx->ops->read_row(m->embed.format, (const char *)m->embed.data + pass->token[r] * bytes, m->hidden, x);
        if (m->embed_scale != 1.0f)
            for (int64_t i = 0; i < m->hidden; i++) x[i] *= m->embed_scale;
    }
}

void keep_features(Context *ctx, const Model *m, const Pass *pass, int32_t layer) {
    for (int32_t f = 0; f < pass->feature_layers; f++) {
        if (pass->feature_layer[f] != layer) continue;
        for (int64_t r = 0; r < pass->rows; r++) {
            float *out = pass->features + (r * pass->feature_layers + f) * m->hidden;
            const float *x = ctx->x + r * m->hidden;
            if (layer < m->layers) memcpy(out, x, m->hidden * sizeof(float));
            else ctx->ops->rms_norm(x, m->final_norm, m->norm_eps, m->hidden, out);
        }
    }
}

// The output projection of which only each row's largest entry is kept: each thread has the best of its tasks.
struct Best {
    Product head;
    int64_t below;
    Context::Candidate *found;  // [threads][rows]
};

void best_task(void *context, int64_t index, int thread) {
    const Best *b = (const Best *)context;
    const Product &p = b->head;
    int64_t first = index * p.chunk, last = std::min(first + p.chunk, b->below), width = last - first;
    float *part = p.ctx->scratch(thread);
    p.ctx->ops->linear(p.w, first, last, p.x, p.rows, part - first, width);
    for (int64_t r = 0; r < p.rows; r++) {
        const float *row = part + r * width;
        Context::Candidate *found = b->found + thread * p.rows + r;
        float value = p.ctx->ops->largest(row, width);
        if (value < found->value || (value == found->value && first > found->id)) continue;
        *found = {value, first + (std::find(row, row + width, value) - row)};
    }
}

void project_best(Context *ctx, const Model *m, const Pass *pass) {
    Best b = {product(ctx, &m->head, ctx->encoded, pass->logit_rows, nullptr, 0), pass->best_below, ctx->candidates};
    int64_t rows = pass->logit_rows, threads = ctx->pool.threads();
    std::fill_n(b.found, threads * rows, Context::Candidate{-INFINITY, m->head.rows});
    ctx->pool.run((b.below + b.head.chunk - 1) / b.head.chunk, best_task, &b);
    for (int64_t r = 0; r < rows; r++) {
        Context::Candidate best = b.found[r];
        for (int64_t t = 1; t < threads; t++) {
            const Context::Candidate &other = b.found[t * rows + r];
            if (other.value > best.value || (other.value == best.value && other.id < best.id)) best = other;
        }
        pass->best[r] = best.value == -INFINITY ? 0 : best.id;
    }
}

void project(Context *ctx, const Model *m, const Pass *pass) {
    for (int64_t i = 0; i < pass->logit_rows; i++)
        ctx->ops->rms_norm(ctx->x + pass->logit_row[i] * m->hidden, m->final_norm, m->norm_eps, m->hidden, ctx->normed + i * m->hidden);
    encode(ctx, &m->head, ctx->normed, pass->logit_rows);
    if (pass->best) return project_best(ctx, m, pass);
    run(ctx, {{product(ctx, &m->head, ctx->encoded, pass->logit_rows, pass->logits, m->head.rows)}, 1});
}

}  // namespace

int outpace_forward(Context *ctx, const Model *m, const Pass *pass) {
    if (!ctx->prepare(m, pass)) return 1;
    embed(ctx, m, pass);
    for (int32_t i = 0; i < m->layers; i++) {
        attention(ctx, m, pass, i);
        mlp(ctx, m, m->layer + i, pass->rows);
        keep_features(ctx, m, pass, i);
    }
    keep_features(ctx, m, pass, m->layers);
    if (pass->logit_rows) project(ctx, m, pass);
    return 0;
}

int outpace_linear(Context *ctx, const Matrix *w, const float *x, int64_t rows, float *y) {
    if (!ctx->prepare_product(w, rows)) return 1;
    encode(ctx, w, x, rows);
    run(ctx, {{product(ctx, w, ctx->encoded, rows, y, w->rows)}, 1});
    return 0;
}
