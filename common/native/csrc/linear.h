// Linear layers: y[m, n] = sum over k of x[m, k] * W[n, k] (+ bias[n]) (+ what y held), fp32 in and out.
//
// Weights are packed in tiles of 16 outputs (n padded with zeros), the same for every machine:
//   F32, BF16   float or uint16 [tiles][k][16]
//   Q8          uint8 [tiles][k / 32][8][16][4]: step, output, consecutive k; scales and minimums
//   Q4          uint8 [tiles][k / 32][4][16][4]: the low nibbles are steps 0 .. 3, the high ones steps 4 .. 7
//   scales, minimums: fp16 [tiles][k / 32][16]; k is a multiple of 32
// gemm_f32.h and gemm_q.h fix the arithmetic of a row: its bits depend neither on the rows beside it nor on threads,
// nor, with FMA, on the machine. Bias and then the residual are added to the finished sum.

#pragma once

#include <algorithm>
#include <atomic>

#include "gemm_q.h"
#include "workers.h"

enum Kind { F32, BF16, Q8, Q4 };

struct Linear {
    int32_t kind, n, k;
    const void* data;
    const uint16_t *scales, *minimums;  // null unless quantised
    const float* bias;                  // [n] or null
};

namespace {

constexpr int64_t kNearBytes = 192 << 10;  // of a block of rows: half of a small L2 cache
constexpr int kFewestRows = 48;            // of a block, however wide its rows: every block reads all weights
constexpr int kDepth = 320;                // steps of k whose weights, 64 bytes each, stay in an L1 cache
constexpr int kPanelsToOpen = 5;           // a tile is unpacked for so many panels, else by each as it goes
constexpr int kShare = 4;                  // parts of the work for each thread, at least
constexpr int64_t kMostProducts = 1 << 24; // of a part: under half a millisecond, for lent cores are given back between

// Calls of(std::integral_constant<int, R>) with R = rows, 1 .. Most.
template <int Most, class Of>
INLINE void with_rows(int rows, Of of) {
    if constexpr (Most > 1) {
        if (rows < Most) return with_rows<Most - 1>(rows, of);
    }
    of(std::integral_constant<int, Most>{});
}

// Where the results go.
struct Output {
    const Linear& w;
    float* y;
    int64_t stride;
    bool add;

    // Finishes `rows` rows from `first` on of one tile: sums[rows][16].
    void write(int tile, int first, int rows, const float* sums) const {
        const int n = tile * kOutputs, width = std::min(kOutputs, w.n - n);
        for (int r = 0; r < rows; r++, sums += kOutputs) {
            float* out = y + (first + r) * stride + n;
            if (width == kOutputs)
                for (int j = 0; j < kOutputs; j += kWidth) {
                    vf sum = load(sums + j);
                    if (w.bias) sum += load(w.bias + n + j);
                    if (add) sum += load(out + j);
                    store(out + j, sum);
                }
            else
                for (int j = 0; j < width; j++) {
                    float sum = sums[j];
                    if (w.bias) sum += w.bias[n + j];
                    if (add) sum += out[j];
                    out[j] = sum;
                }
        }
    }
};

// Rows in panels of nearly equal height, panels in blocks that stay in a near cache.
struct Panels {
    int rows, count, per_block, blocks;

    Panels(int rows, int most, int64_t row_bytes) : rows(rows), count((rows + most - 1) / most) {
        const int64_t block_rows = std::max<int64_t>(kNearBytes / row_bytes, kFewestRows);
        blocks = (int)((rows + block_rows - 1) / block_rows);
        per_block = (count + blocks - 1) / blocks;
        blocks = (count + per_block - 1) / per_block;
    }
    int first(int panel) const { return (int)((int64_t)panel * rows / count); }
    int height(int panel) const { return first(panel + 1) - first(panel); }
};

template <class Weight>
struct FloatLayer {
    const Linear& w;
    const Panels& panels;
    const float* x;  // packed
    const Output& out;

    static constexpr int kMostRows = kPanelRows;
    static constexpr int64_t unit_bytes = sizeof(float);
    const Weight* tile(int t) const { return static_cast<const Weight*>(w.data) + (int64_t)t * w.k * kOutputs; }

    // One panel: the weights pass once, several tiles at a time if it takes them to keep the arithmetic busy.
    void stream(int begin, int end) const {
        with_rows<kPanelRows>(panels.rows, [&](auto rows) {
            constexpr int R = decltype(rows)::value, side_by_side = kFewChains / (R * kVectors);
            constexpr int T = side_by_side > 1 ? side_by_side : 1;
            float sums[T * R * kOutputs];
            int t = begin;
            for (; t + T <= end; t += T) {
                float_sums<R, T, true>(tile(t), (int64_t)w.k * kOutputs, x, w.k, false, sums);
                for (int i = 0; i < T; i++) out.write(t + i, 0, R, sums + i * R * kOutputs);
            }
            for (; t < end; t++) {
                float_sums<R, 1, true>(tile(t), 0, x, w.k, false, sums);
                out.write(t, 0, R, sums);
            }
        });
    }

