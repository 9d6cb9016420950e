// x86-64-v4: AVX-512.
#define OPS ops_v4
#define OPS_NAME "avx512"
#define LANES 16
#define ROW_TILE 6
#define BLOCK_ROWS 6
#define DOT_BF16 0
#include "ops.inc"
