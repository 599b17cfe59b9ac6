// Products with weights of fp32, or of bf16 computed as fp32.
//
// A tile is 16 outputs, packed [k][16]. Each output of a row is one chain of fma over k = 0, 1, .. in a lane of its
// own, from 0; partial sums that wait in memory between two runs of k change no bit of it. Rows come in panels of
// at most kPanelRows, packed [k][rows of the panel].

#pragma once

#include "arena.h"
#include "simd.h"

namespace {

constexpr int kOutputs = 16;                   // of a tile
constexpr int kVectors = kOutputs / kWidth;    // that hold them
constexpr int kFewChains = 8;                  // fma that must be in flight to keep two pipes of latency 4 busy
constexpr int kFetchAhead = 2048;              // bytes between what is read and what is fetched

// Rows of a panel: their sums, a row of weights and a broadcast stay in registers.
#if BATON_WIDTH == 16
constexpr int kPanelRows = 12;
#elif BATON_WIDTH == 8 || defined(__aarch64__)
constexpr int kPanelRows = 6;
#else
constexpr int kPanelRows = 2;
#endif

INLINE void fetch(const void* p) { __builtin_prefetch((const char*)p + kFetchAhead); }

// sums[T][R][16] of T tiles over `count` steps of k, from 0 or, where `resume`, from what sums holds.
// `Stream`: the weights come from memory, once.
template <int R, int T, bool Stream, class Weight>
NOINLINE void float_sums(const Weight* w, int64_t tile_stride, const float* x, int count, bool resume, float* sums) {
    vf acc[T][R][kVectors];
    for (int t = 0; t < T; t++)
        for (int r = 0; r < R; r++)
            for (int j = 0; j < kVectors; j++)
                acc[t][r][j] = resume ? load(sums + (t * R + r) * kOutputs + j * kWidth) : splat(0.0f);
    for (int k = 0; k < count; k++, w += kOutputs, x += R)
        for (int t = 0; t < T; t++) {
            const Weight* row = w + t * tile_stride;
            if (Stream) fetch(row);
            vf weight[kVectors];
            for (int j = 0; j < kVectors; j++) weight[j] = held(load(row + j * kWidth));
            for (int r = 0; r < R; r++) {
                vf value = splat(x[r]);
                for (int j = 0; j < kVectors; j++) acc[t][r][j] = fma(weight[j], value, acc[t][r][j]);
            }
        }
    for (int t = 0; t < T; t++)
        for (int r = 0; r < R; r++)
            for (int j = 0; j < kVectors; j++) store(sums + (t * R + r) * kOutputs + j * kWidth, acc[t][r][j]);
}

// out[k][rows] = x[row][k]
inline void pack_floats(const float* x, int64_t stride, int rows, int k, float* out) {
    if (rows == 1) {
        memcpy(out, x, k * sizeof(float));
        return;
    }
    for (int i = 0; i < k; i++, out += rows)
        for (int r = 0; r < rows; r++) out[r] = x[r * stride + i];
}

inline void widen(const bf16* from, int64_t count, float* to) {
    for (int64_t i = 0; i < count; i += kWidth) store(to + i, load(from + i));
}

}  // namespace
