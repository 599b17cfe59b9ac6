// Linear layers with packed weights, for Python: see linear.h.

#include "abi.h"
#include "linear.h"

// Returns 0, or 1 when there was no memory for scratch.
EXPORT int baton_linear(const Linear* w, const float* x, int64_t x_stride, float* y, int64_t y_stride, int rows, int add,
                        int threads) {
    return linear(*w, x, x_stride, y, y_stride, rows, add != 0, threads) ? 0 : 1;
}

EXPORT void baton_weight_row(const Linear* w, int row, float* out) { weight_row(*w, row, out); }