    size_t scratch_bytes(int num_rows) const {
        return Arena::bytes<float>((int64_t)num_rows * kOutputs) + Arena::bytes<float>(kDepth * kOutputs);
    }

    // Panels [first, last): runs of k whose weights stay close while all panels pass.
    void reuse(int t, int first, int last, Arena& arena) const {
        const int start = panels.first(first);
        float* sums = arena.take<float>((int64_t)(panels.first(last) - start) * kOutputs);
        float* wide = arena.take<float>(kDepth * kOutputs);
        const int runs = (w.k + kDepth - 1) / kDepth;
        for (int i = 0; i < runs; i++) {
            const int k = (int)((int64_t)i * w.k / runs), count = (int)((int64_t)(i + 1) * w.k / runs) - k;
            const float* weights = near(tile(t) + (int64_t)k * kOutputs, count, wide);
            for (int p = first; p < last; p++)
                with_rows<kPanelRows>(panels.height(p), [&](auto rows) {
                    constexpr int R = decltype(rows)::value;
                    const float* panel = x + (int64_t)panels.first(p) * w.k + (int64_t)k * R;
                    float* at = sums + (panels.first(p) - start) * kOutputs;
                    float_sums<R, 1, false>(weights, 0, panel, count, i > 0, at);
                });
        }
        out.write(t, start, panels.first(last) - start, sums);
    }
    static const float* near(const float* weights, int, float*) { return weights; }
    static const float* near(const bf16* weights, int count, float* wide) {
        widen(weights, (int64_t)count * kOutputs, wide);
        return wide;
    }

    static size_t packed_bytes(int rows, int k) { return Arena::bytes<float>((int64_t)rows * k); }
    static void pack(const float* from, int64_t stride, const Panels& panels, int p, int k, float* to) {
        const int first = panels.first(p);
        pack_floats(from + first * stride, stride, panels.height(p), k, to + (int64_t)first * k);
    }
    typedef float Packed;
};

template <class Tile>
struct QuantisedLayer {
    typedef typename Tile::Dot Dot;
    typedef int32_t Packed;
    const Linear& w;
    const Panels& panels;
    const int32_t* x;
    const Output& out;

