// Products with weights of 4 or 8 bits in groups of 32 along k: weight = scale * u + minimum.
//
// A row's activations are quantised in the same groups. Of a group's eight steps of four k, the high step is the last
// that holds the largest magnitude; it may take 15 bits, the others 8, for most groups have few large values:
//     s = max(max|x| / 128, max|x| outside of the high step) / 127
//     a = x / s rounded to the nearest integer (ties to even): up to 127 * 128 in the high step, elsewhere 127
//     t = s * sum(a)
// An output is then one chain over the groups in order, from 0, in a lane of its own:
//     y = fma(dot(u, a), scale * s, y)      the dot an exact integer
//     y = fma(minimum, t, y)
// A group whose largest value is infinite or NaN has such an s and makes the row's outputs NaN or infinite.
// Rows come in panels: for each group kWords * 8 words of each step and row, then s and t of each row and, for a Dot
// of bytes, the high step's high bytes and where its weights begin.

#pragma once

#include "dots.h"
#include "gemm_f32.h"

namespace {

constexpr int kGroup = 32;
constexpr int kSteps = 8;                 // of four k in a group
constexpr int kStepBytes = 4 * kOutputs;  // of weights, a byte each
constexpr int kGroupsAhead = 8;           // between what is read and what is fetched
constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds, and leaves the integer in the low bits

// Rows of a panel. Their float sums may wait in the nearest cache while integers take the registers.
#if BATON_WIDTH == 16
constexpr int kQuantisedRows = 8;
#elif BATON_WIDTH == 8
constexpr int kQuantisedRows = 6;
#else
constexpr int kQuantisedRows = 2;
#endif

template <class Dot>
constexpr int64_t group_words(int rows) {
    return (int64_t)(kSteps * Dot::kWords + (Dot::kBytes ? 4 : 2)) * rows;
}

INLINE vf load_half(const uint16_t* p) {
#if BATON_WIDTH == 16 && defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif BATON_WIDTH == 8 && defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    // Exponent and mantissa as a float's are 2^112 too small, subnormals included: one exact product sets it right.
    vu bits = __builtin_convertvector((vh) * (const vh_memory*)p, vu);
    vf value = (vf)((bits & 0x7fff) << 13) * splat(0x1p112f);
    vu special = (vu)((bits & 0x7c00) == 0x7c00) & 0x7f800000;
    return (vf)((vu)value | special | (bits & 0x8000) << 16);
#endif
}

// Lane i gets lane i ^ step.
template <int step>
INLINE vi across(vi x) {
    vi y;
#if defined(__clang__)
    for (int i = 0; i < kWidth; i++) y[i] = x[i ^ step];
    return y;
#else  // GCC makes one instruction of this only
    for (int i = 0; i < kWidth; i++) y[i] = i ^ step;
    return __builtin_shuffle(x, y);
#endif
}
INLINE vi larger(vi a, vi b) { return a > b ? a : b; }
INLINE vi smaller(vi a, vi b) { return a < b ? a : b; }
template <int step = kWidth / 2>
INLINE vf sum_lanes(vf x) {
    x += (vf)across<step>((vi)x);
    if constexpr (step > 1) return sum_lanes<step / 2>(x);
    return x;
}

// Rounds quotients to integers; returns their sum (far below 2^24: exact in any order).
INLINE float round_group(const vf quotients[kGroup / kWidth], vi numbers[kGroup / kWidth]) {
    vf sum = {};
    for (int i = 0; i < kGroup / kWidth; i++) {
        vf shifted = quotients[i] + splat(kRounder);
        numbers[i] = (vi)shifted - (vi)splat(kRounder);
        sum += shifted - splat(kRounder);
    }
    return sum_lanes(sum)[0];
}

// A subnormal scale is too coarse to keep the largest quotients within their limits, and may be 0.
NOINLINE float round_tiny_group(const float* x, float scale, int high, vi numbers[kGroup / kWidth]) {
    vf quotients[kGroup / kWidth];
    for (int i = 0; i < kGroup; i++) {
        const float quotient = scale == 0.0f ? 0.0f : x[i] / scale, limit = i / 4 == high ? 127 * 128.0f : 127.0f;
        quotients[i / kWidth][i % kWidth] = quotient > limit ? limit : quotient < -limit ? -limit : quotient;
    }
    return round_group(quotients, numbers);
}

// Of a group's steps: the largest magnitude's bits (in every lane), the largest of the other steps, and which it is.
struct Steps {
    vi largest, second, high;

