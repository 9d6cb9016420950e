// Any machine: four floats per vector (SSE2, NEON).
#define OPS ops_generic
#define OPS_NAME "generic"
#define LANES 4
#define ROW_TILE 2
#define BLOCK_ROWS 2
#define DOT_BF16 0
#include "ops.inc"
