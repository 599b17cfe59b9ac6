// One tile of keys against a few query rows: scores, softmax step, weighted sum of values.
//
// The arithmetic of one row is fixed here, whoever computes it and whichever rows share the tile:
//   1. Tiles of kTile keys start at position 0 of the sequence and are taken in order; a tile that a row does not
//      see at all is skipped for that row.
//   2. A score is a chain of fma over the head dimension from 0, one lane per key (keys are transposed first).
//   3. Per tile: new maximum, weights 2^(score - maximum), and their sum in kLanes partial sums of fixed lanes.
//   4. The output is a chain of fma over the visible keys in order, one lane per value element.
// Blocking over rows, keys or value elements (the template arguments) moves work between registers and changes
// no chain, hence no bit. Masked keys never enter a chain: what lies in their memory does not matter.

#pragma once

#include "arena.h"
#include "simd.h"

namespace {

constexpr int kTile = 64;    // keys
constexpr int kLanes = 16;   // partial sums of the softmax denominator, whatever kWidth is
constexpr int kMaxRows = 6;  // query rows of one microkernel
constexpr int kStride = 8;   // iterations between two looks at what to fetch ahead
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLowest = -3.0e38f;

// Which keys a row sees in the present tile, as offsets: first <= key < last; none when first >= last.
struct Visible {
    int first, last;
};

// A softmax in progress.
struct RowState {
    float maximum;
    float sums[kLanes];
};

// Rows to bring into the cache while others are worked on: a little at a time, so that memory and arithmetic overlap
// (blocks lie scattered, hardware sees no stream to follow). Three places call `fetch`, the arguments 1, 3 and 3
// being what spreads a tile of keys and values evenly over the work on the tile before it.
struct Ahead {
    int count, next, at;   // rows listed; where the walk is
    int lines, row_bytes;  // cache lines a step
    const char* rows[2 * kTile];

    void fetch(int steps) {
        for (int n = steps * lines; n > 0 && next < count; n--) {
            __builtin_prefetch(rows[next] + at);
            at += kLine;
            if (at >= row_bytes) {
                at = 0;
                next++;
            }
        }
    }
};

// keys[d * kTile + j] = element d of rows[j], for the columns first .. last (multiples of kLanes).
// Every row pointer in that range must be readable.
template <class T>
INLINE void transpose_keys(const T* const* rows, int first, int last, int dim, float* keys, Ahead* ahead) {
    for (int j = first; j < last; j += kWidth) {
        const T* row[kWidth];  // a local copy: stores to keys cannot change it
        for (int i = 0; i < kWidth; i++) row[i] = rows[j + i];
        constexpr int chunk = 16 / sizeof(T);
        int d = 0;
        for (; d + chunk <= dim; d += chunk) {
            if (d % 16 == 0) ahead->fetch(1);
            vf out[chunk];
            transpose_chunk(row, d, out);
#pragma GCC unroll 8
            for (int i = 0; i < chunk; i++) store(keys + (d + i) * kTile + j, out[i]);
        }
        for (; d < dim; d++)
            for (int i = 0; i < kWidth; i++) keys[d * kTile + j + i] = to_float(row[i][d]);
    }
}

// sum[r][v] += x[r * stride] * y[v], keeping the shorter side in registers: 16 must do for all of it.
template <int R, int V, class T>
INLINE void multiply_add(const float* x, int64_t stride, const T* y, vf (&sum)[R][V]) {
    if (R < V) {
        vf scalar[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) scalar[r] = splat(x[r * stride]);
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) {
            vf vector = held(load(y + v * kWidth));
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) sum[r][v] = fma(scalar[r], vector, sum[r][v]);
        }
    } else {
        vf vector[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) vector[v] = load(y + v * kWidth);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            vf scalar = splat(x[r * stride]);
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) sum[r][v] = fma(scalar, vector[v], sum[r][v]);
        }
    }
}

// weights[r * kTile + j] = query row r . key j, for the columns first .. last. query is [dim][R].
template <int R, int V>
INLINE void score_columns(const float* query, const float* keys, int dim, int first, int last, float* weights,
                          Ahead* ahead) {
    for (int j = first; j + V * kWidth <= last; j += V * kWidth) {
        vf sum[R][V] = {};
        const float* q = query;
        const float* k = keys + j;
        for (int d = 0; d < dim;) {
            ahead->fetch(3);
            for (int stop = d + kStride < dim ? d + kStride : dim; d < stop; d++, q += R, k += kTile)
                multiply_add<R, V>(q, 1, k, sum);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) store(weights + r * kTile + j + v * kWidth, sum[r][v]);
    }
}