    // In every lane its step's largest magnitude; as integers they are ordered so, then infinity, then NaN.
    explicit Steps(const vf values[kGroup / kWidth]) : largest{}, second{}, high{} {
        vi steps[kGroup / kWidth], number;
        for (int i = 0; i < kGroup / kWidth; i++) {
            vi bits = (vi)values[i] & INT32_MAX;
            bits = larger(bits, across<1>(bits));
            steps[i] = larger(bits, across<2>(bits));
            join(steps[i], vi{});
        }
        if constexpr (kWidth >= 8) join(across<4>(largest), across<4>(second));
        if constexpr (kWidth >= 16) join(across<8>(largest), across<8>(second));
        for (int i = 0; i < kWidth; i++) number[i] = i / 4;
        for (int i = 0; i < kGroup / kWidth; i++, number += kWidth / 4) high = larger(high, (steps[i] == largest) & number);
        if constexpr (kWidth >= 8) high = larger(high, across<4>(high));
        if constexpr (kWidth >= 16) high = larger(high, across<8>(high));
    }

  private:
    void join(vi other_largest, vi other_second) {
        second = larger(larger(second, other_second), smaller(largest, other_largest));
        largest = larger(largest, other_largest);
    }
};

// One row's group: integers, s and t. Returns its high step.
INLINE int quantise_group(const float* x, vi numbers[kGroup / kWidth], float* s, float* t) {
    vf values[kGroup / kWidth];
    for (int i = 0; i < kGroup / kWidth; i++) values[i] = load(x + i * kWidth);
    const Steps steps(values);
    const int high = steps.high[0];
    const float scale = ((vf)larger(steps.second, (vi)((vf)steps.largest * splat(1.0f / 128))))[0] / 127.0f;
    *s = scale;
    if (scale < 0x1p-126f) {
        *t = scale * round_tiny_group(x, scale, high, numbers);
        return high;
    }
    for (vf& value : values) value /= splat(scale);
    *t = scale * round_group(values, numbers);
    return high;
}

// A panel of `rows` rows.
template <class Dot>
void quantise_panel(const float* x, int64_t stride, int rows, int groups, int32_t* out) {
    for (int r = 0; r < rows; r++) {
        int32_t* words = out;
        for (int g = 0; g < groups; g++, words += group_words<Dot>(rows)) {
            vi numbers[kGroup / kWidth];
            int32_t* after = words + kSteps * Dot::kWords * rows + r;
            const int high = quantise_group(x + r * stride + g * kGroup, numbers, (float*)after, (float*)after + rows);
            const int32_t high_bytes = Dot::pack(numbers, high, rows, words + r);
            if (!Dot::kBytes) continue;
            after[2 * rows] = high_bytes;
            after[3 * rows] = high * kStepBytes;
        }
    }
}

// A tile's weights as they are stored.
template <class D, int Bits>
struct PackedTile {
    typedef D Dot;
    const uint8_t* data;
    const uint16_t *scales, *minimums;

    static constexpr int kGroupBytes = kGroup * kOutputs * Bits / 8;

    INLINE void fetch_ahead(const PackedTile& tile, int g) {
        for (int i = 0; i < kGroupBytes; i += kLine)
            __builtin_prefetch(tile.data + (int64_t)(g + kGroupsAhead) * kGroupBytes + i);
        __builtin_prefetch(tile.scales + (g + 2 * kGroupsAhead) * kOutputs);
        __builtin_prefetch(tile.minimums + (g + 2 * kGroupsAhead) * kOutputs);
    }
    INLINE typename Dot::Weight weight(const PackedTile& tile, int g, int step, int j) {
        const uint8_t* group = tile.data + (int64_t)g * kGroupBytes + j * sizeof(vi);
        if (Bits == 8) return Dot::weight(load_words(group + step * 4 * kOutputs));
        vi both = load_words(group + step % 4 * 4 * kOutputs);
        return Dot::weight((step < 4 ? both : (vi)((vu)both >> 4)) & 0x0f0f0f0f);
    }
    // For Dots of bytes: the step that begins so many bytes into a group of unpacked ones.
    INLINE vi high_weight(const PackedTile& tile, int g, uint32_t at, int j) {
        const uint8_t* group = tile.data + (int64_t)g * kGroupBytes + j * sizeof(vi);
        if (Bits == 8) return load_words(group + at);
        return (vi)((vu)load_words(group + at % kGroupBytes) >> (at < kGroupBytes ? 0 : 4)) & 0x0f0f0f0f;
    }
    INLINE vf scale(const PackedTile& tile, int g, int j) { return load_half(tile.scales + g * kOutputs + j * kWidth); }
    INLINE vf minimum(const PackedTile& tile, int g, int j) {
        return load_half(tile.minimums + g * kOutputs + j * kWidth);
    }
};

// The same in the form that many rows read: unpacked once, in a near cache.
template <class D>
struct OpenTile {
    typedef D Dot;
    char* weights;   // [groups][kSteps][kVectors] of Dot::Weight
    float* factors;  // [groups][2][kOutputs]: scales, minimums