    static constexpr int kMostRows = kQuantisedRows;
    static constexpr int64_t unit_bytes = Dot::kWords;
    int groups() const { return w.k / kGroup; }
    Tile tile(int t) const {
        const int64_t group = (int64_t)t * groups();
        return {static_cast<const uint8_t*>(w.data) + group * Tile::kGroupBytes, w.scales + group * kOutputs,
                w.minimums + group * kOutputs};
    }
    template <class AnyTile>
    void panel(const AnyTile& weights, int t, int p) const {
        const int first = panels.first(p);
        with_rows<kQuantisedRows>(panels.height(p), [&](auto rows) {
            constexpr int R = decltype(rows)::value;
            float sums[R * kOutputs];
            quantised_sums<R>(weights, groups(), x + first * groups() * group_words<Dot>(1), sums);
            out.write(t, first, R, sums);
        });
    }
    void stream(int begin, int end) const {
        for (int t = begin; t < end; t++) panel(tile(t), t, 0);
    }
    size_t scratch_bytes(int) const {
        return Arena::bytes<char>(OpenTile<Dot>::weight_bytes(groups())) +
               Arena::bytes<float>((int64_t)groups() * 2 * kOutputs);
    }
    void reuse(int t, int first, int last, Arena& arena) const {
        if (last - first < kPanelsToOpen) {
            for (int p = first; p < last; p++) panel(tile(t), t, p);
            return;
        }
        OpenTile<Dot> open = {arena.take<char>(OpenTile<Dot>::weight_bytes(groups())),
                              arena.take<float>((int64_t)groups() * 2 * kOutputs)};
        open_tile(tile(t), groups(), open);
        for (int p = first; p < last; p++) panel(open, t, p);
    }
    static size_t packed_bytes(int rows, int k) { return Arena::bytes<int32_t>(k / kGroup * group_words<Dot>(rows)); }
    static void pack(const float* from, int64_t stride, const Panels& panels, int p, int k, int32_t* to) {
        const int first = panels.first(p), groups = k / kGroup;
        quantise_panel<Dot>(from + first * stride, stride, panels.height(p), groups,
                            to + first * groups * group_words<Dot>(1));
    }
};

// Packs the rows, then deals out tiles and blocks of rows.
template <class Layer>
bool run_layer(const Linear& w, const float* x, int64_t x_stride, const Output& out, int rows, int threads) {
    thread_local Arena shared;
    const Panels panels(rows, Layer::kMostRows, w.k * Layer::unit_bytes);
    if (!shared.reset(Layer::packed_bytes(rows, w.k))) return false;
    auto* packed = shared.take<typename Layer::Packed>(0);
    workers().each(panels.count, panels.count > 8 ? threads : 1,
                   [&](int p) { Layer::pack(x, x_stride, panels, p, w.k, packed); });

    const Layer layer = {w, panels, packed, out};
    const int tiles = (w.n + kOutputs - 1) / kOutputs;
    const int64_t products = (int64_t)std::max(rows / panels.blocks, 8) * w.n * w.k;  // few rows: memory counts
    const int wanted = std::max(threads * kShare, (int)std::min<int64_t>(products / kMostProducts + 1, tiles));
    const int parts = threads > 1 ? std::min(tiles, wanted) : 1;
    std::atomic<bool> enough_memory{true};
    workers().each(panels.blocks * parts, threads, [&](int i) {
        const int block = i / parts, part = i % parts;
        const int begin = (int)((int64_t)part * tiles / parts), end = (int)((int64_t)(part + 1) * tiles / parts);
        if (panels.count == 1) return layer.stream(begin, end);
        const int first = block * panels.per_block, last = std::min(first + panels.per_block, panels.count);
        const size_t bytes = layer.scratch_bytes(panels.first(last) - panels.first(first));
        thread_local Arena own;
        for (int t = begin; t < end; t++) {
            if (!own.reset(bytes)) {
                enough_memory = false;
                return;
            }
            layer.reuse(t, first, last, own);
        }
    });
    return enough_memory;
}

// Rows of x and of y lie `x_stride` and `y_stride` floats apart and do not overlap; `add`: to what y holds.
// False: no memory for scratch.
inline bool linear(const Linear& w, const float* x, int64_t x_stride, float* y, int64_t y_stride, int rows, bool add,
                   int threads) {
    if (rows <= 0) return true;
    const Output out = {w, y, y_stride, add};
    switch (w.kind) {
        case F32: return run_layer<FloatLayer<float>>(w, x, x_stride, out, rows, threads);
        case BF16: return run_layer<FloatLayer<bf16>>(w, x, x_stride, out, rows, threads);
        case Q8: return run_layer<QuantisedLayer<PackedTile<Dot8, 8>>>(w, x, x_stride, out, rows, threads);
        default: return run_layer<QuantisedLayer<PackedTile<Dot4, 4>>>(w, x, x_stride, out, rows, threads);
    }
}

// W[row] as floats: out[k]. A quantised weight is scale * u + minimum, rounded once (the product is exact).
inline void weight_row(const Linear& w, int row, float* out) {
    const int64_t tile = row / kOutputs;
    const int output = row % kOutputs;
    if (w.kind == F32 || w.kind == BF16) {
        const int64_t first = tile * w.k * kOutputs + output;
        for (int k = 0; k < w.k; k++) {
            const int64_t at = first + (int64_t)k * kOutputs;
            out[k] = w.kind == F32 ? static_cast<const float*>(w.data)[at]
                                   : to_float(static_cast<const bf16*>(w.data)[at]);
        }
        return;
    }
    for (int g = 0; g < w.k / kGroup; g++) {
        const int64_t group = tile * (w.k / kGroup) + g;
        alignas(64) uint16_t halves[2][kOutputs];
        float factors[2][kOutputs];
        memcpy(halves[0], w.scales + group * kOutputs, sizeof halves[0]);
        memcpy(halves[1], w.minimums + group * kOutputs, sizeof halves[1]);
        for (int f = 0; f < 2; f++)
            for (int j = 0; j < kOutputs; j += kWidth) store(factors[f] + j, load_half(halves[f] + j));
        const int bytes = kGroup * kOutputs / (w.kind == Q8 ? 1 : 2);
        const uint8_t* data = static_cast<const uint8_t*>(w.data) + group * bytes + output * 4;
        for (int i = 0; i < kGroup; i++) {
            const int step = i / 4, stored = w.kind == Q8 ? step : step % 4;
            const int byte = data[stored * 4 * kOutputs + i % 4];
            const int u = w.kind == Q8 ? byte : step < 4 ? byte & 15 : byte >> 4;
            out[g * kGroup + i] = factors[0][output] * (float)u + factors[1][output];
        }
    }
}

}  // namespace
