// Vectors of kWidth floats, and the few operations the kernel needs, on GCC's vector extensions.
//
// Every operation works lane by lane with one fixed rounding (fma rounds once), so a lane's result does not
// depend on kWidth: machines with FMA compute the same bits whatever their vector width. Only a target without
// FMA (old x86) rounds products separately. The build forbids contraction (-ffp-contract=off).

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifndef BATON_WIDTH  // set by hand only to test one width on a machine of another
#if defined(__AVX512F__)
#define BATON_WIDTH 16
#elif defined(__AVX__)
#define BATON_WIDTH 8
#else
#define BATON_WIDTH 4
#endif
#endif

#define INLINE static inline __attribute__((always_inline))
#define NOINLINE static __attribute__((noinline))  // keeps compiling a matter of seconds

constexpr int kWidth = BATON_WIDTH;
// Vectors a microkernel may spread one row over: sized so that six rows' accumulators stay in registers.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kWideVectors = 4;
#else
constexpr int kWideVectors = 2;
#endif

typedef float vf __attribute__((vector_size(4 * kWidth)));
typedef int32_t vi __attribute__((vector_size(4 * kWidth)));
typedef uint32_t vu __attribute__((vector_size(4 * kWidth)));
typedef uint16_t vh __attribute__((vector_size(2 * kWidth)));
typedef float vf_memory __attribute__((vector_size(4 * kWidth), aligned(4), may_alias));
typedef uint16_t vh_memory __attribute__((vector_size(2 * kWidth), aligned(2), may_alias));

typedef uint16_t bf16;  // the upper half of a float's bits

INLINE vf splat(float x) { return x - (vf){}; }
INLINE vf load(const float* p) { return *(const vf_memory*)p; }
INLINE void store(float* p, vf x) { *(vf_memory*)p = x; }
INLINE vf load(const bf16* p) {
#if BATON_WIDTH == 8 && defined(__AVX2__)  // one instruction, where GCC makes two and needs a register more
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#else
    return (vf)(__builtin_convertvector((vh) * (const vh_memory*)p, vu) << 16);
#endif
}