    INLINE void fetch_ahead(const OpenTile&, int) {}
    INLINE typename Dot::Weight weight(const OpenTile& tile, int g, int step, int j) {
        return Dot::load(tile.weights + ((g * kSteps + step) * kVectors + j) * sizeof(typename Dot::Weight));
    }
    INLINE vi high_weight(const OpenTile& tile, int g, uint32_t at, int j) {
        return load_words(tile.weights + (int64_t)g * kSteps * kStepBytes + at + j * sizeof(vi));
    }
    INLINE vf scale(const OpenTile& tile, int g, int j) { return load(tile.factors + 2 * g * kOutputs + j * kWidth); }
    INLINE vf minimum(const OpenTile& tile, int g, int j) {
        return load(tile.factors + (2 * g + 1) * kOutputs + j * kWidth);
    }
    static int64_t weight_bytes(int groups) { return (int64_t)groups * kSteps * kVectors * sizeof(typename Dot::Weight); }
};

template <class Packed>
NOINLINE void open_tile(const Packed& from, int groups, const OpenTile<typename Packed::Dot>& to) {
    typedef typename Packed::Dot Dot;
    for (int g = 0; g < groups; g++) {
        Packed::fetch_ahead(from, g);
        for (int step = 0; step < kSteps; step++)
            for (int j = 0; j < kVectors; j++)
                Dot::store(to.weights + ((g * kSteps + step) * kVectors + j) * sizeof(typename Dot::Weight),
                           Packed::weight(from, g, step, j));
        for (int j = 0; j < kVectors; j++) {
            store(to.factors + 2 * g * kOutputs + j * kWidth, Packed::scale(from, g, j));
            store(to.factors + (2 * g + 1) * kOutputs + j * kWidth, Packed::minimum(from, g, j));
        }
    }
}

// sums[R][16] of one tile for a panel.
template <int R, class Tile>
NOINLINE void quantised_sums(const Tile& tile, int groups, const int32_t* x, float* sums) {
    typedef typename Tile::Dot Dot;
    vf acc[R][kVectors] = {};
    for (int g = 0; g < groups; g++, x += group_words<Dot>(R)) {
        Tile::fetch_ahead(tile, g);
        vi dots[R][kVectors] = {};
#pragma GCC unroll 8
        for (int i = 0; i < kSteps; i++) {
            const int step = i / 2 + i % 2 * 4;  // steps that share bytes one after the other
            typename Dot::Weight weight[kVectors];
            for (int j = 0; j < kVectors; j++) weight[j] = Tile::weight(tile, g, step, j);
            for (int r = 0; r < R; r++) {
                typename Dot::Value value = Dot::template value<R>(x + step * Dot::kWords * R, r);
                for (int j = 0; j < kVectors; j++) dots[r][j] = Dot::add(dots[r][j], weight[j], value);
            }
        }
        const int32_t* after = x + kSteps * Dot::kWords * R;
        const float* factors = (const float*)after;
        vf scale[kVectors], minimum[kVectors];
        for (int j = 0; j < kVectors; j++) scale[j] = Tile::scale(tile, g, j), minimum[j] = Tile::minimum(tile, g, j);
        for (int r = 0; r < R; r++) {
            const vf s = splat(factors[r]), t = splat(factors[R + r]);
            for (int j = 0; j < kVectors; j++) {
                vi dot = dots[r][j];
                if constexpr (Dot::kBytes)
                    dot = Dot::total(dot, Tile::high_weight(tile, g, after[3 * R + r], j), splat_word(after[2 * R + r]));
                acc[r][j] = fma(__builtin_convertvector(dot, vf), scale[j] * s, acc[r][j]);
                acc[r][j] = fma(minimum[j], t, acc[r][j]);
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int j = 0; j < kVectors; j++) store(sums + r * kOutputs + j * kWidth, acc[r][j]);
}

}  // namespace
