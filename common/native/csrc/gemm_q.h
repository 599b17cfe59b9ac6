// Products with weights of 4 or 8 bits in groups of 32 along k: weight = scale * u + minimum.
//
// A row's activations are quantised in the same groups: s = max|x| / 127, a = x / s rounded to the nearest integer
// (ties to even), t = s * sum(a). An output is then one chain over the groups in order, from 0, in a lane of its own:
//     y = fma(dot(u, a), scale * s, y)      the dot an exact integer
//     y = fma(minimum, t, y)
// A group whose largest value is infinite or NaN has such an s and makes the row's outputs NaN or infinite.
// Rows come in panels: for each group kWords * 8 words of each step and row, then s and t of each row.

#pragma once

#include "dots.h"
#include "gemm_f32.h"

namespace {

constexpr int kGroup = 32;
constexpr int kSteps = 8;               // of four k in a group
constexpr int kGroupsAhead = 8;         // between what is read and what is fetched
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
    return (int64_t)(kSteps * Dot::kWords + 2) * rows;
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
#if BATON_WIDTH == 8 && defined(__AVX2__)
    if (step == 4) return (vi)_mm256_permute2x128_si256((__m256i)x, (__m256i)x, 1);
    return (vi)_mm256_shuffle_epi32((__m256i)x, step == 2 ? 0x4e : 0xb1);
#endif
    for (int i = 0; i < kWidth; i++) y[i] = x[i ^ step];
    return y;
}
template <int step = kWidth / 2>
INLINE vi largest_lane(vi x) {
    vi other = across<step>(x);
    x = other > x ? other : x;
    if constexpr (step > 1) return largest_lane<step / 2>(x);
    return x;
}
template <int step = kWidth / 2>
INLINE vf sum_lanes(vf x) {
    x += (vf)across<step>((vi)x);
    if constexpr (step > 1) return sum_lanes<step / 2>(x);
    return x;
}

// The low bytes of integers -128 .. 127.
INLINE void store_bytes(const vi values[kGroup / kWidth], int8_t bytes[kGroup]) {
#if BATON_WIDTH == 16 && defined(__AVX512F__)
    for (int i = 0; i < 2; i++)
        _mm_storeu_si128((__m128i*)(bytes + 16 * i), _mm512_cvtepi32_epi8((__m512i)values[i]));
#elif BATON_WIDTH == 8 && defined(__AVX2__)
    __m256i low = _mm256_packs_epi32((__m256i)values[0], (__m256i)values[1]);
    __m256i high = _mm256_packs_epi32((__m256i)values[2], (__m256i)values[3]);
    __m256i mixed = _mm256_packs_epi16(low, high);  // fours of 0, 2, 4, 6, then of 1, 3, 5, 7
    _mm256_storeu_si256((__m256i*)bytes, _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
#else
    for (int i = 0; i < kGroup; i++) bytes[i] = (int8_t)values[i / kWidth][i % kWidth];
#endif
}

// Rounds quotients to bytes; returns their sum (integers far below 2^24: exact in any order).
INLINE float round_group(const vf quotients[kGroup / kWidth], int8_t bytes[kGroup]) {
    vi rounded[kGroup / kWidth];
    vf sum = {};
    for (int i = 0; i < kGroup / kWidth; i++) {
        vf shifted = quotients[i] + splat(kRounder);
        rounded[i] = (vi)shifted - (vi)splat(kRounder);
        sum += shifted - splat(kRounder);
    }
    store_bytes(rounded, bytes);
    return sum_lanes(sum)[0];
}

// A subnormal scale is too coarse to keep its largest quotient at 127, and may be 0.
NOINLINE float round_tiny_group(const float* x, float scale, int8_t bytes[kGroup]) {
    vf quotients[kGroup / kWidth];
    for (int i = 0; i < kGroup; i++) {
        float quotient = scale == 0.0f ? 0.0f : x[i] / scale;
        quotients[i / kWidth][i % kWidth] = quotient > 127.0f ? 127.0f : quotient < -127.0f ? -127.0f : quotient;
    }
    return round_group(quotients, bytes);
}

// One row's group: bytes, s and t.
INLINE void quantise_group(const float* x, int8_t bytes[kGroup], float* s, float* t) {
    vf values[kGroup / kWidth];
    vi largest = {};
    for (int i = 0; i < kGroup / kWidth; i++) {
        values[i] = load(x + i * kWidth);
        vi bits = (vi)values[i] & INT32_MAX;  // ordered as the magnitudes are, then infinity, then NaN
        largest = bits > largest ? bits : largest;
    }
    const float scale = ((vf)largest_lane(largest))[0] / 127.0f;
    *s = scale;
    if (scale < 0x1p-126f) {
        *t = scale * round_tiny_group(x, scale, bytes);
        return;
    }
    for (vf& value : values) value /= splat(scale);
    *t = scale * round_group(values, bytes);
}

// A panel of `rows` rows.
template <class Dot>
void quantise_panel(const float* x, int64_t stride, int rows, int groups, int32_t* out) {
    for (int r = 0; r < rows; r++) {
        int32_t* words = out;
        for (int g = 0; g < groups; g++, words += group_words<Dot>(rows)) {
            alignas(64) int8_t bytes[kGroup];
            float* factors = (float*)(words + kSteps * Dot::kWords * rows);
            quantise_group(x + r * stride + g * kGroup, bytes, factors + r, factors + rows + r);
            Dot::pack(bytes, rows, words + r);
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
        const float* factors = (const float*)(x + kSteps * Dot::kWords * R);
        for (int j = 0; j < kVectors; j++) {
            vf scale = Tile::scale(tile, g, j), minimum = Tile::minimum(tile, g, j);
            for (int r = 0; r < R; r++) {
                vf dot = __builtin_convertvector(Dot::total(dots[r][j]), vf);
                acc[r][j] = fma(dot, scale * splat(factors[r]), acc[r][j]);
                acc[r][j] = fma(minimum, splat(factors[R + r]), acc[r][j]);
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int j = 0; j < kVectors; j++) store(sums + r * kOutputs + j * kWidth, acc[r][j]);
}

}  // namespace