INLINE float to_float(float x) { return x; }
INLINE float to_float(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

// Round to nearest, ties to even; every NaN becomes 0x7fc0 (as torch does).
INLINE void store(bf16* p, vf x) {
    vu bits = (vu)x;
    vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    vu nan = (vu)(x != x);
    *(vh_memory*)p = __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0), vh);
}
INLINE void store_one(float* p, float x) { *p = x; }
INLINE void store_one(bf16* p, float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    *p = x != x ? 0x7fc0 : (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE vf fma(vf a, vf b, vf c) {
#if BATON_WIDTH == 16 && defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif BATON_WIDTH == 8 && defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif BATON_WIDTH == 4 && defined(__FMA__)
    return (vf)_mm_fmadd_ps((__m128)a, (__m128)b, (__m128)c);
#elif BATON_WIDTH == 4 && defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#elif defined(__FMA__) || defined(__aarch64__)
    for (int i = 0; i < kWidth; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#else
    return a * b + c;
#endif
}

// Keeps x in a register: without it GCC reloads a vector for each of its uses, and loads become the limit.
INLINE vf held(vf x) {
#if defined(__AVX__) && BATON_WIDTH * 4 <= __BIGGEST_ALIGNMENT__
    asm("" : "+v"(x));
#endif
    return x;
}

INLINE vf select(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }
INLINE vf max(vf a, vf b) { return a > b ? a : b; }

// The largest lane: halves against each other down to one.
INLINE float max_lane(vf x) {
#if BATON_WIDTH >= 8 && defined(__AVX__)
#if BATON_WIDTH == 16
    float lanes[16];
    store(lanes, x);
    __m256 eight = _mm256_max_ps(_mm256_loadu_ps(lanes), _mm256_loadu_ps(lanes + 8));
#else
    __m256 eight = (__m256)x;
#endif
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
#else
    float lanes[kWidth];
    store(lanes, x);
    for (int half = kWidth / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] = lanes[i + half] > lanes[i] ? lanes[i + half] : lanes[i];
    return lanes[0];
#endif
}

// 2^x for x <= 0, relative error below 1.2e-7; exactly 1 at 0, exactly 0 below -125 (NaN stays NaN).
// x = n + r with |r| <= 0.5: a minimax polynomial for 2^r (2e-9), then n goes into the exponent.
INLINE vf exp2_nonpositive(vf x) {
    const vf to_integer = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves n in the low mantissa bits
    vf shifted = x + to_integer;
    vf r = x - (shifted - to_integer);
    vf p = splat(1.535336188e-4f);
    p = fma(p, r, splat(1.339887442e-3f));
    p = fma(p, r, splat(9.618437358e-3f));
    p = fma(p, r, splat(5.550332471e-2f));
    p = fma(p, r, splat(2.402264791e-1f));
    p = fma(p, r, splat(6.931472029e-1f));
    p = fma(p, r, splat(1.0f));
    vf result = (vf)((vi)p + (vi)((vu)shifted << 23));
    return (vf)((vi)result & ~(vi)(x < splat(-125.0f)));
}
INLINE float exp2_nonpositive(float x) { return exp2_nonpositive(splat(x))[0]; }

// tanh, error below 2e-7 absolute and relative. Near 0 an odd polynomial keeps the relative error
// (coefficients of Cephes' tanhf, S. Moshier); elsewhere (1 - e) / (1 + e) with e = exp(-2|x|).
INLINE vf tanh(vf x) {
    vi sign = (vi)x & INT32_MIN;
    vf a = (vf)((vi)x & INT32_MAX);
    vf square = x * x;
    vf p = splat(-5.70498872745e-3f);
    p = fma(p, square, splat(2.06390887954e-2f));
    p = fma(p, square, splat(-5.37397155531e-2f));
    p = fma(p, square, splat(1.33314422036e-1f));
    p = fma(p, square, splat(-3.33332819422e-1f));
    vf small = fma(x * square, p, x);
    vf e = exp2_nonpositive(a * splat(-2.8853900817779268f));  // -2 / ln 2
    vf large = (splat(1.0f) - e) / (splat(1.0f) + e);
    return select((vi)(a < splat(0.625f)), small, (vf)((vi)large | sign));
}

// Four consecutive floats of each of kWidth rows, four rows of every quarter side by side: the start of a
// transposition whose remaining steps stay inside 128-bit lanes (the cheap shuffles of AVX).
// Result lane 4*q + i is rows[4*q][i].
INLINE vf gather_quads(const float* const rows[kWidth], int64_t at) {
#if BATON_WIDTH == 16 && defined(__AVX512F__)
    __m512 x = _mm512_castps128_ps512(_mm_loadu_ps(rows[0] + at));
    x = _mm512_insertf32x4(x, _mm_loadu_ps(rows[4] + at), 1);
    x = _mm512_insertf32x4(x, _mm_loadu_ps(rows[8] + at), 2);
    return (vf)_mm512_insertf32x4(x, _mm_loadu_ps(rows[12] + at), 3);
#elif BATON_WIDTH == 8 && defined(__AVX__)
    __m256 x = _mm256_castps128_ps256(_mm_loadu_ps(rows[0] + at));
    return (vf)_mm256_insertf128_ps(x, _mm_loadu_ps(rows[4] + at), 1);
#elif BATON_WIDTH == 4
    return load(rows[0] + at);
#else
    vf x;
    for (int i = 0; i < kWidth; i++) x[i] = rows[i & ~3][at + (i & 3)];
    return x;
#endif
}

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#endif
// The same four picks in every 128-bit lane; picks of 4 and above come from the second operand.
#if BATON_WIDTH == 16
#define PICK(x) ((x) < 4 ? (x) : (x) + 12)
#define IN_LANES(a, b, i, j, k, l)                                                                                  \
    SHUFFLE(a, b, PICK(i), PICK(j), PICK(k), PICK(l), PICK(i) + 4, PICK(j) + 4, PICK(k) + 4, PICK(l) + 4,             \
            PICK(i) + 8, PICK(j) + 8, PICK(k) + 8, PICK(l) + 8, PICK(i) + 12, PICK(j) + 12, PICK(k) + 12, PICK(l) + 12)
#elif BATON_WIDTH == 8
#define PICK(x) ((x) < 4 ? (x) : (x) + 4)
#define IN_LANES(a, b, i, j, k, l) \
    SHUFFLE(a, b, PICK(i), PICK(j), PICK(k), PICK(l), PICK(i) + 4, PICK(j) + 4, PICK(k) + 4, PICK(l) + 4)
#else
#define IN_LANES(a, b, i, j, k, l) SHUFFLE(a, b, i, j, k, l)
#endif

// out[i] = float `at + i` of rows[0 .. kWidth), for i in 0..3.
INLINE void transpose_quads(const float* const rows[kWidth], int64_t at, vf out[4]) {
    vf a = gather_quads(rows, at), b = gather_quads(rows + 1, at);
    vf c = gather_quads(rows + 2, at), d = gather_quads(rows + 3, at);
    vf ab_low = IN_LANES(a, b, 0, 4, 1, 5), ab_high = IN_LANES(a, b, 2, 6, 3, 7);
    vf cd_low = IN_LANES(c, d, 0, 4, 1, 5), cd_high = IN_LANES(c, d, 2, 6, 3, 7);
    out[0] = IN_LANES(ab_low, cd_low, 0, 1, 4, 5);
    out[1] = IN_LANES(ab_low, cd_low, 2, 3, 6, 7);
    out[2] = IN_LANES(ab_high, cd_high, 0, 1, 4, 5);
    out[3] = IN_LANES(ab_high, cd_high, 2, 3, 6, 7);
}

// The elements that 16 bytes of every row hold, as floats: out[i] = element `at + i` of rows[0 .. kWidth).
// That is 4 of fp32, or 8 of bf16, transposed in pairs (the odd one is the upper half of a pair's bits).
INLINE void transpose_chunk(const float* const rows[kWidth], int64_t at, vf out[4]) {
    transpose_quads(rows, at, out);
}
INLINE void transpose_chunk(const bf16* const rows[kWidth], int64_t at, vf out[8]) {
    const float* pairs[kWidth];
    for (int i = 0; i < kWidth; i++) pairs[i] = (const float*)(rows[i] + at);
    vf both[4];
    transpose_quads(pairs, 0, both);
    for (int i = 0; i < 4; i++) {
        out[2 * i] = (vf)((vu)both[i] << 16);
        out[2 * i + 1] = (vf)((vu)both[i] & 0xffff0000u);
    }
}
