// AVX-512 with bfloat16 dot products (Zen 4, Cooper Lake, Sapphire Rapids and later).
#define OPS ops_v4bf16
#define OPS_NAME "avx512_bf16"
#define LANES 16
#define ROW_TILE 6
#define BLOCK_ROWS 6
#define DOT_BF16 1
#include "ops.inc"
