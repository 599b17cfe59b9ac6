// What a step does to rows between its matrix products. Sums run in kLanes partial sums of fixed lanes, whatever
// kWidth is; rows end within a vector only where a loop over single floats says so.

#pragma once

#include <cmath>

#include "program.h"
#include "tile.h"
#include "workers.h"

namespace {

constexpr int kRowBlock = 16;  // rows that one thread takes at a time

// run(first, last) over blocks of rows.
template <class Run>
void each_rows(int rows, int threads, Run run) {
    if (threads <= 1 || rows <= kRowBlock) {
        run(0, rows);
        return;
    }
    workers().each((rows + kRowBlock - 1) / kRowBlock, threads, [&](int block) {
        const int first = block * kRowBlock;
        run(first, first + kRowBlock < rows ? first + kRowBlock : rows);
    });
}

// 1 / sqrt(mean of squares + epsilon)
inline float inverse_rms(const float* x, int width, float epsilon) {
    float sums[kLanes] = {};
    vf partial[kLanes / kWidth] = {};
    int i = 0;
    for (; i + kLanes <= width; i += kLanes)
        for (int v = 0; v < kLanes / kWidth; v++) {
            vf part = load(x + i + v * kWidth);
            partial[v] = fma(part, part, partial[v]);
        }
    for (int v = 0; v < kLanes / kWidth; v++) store(sums + v * kWidth, partial[v]);
    for (int lane = 0; i < width; i++, lane++) sums[lane] = fma(splat(x[i]), splat(x[i]), splat(sums[lane]))[0];
    for (int half = kLanes / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; lane++) sums[lane] += sums[lane + half];
    return 1.0f / std::sqrt(sums[0] / (float)width + epsilon);
}

inline void norm_row(const float* x, const float* weight, int width, float epsilon, float* out) {
    const float factor = inverse_rms(x, width, epsilon);
    int i = 0;
    for (; i + kWidth <= width; i += kWidth) store(out + i, load(x + i) * splat(factor) * load(weight + i));
    for (; i < width; i++) out[i] = x[i] * factor * weight[i];
}

// (a, b) -> (a cos - b sin, b cos + a sin) over the two halves of the first `half * 2` floats.
inline void rotate_head(float* x, const float* cos, const float* sin, int half) {
    int i = 0;
    for (; i + kWidth <= half; i += kWidth) {
        vf a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
        store(x + i, a * c - b * s);
        store(x + half + i, b * c + a * s);
    }
    for (; i < half; i++) {
        float a = x[i], b = x[half + i];
        x[i] = a * cos[i] - b * sin[i];
        x[half + i] = b * cos[i] + a * sin[i];
    }
}

inline void rotate_row(const Rotation& rotation, float* x, const float* cos, const float* sin) {
    const int heads = rotation.num_heads + rotation.num_kv_heads;
    for (int h = 0; h < heads; h++, x += rotation.dim) {
        const float* norm = h < rotation.num_heads ? rotation.query_norm : rotation.key_norm;
        if (norm) norm_row(x, norm, rotation.dim, rotation.epsilon, x);
        if (rotation.rotary_dim) rotate_head(x, cos, sin, rotation.rotary_dim / 2);
    }
}

INLINE vf absolute(vf x) { return (vf)((vi)x & INT32_MAX); }

// x * sigmoid(x); the exponential's argument is never positive.
INLINE vf silu(vf x) {
    vf e = exp2_nonpositive(absolute(x) * splat(-kLog2e));
    vf numerator = select((vi)(x < splat(0.0f)), e, splat(1.0f));
    return x * (numerator / (splat(1.0f) + e));
}

// The tanh form of GELU (Hendrycks and Gimpel, 2016).
INLINE vf gelu_tanh(vf x) {
    vf cubic = fma(x * x * x, splat(0.044715f), x);
    return splat(0.5f) * x * (splat(1.0f) + tanh(cubic * splat(0.7978845608028654f)));
}

template <vf activation(vf)>
void gate_row(const float* gate, const float* up, int width, float* out) {
    int i = 0;
    for (; i + kWidth <= width; i += kWidth) store(out + i, activation(load(gate + i)) * load(up + i));
    for (; i < width; i++) out[i] = (activation(splat(gate[i])) * splat(up[i]))[0];
}

inline void add_row(const float* x, float scale, int width, float* out) {
    int i = 0;
    for (; i + kWidth <= width; i += kWidth) store(out + i, fma(load(x + i), splat(scale), load(out + i)));
    for (; i < width; i++) out[i] = fma(splat(x[i]), splat(scale), splat(out[i]))[0];
}

inline void scale_row(float* x, float scale, int width) {
    int i = 0;
    for (; i + kWidth <= width; i += kWidth) store(x + i, load(x + i) * splat(scale));
    for (; i < width; i++) x[i] *= scale;
}

inline void softcap_row(float* x, float cap, int width) {
    int i = 0;
    for (; i + kWidth <= width; i += kWidth) store(x + i, tanh(load(x + i) / splat(cap)) * splat(cap));
    for (; i < width; i++) x[i] = tanh(splat(x[i] / cap))[0] * cap;
}

}  // namespace
