// The C interface: what Python describes with ctypes (kernels/native.py mirrors every struct).
//
// Weights stay where the checkpoint put them, row-major [rows][cols], read in place. Activations are float32 here and are
// rounded to the weights' precision when they enter a matrix. A row's results depend on that row alone: not on how many
// rows share the call, not on the number of threads.
#pragma once
#include <stdint.h>

// The numbers of GGUF's block formats are ggml's own.
enum Format { F32 = 0, BF16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14 };

static inline int64_t row_bytes(int format, int64_t cols) {
    switch (format) {
        case BF16: return cols * 2;
        case Q4_0: return cols / 32 * 18;
        case Q4_1: return cols / 32 * 20;
        case Q5_0: return cols / 32 * 22;
        case Q8_0: return cols / 32 * 34;
        case Q4_K: return cols / 256 * 144;
        case Q5_K: return cols / 256 * 176;
        case Q6_K: return cols / 256 * 210;
        default: return cols * 4;
    }
}

enum Activation { SILU = 0, GELU_TANH = 1 };

struct Matrix {
    const void *data;   // [rows][cols] in `format`
    const float *bias;  // [rows] or null
    int64_t rows, cols;
    int32_t format, unused;
};

struct Layer {
    Matrix q, k, v, o, gate, up, down;
    const float *attn_norm, *mlp_norm;                // [hidden]
    const float *q_norm, *k_norm;                     // [head_dim] or null
    const float *post_attn_norm, *post_mlp_norm;      // [hidden] or null
    const float *cos, *sin;                           // [positions][head_dim / 2]
    int32_t window, unused;                           // positions a row sees, itself included; 0 = all
};

struct Model {
    int32_t layers, hidden, heads, kv_heads, head_dim, ffn, activation, kv_format;
    float norm_eps, attn_scale, embed_scale, unused;
    Matrix embed, head;
    const float *final_norm;
    const Layer *layer;
};

// The rows of one sequence. Its keys and values lie at
//   kv + layer * layer_stride + (value ? value_stride : 0) + kv_head * head_stride + row * head_dim * itemsize   (bytes)
struct SequenceRows {
    char *kv;
    int64_t layer_stride, value_stride, head_stride;
    const uint8_t *visible;  // [count][count], row i sees row j of this pass; null: every row up to itself
    int32_t first, count;    // KV row of the first, number of rows
};

struct Pass {
    const SequenceRows *sequence;
    const int32_t *token, *position;  // [rows]
    const int32_t *logit_row;         // [logit_rows], indices of rows
    const int32_t *feature_layer;     // [feature_layers], see models/native_decoder.py
    float *logits;                    // [logit_rows][vocabulary], not written where `best` is not null
    int64_t *best;                    // [logit_rows] or null: the lowest id among the largest logits of ids below `best_below`
    float *features;                  // [rows][feature_layers * hidden]
    int32_t sequences, rows, logit_rows, feature_layers, best_below, unused;
};
