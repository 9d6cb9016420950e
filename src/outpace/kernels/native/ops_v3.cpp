// x86-64-v3: AVX2 and FMA.
#define OPS ops_v3
#define OPS_NAME "avx2"
#define LANES 8
#define ROW_TILE 3
#define BLOCK_ROWS 4
#define DOT_BF16 0
#include "ops.inc"
