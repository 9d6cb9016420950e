// AVX-512 plus the AMX matrix unit for bfloat16 weights (Sapphire Rapids and later).
//
// One tile product adds 16 weight rows x 32 columns times 32 columns x 16 activation rows to 16 x 16 sums, each in the
// order of its columns, so one activation row costs what sixteen cost and gets the same bits. Weights are loaded as they
// lie; activations are encoded as the unit wants its second operand: pairs of columns, 16 rows side by side.
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#define LANES 16
#define ROW_TILE 6
#define BLOCK_ROWS 6
#define DOT_BF16 0
#include "ops.inc"

namespace {

enum { SIDE = 16, DEPTH = 32 };

// Tile registers: the intrinsics want literals.
#define SUM0 0
#define SUM1 1
#define SUM2 2
#define SUM3 3
#define W0 4
#define W1 5
#define X0 6
#define X1 7

// Intel SDM volume 1, table 18-1: palette 1; every tile 16 rows of 64 bytes.
struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

int64_t encoded_bytes_amx(int format, int64_t rows, int64_t cols) {
    if (format != BF16) return encoded_bytes(format, rows, cols);
    return (rows + SIDE - 1) / SIDE * SIDE * padded(cols) * (int64_t)sizeof(uint16_t);
}

// Blocks of 16 rows: [column pair][row][2].
void encode_amx(int format, const float *x, int64_t rows, int64_t cols, void *out) {
    if (format != BF16) return encode(format, x, rows, cols, out);
    int64_t pairs = padded(cols) / 2;
    for (int64_t first = 0; first < rows; first += SIDE) {
        uint32_t *block = (uint32_t *)out + first * pairs;
        int64_t count = rows - first < SIDE ? rows - first : SIDE;
        if (count < SIDE || 2 * pairs > cols) memset(block, 0, pairs * SIDE * sizeof(uint32_t));
        for (int64_t r = 0; r < count; r++) {
            const float *row = x + (first + r) * cols;
            for (int64_t k = 0; k < cols; k += LANES) {
                uint16_t part[LANES] = {};
                write_row(BF16, row + k, cols - k < LANES ? cols - k : (int64_t)LANES, part);
                for (int64_t i = 0; i < LANES / 2 && k / 2 + i < pairs; i++)
                    memcpy(block + (k / 2 + i) * SIDE + r, part + 2 * i, sizeof(uint32_t));
            }
        }
    }
}

struct Source {
    const void *data;
    int64_t stride;
};

// 16 weight rows x 32 columns. At the edges of the matrix they are completed with zeros in `part`.
inline Source weights(const uint16_t *w, int64_t cols, int64_t rows, int64_t k, uint16_t *part) {
    if (rows >= SIDE && k + DEPTH <= cols) return {w + k, cols * (int64_t)sizeof(uint16_t)};
    memset(part, 0, SIDE * DEPTH * sizeof(uint16_t));
    int64_t left = cols - k < DEPTH ? cols - k : (int64_t)DEPTH;
    for (int64_t r = 0; r < rows && r < SIDE; r++) memcpy(part + r * DEPTH, w + r * cols + k, left * sizeof(uint16_t));
    return {part, DEPTH * (int64_t)sizeof(uint16_t)};
}

inline void write_sums(const float (*sums)[SIDE], int64_t n, int64_t m, float *y, int64_t ys) {
    for (int64_t j = 0; j < m && j < SIDE; j++)
        for (int64_t i = 0; i < n && i < SIDE; i++) y[j * ys + i] = sums[i][j];
}

struct Strip {
    const uint16_t *w;  // first of `n` weight rows
    int64_t cols, n;
    const uint32_t *x;  // first of the blocks of activation rows
    int64_t m;
    float *y;
    int64_t ys;
};

// Up to 16 weight rows, up to 16 activation rows. The next 16 weight rows are fetched meanwhile.
void narrow(const Strip &s) {
    alignas(64) uint16_t part[SIDE * DEPTH];
    alignas(64) float sums[SIDE][SIDE];
    _tile_zero(SUM0);
    for (int64_t k = 0; k < s.cols; k += DEPTH) {
        const uint16_t *next = s.w + SIDE * s.cols + k;
        for (int r = 0; r < SIDE; r++) _mm_prefetch((const char *)(next + r * s.cols), _MM_HINT_T1);
        Source a = weights(s.w, s.cols, s.n, k, part);
        _tile_loadd(W0, a.data, a.stride);
        _tile_loadd(X0, s.x + k / 2 * SIDE, 64);
        _tile_dpbf16ps(SUM0, W0, X0);
    }
    _tile_stored(SUM0, sums, sizeof(sums[0]));
    write_sums(sums, s.n, s.m, s.y, s.ys);
}

// Up to 32 x 32: four products for four loads.
void wide(const Strip &s) {
    alignas(64) uint16_t part[2][SIDE * DEPTH];
    alignas(64) float sums[4][SIDE][SIDE];
    int64_t below = padded(s.cols) / 2 * SIDE;  // from one block of activation rows to the next
    _tile_zero(SUM0);
    _tile_zero(SUM1);
    _tile_zero(SUM2);
    _tile_zero(SUM3);
    for (int64_t k = 0; k < s.cols; k += DEPTH) {
        Source a = weights(s.w, s.cols, s.n, k, part[0]);
        Source b = weights(s.w + SIDE * s.cols, s.cols, s.n - SIDE, k, part[1]);
        _tile_loadd(W0, a.data, a.stride);
        _tile_loadd(W1, b.data, b.stride);
        _tile_loadd(X0, s.x + k / 2 * SIDE, 64);
        _tile_loadd(X1, s.x + below + k / 2 * SIDE, 64);
        _tile_dpbf16ps(SUM0, W0, X0);
        _tile_dpbf16ps(SUM1, W0, X1);
        _tile_dpbf16ps(SUM2, W1, X0);
        _tile_dpbf16ps(SUM3, W1, X1);
    }
    _tile_stored(SUM0, sums[0], sizeof(sums[0][0]));
    _tile_stored(SUM1, sums[1], sizeof(sums[0][0]));
    _tile_stored(SUM2, sums[2], sizeof(sums[0][0]));
    _tile_stored(SUM3, sums[3], sizeof(sums[0][0]));
    write_sums(sums[0], s.n, s.m, s.y, s.ys);
    write_sums(sums[1], s.n, s.m - SIDE, s.y + SIDE * s.ys, s.ys);
    write_sums(sums[2], s.n - SIDE, s.m, s.y + SIDE, s.ys);
    write_sums(sums[3], s.n - SIDE, s.m - SIDE, s.y + SIDE * s.ys + SIDE, s.ys);
}

void linear_amx(const Matrix *w, int64_t first, int64_t last, const void *x, int64_t rows, float *y, int64_t ys) {
    if (w->format != BF16) return linear(w, first, last, x, rows, y, ys);
    TileConfig config;
    _tile_loadconfig(&config);
    int64_t pairs = padded(w->cols) / 2, step = rows > SIDE ? 2 * SIDE : SIDE;
    for (int64_t n = first; n < last; n += step)
        for (int64_t row = 0; row < rows; row += step) {
            Strip s = {(const uint16_t *)w->data + n * w->cols, w->cols, last - n, (const uint32_t *)x + row * pairs, rows - row,
                       y + row * ys + n, ys};
            // The second block of either side may not exist: then there is nothing behind the first to read.
            if (s.n > SIDE && s.m > SIDE) wide(s);
            else
                for (int64_t i = 0; i < s.n && i < step; i += SIDE)
                    for (int64_t j = 0; j < s.m && j < step; j += SIDE)
                        narrow({s.w + i * s.cols, s.cols, s.n - i, s.x + j * pairs, s.m - j, s.y + j * ys + i, ys});
        }
    _tile_release();
}

// As measure_multiply: a product of tiles is 32 multiply-adds for each of 256 sums.
double measure_multiply_amx(int format, int64_t rounds) {
    if (format != BF16) return measure_multiply(format, rounds);
    TileConfig config;
    alignas(64) uint16_t ones[SIDE * DEPTH];
    alignas(64) float sums[4 * SIDE * SIDE];
    for (uint16_t &one : ones) one = 0x3f80;
    asm volatile("" ::: "memory");  // the intrinsics do not say that they read it
    _tile_loadconfig(&config);
    _tile_loadd(W0, ones, 64);
    _tile_loadd(X0, ones, 64);
    _tile_zero(SUM0);
    _tile_zero(SUM1);
    _tile_zero(SUM2);
    _tile_zero(SUM3);
    for (int64_t n = 0; n < rounds; n++) {
        _tile_dpbf16ps(SUM0, W0, X0);
        _tile_dpbf16ps(SUM1, W0, X0);
        _tile_dpbf16ps(SUM2, W0, X0);
        _tile_dpbf16ps(SUM3, W0, X0);
    }
    _tile_stored(SUM0, sums + 0 * SIDE * SIDE, SIDE * sizeof(float));
    _tile_stored(SUM1, sums + 1 * SIDE * SIDE, SIDE * sizeof(float));
    _tile_stored(SUM2, sums + 2 * SIDE * SIDE, SIDE * sizeof(float));
    _tile_stored(SUM3, sums + 3 * SIDE * SIDE, SIDE * sizeof(float));
    _tile_release();
    double done = 0;
    for (float sum : sums) done += sum;
    return done;
}

}  // namespace

// Linux keeps the tile registers from processes that did not ask: arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA).
bool amx_permitted() {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    const unsigned bf16 = 1u << 22, tile = 1u << 24;
    return (d & bf16) && (d & tile) && syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}

extern const Ops ops_amx = {"amx_bf16", encoded_bytes_amx, encode_amx, linear_amx, read_row, write_row, quantise_row, rms_norm, rotate, gate, attend,
                            measure_read, measure_multiply_amx};
