// Paged attention over a block-major pool: store this step's K and V, then attend over the block table in place.
//
//   abi.h      what Python passes          tile.h     the arithmetic of a row (read its rules first)
//   simd.h     vectors of floats           paged.h    one sequence and kv head, tile by tile
//   workers.h  threads                     attend.h   a step: storing, dealing out the work

#include "attend.h"

EXPORT int baton_attend(const Layer* layer, const Batch* batch, const Rows* rows, int threads) {
    return attend(*layer, *batch, *rows, threads);
}

// The kernel's own elementary functions, in place, for tests of their accuracy.
EXPORT void baton_exp2(float* x, int64_t count) {
    for (int64_t i = 0; i < count; i++) x[i] = exp2_nonpositive(x[i]);
}
EXPORT void baton_tanh(float* x, int64_t count) {
    for (int64_t i = 0; i < count; i++) x[i] = tanh(splat(x[i]))[0];
}