// Scores to weights, in place, over the columns first .. last; `state` advances. Returns what the output so far
// must be multiplied with. With `softcap` the scores come divided by it.
NOINLINE float softmax_step(float* weights, int first, int last, Visible see, float softcap, RowState* state) {
    if (softcap > 0)
        for (int j = first; j < last; j += kWidth)
            store(weights + j, tanh(load(weights + j)) * splat(softcap * kLog2e));
    if (see.first > first || see.last < last)
        for (int j = first; j < last; j++)
            if (j < see.first || j >= see.last) weights[j] = kLowest;
    vf largest = load(weights + first);
    for (int j = first + kWidth; j < last; j += kWidth) largest = max(largest, load(weights + j));
    float maximum = max_lane(largest);
    if (!(maximum > state->maximum)) maximum = state->maximum;
    float correction = exp2_nonpositive(state->maximum - maximum);
    state->maximum = maximum;
    vf sums[kLanes / kWidth] = {};
    for (int j = first; j < last; j += kLanes)
#pragma GCC unroll 4
        for (int i = 0; i < kLanes / kWidth; i++) {
            vf w = exp2_nonpositive(load(weights + j + i * kWidth) - splat(maximum));
            store(weights + j + i * kWidth, w);
            sums[i] += w;
        }
    for (int i = 0; i < kLanes / kWidth; i++)
        store(state->sums + i * kWidth, fma(load(state->sums + i * kWidth), splat(correction), sums[i]));
    return correction;
}

// out[r * stride + d] += weights[r * kTile + j] * values[j][d] over keys first <= j < last, for V vectors from `at`.
template <int R, int V, class T>
INLINE void add_values_at(const float* weights, const T* const* values, Visible keys, int64_t at, float* out,
                          int64_t stride, Ahead* ahead) {
    vf sum[R][V];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) sum[r][v] = load(out + r * stride + at + v * kWidth);
    for (int j = keys.first; j < keys.last;) {
        ahead->fetch(3);
        for (int stop = j + kStride < keys.last ? j + kStride : keys.last; j < stop; j++)
            multiply_add<R, V>(weights + j, kTile, values[j] + at, sum);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) store(out + r * stride + at + v * kWidth, sum[r][v]);
}

// The same over the whole value row of `width` elements (a multiple of kWidth).
template <int R, class T>
NOINLINE void add_values(const float* weights, const T* const* values, Visible keys, float* out, int width,
                         Ahead* ahead) {
    constexpr int V = R > 3 ? kWideVectors : 4;
    int at = 0;
    for (; at + V * kWidth <= width; at += V * kWidth) add_values_at<R, V>(weights, values, keys, at, out, width, ahead);
    for (; at + 2 * kWidth <= width; at += 2 * kWidth)
        add_values_at<R, 2>(weights, values, keys, at, out, width, ahead);
    for (; at < width; at += kWidth) add_values_at<R, 1>(weights, values, keys, at, out, width, ahead);
}

// R query rows against one tile: everything of a tile that is done row by row.
// query [dim][R], keys [dim][kTile], values[kTile] -> rows of `width`, out [R][width].
template <int R, class T>
NOINLINE void attend_rows(const float* query, const float* keys, const T* const* values, int dim, int width,
                          float softcap, const Visible* see, RowState* states, float* out, Ahead* ahead) {
    // The span that some row sees, in whole groups of lanes (weights of the others are exactly 0), and the core
    // that all rows see.
    Visible span = {kTile, 0}, core = {0, kTile};
    for (int r = 0; r < R; r++) {
        core.first = see[r].first > core.first ? see[r].first : core.first;
        core.last = see[r].last < core.last ? see[r].last : core.last;
        if (see[r].first >= see[r].last) continue;
        span.first = see[r].first < span.first ? see[r].first : span.first;
        span.last = see[r].last > span.last ? see[r].last : span.last;
    }
    if (span.first >= span.last) return;
    span = {span.first / kLanes * kLanes, (span.last + kLanes - 1) / kLanes * kLanes};

    float weights[R * kTile];
    constexpr int V = R > 3 ? kWideVectors : 4;
    constexpr int step = V * kWidth > kLanes ? V * kWidth : kLanes;
    int wide = span.first + (span.last - span.first) / step * step;
    score_columns<R, V>(query, keys, dim, span.first, wide, weights, ahead);
    score_columns<R, kLanes / kWidth < V ? kLanes / kWidth : V>(query, keys, dim, wide, span.last, weights, ahead);

    for (int r = 0; r < R; r++) {
        if (see[r].first >= see[r].last) continue;
        float correction = softmax_step(weights + r * kTile, span.first, span.last, see[r], softcap, states + r);
        if (correction != 1.0f)
            for (int d = 0; d < width; d += kWidth)
                store(out + (int64_t)r * width + d, load(out + (int64_t)r * width + d) * splat(correction));
    }

    // Each row takes its keys in order: those before the core alone, the core together, those after it alone.
    if (core.first >= core.last) core = {kTile, kTile};
    for (int r = 0; r < R; r++) {
        Visible before = {see[r].first, see[r].last < core.first ? see[r].last : core.first};
        if (before.first < before.last)
            add_values<1>(weights + r * kTile, values, before, out + (int64_t)r * width, width, ahead);
    }
    if (core.first < core.last) add_values<R>(weights, values, core, out, width, ahead);
    for (int r = 0; r < R; r++) {
        Visible after = {core.last, see[r].last};
        if (after.first < after.last)
            add_values<1>(weights + r * kTile, values, after, out + (int64_t)r * width, width, ahead);
    }
}

}  // namespace
