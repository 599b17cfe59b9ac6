// Exact integer products of weights (bytes 0 .. 255, or 0 .. 15) and activations, four to a lane.
//
// A vector of weights holds, for each of kWidth outputs, four consecutive k (a step); a word of activations the same
// four of one row. Activations are -127 .. 127, in one step of a group of 32, its high step, -16256 .. 16256. What
// differs between machines is how the products are added up; the sum of a group is the same integer everywhere. A
// `Dot` says: how a group's words lie (kWords each step), what a loaded vector of weights becomes, the adding, and
// whether it takes bytes (kBytes): then the high step, a = 128 * high + low, has its low bytes among the others', and
// `total` adds the high ones.

#pragma once

#include "simd.h"

namespace {

INLINE vi splat_word(int32_t x) { return x + (vi){}; }
// Keeps adding where it is written: else GCC reorders the sums and spills every product.
INLINE vi in_order(vi x) { return (vi)held((vf)x); }
INLINE vi load_words(const void* p) {
    typedef int32_t memory __attribute__((vector_size(4 * kWidth), aligned(1), may_alias));
    return *(const memory*)p;
}
INLINE void store_words(void* p, vi x) {
    typedef int32_t memory __attribute__((vector_size(4 * kWidth), aligned(1), may_alias));
    *(memory*)p = x;
}

// The low bytes of integers, those beyond -128 .. 127 anyhow.
INLINE void store_bytes(const vi values[32 / kWidth], int8_t bytes[32]) {
#if BATON_WIDTH == 16 && defined(__AVX512F__)
    for (int i = 0; i < 2; i++)
        _mm_storeu_si128((__m128i*)(bytes + 16 * i), _mm512_cvtepi32_epi8((__m512i)values[i]));
#elif BATON_WIDTH == 8 && defined(__AVX2__)
    __m256i low = _mm256_packs_epi32((__m256i)values[0], (__m256i)values[1]);
    __m256i high = _mm256_packs_epi32((__m256i)values[2], (__m256i)values[3]);
    __m256i mixed = _mm256_packs_epi16(low, high);  // fours of 0, 2, 4, 6, then of 1, 3, 5, 7
    _mm256_storeu_si256((__m256i*)bytes, _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
#else
    for (int i = 0; i < 32; i++) bytes[i] = (int8_t)values[i / kWidth][i % kWidth];
#endif
}

// A step's four activations in one word, a weight vector as it is.
struct Words {
    static constexpr bool kBytes = true;
    static constexpr int kWords = 1;
    typedef vi Weight;
    typedef vi Value;

    INLINE Weight weight(vi bytes) { return bytes; }
    INLINE Weight load(const void* p) { return load_words(p); }
    INLINE void store(void* p, Weight w) { store_words(p, w); }
    template <int R>
    INLINE Value value(const int32_t* words, int row) {
        return splat_word(words[row]);
    }
    // words[step * rows]: a group's numbers as a row of a panel. Returns the high bytes.
    INLINE int32_t pack(const vi numbers[32 / kWidth], int high, int rows, int32_t* words) {
        alignas(64) int32_t all[32];
        alignas(64) int8_t bytes[32];
        for (int i = 0; i < 32 / kWidth; i++) store_words(all + i * kWidth, numbers[i]);
        store_bytes(numbers, bytes);
        const v4 a = *(const v4*)(all + 4 * high) + 64;
        const int32_t low = bytes_of((a & 127) - 64);
        memcpy(bytes + 4 * high, &low, 4);
        for (int step = 0; step < 8; step++) memcpy(words + step * rows, bytes + 4 * step, 4);
        return bytes_of(a >> 7);
    }

  private:
    typedef int32_t v4 __attribute__((vector_size(16), may_alias));
    // Of integers -128 .. 127.
    INLINE int32_t bytes_of(v4 x) {
#if defined(__x86_64__)
        const __m128i shorts = _mm_packs_epi32((__m128i)x, (__m128i)x);
        return _mm_cvtsi128_si32(_mm_packs_epi16(shorts, shorts));
#else
        uint32_t word = 0;
        for (int i = 0; i < 4; i++) word |= ((uint32_t)x[i] & 0xff) << (8 * i);
        return (int32_t)word;
#endif
    }
};

struct PlainDot : Words {
    INLINE vi add(vi sum, vi w, vi x) {
        for (int i = 0; i < 4; i++) sum += (vi)(((vu)w >> (8 * i)) & 0xff) * ((vi)((vu)x << (24 - 8 * i)) >> 24);
        return sum;
    }
    INLINE vi total(vi sum, vi w, vi high) { return sum + (add(vi{}, w, high) << 7); }
};

#if BATON_WIDTH == 16 && defined(__AVX512VNNI__)

struct FusedDot : Words {
    INLINE vi add(vi sum, vi w, vi x) { return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x); }
    INLINE vi total(vi sum, vi w, vi high) { return sum + (add(vi{}, w, high) << 7); }
};
typedef FusedDot Dot4;
typedef FusedDot Dot8;

#elif BATON_WIDTH == 8 && (defined(__AVXVNNI__) || (defined(__AVX512VNNI__) && defined(__AVX512VL__)))

struct FusedDot : Words {
    INLINE vi add(vi sum, vi w, vi x) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
        return (vi)_mm256_dpbusd_epi32((__m256i)sum, (__m256i)w, (__m256i)x);
#else
        return (vi)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)x);
#endif
    }
    INLINE vi total(vi sum, vi w, vi high) { return sum + (add(vi{}, w, high) << 7); }
};
typedef FusedDot Dot4;
typedef FusedDot Dot8;

#elif (BATON_WIDTH == 16 && defined(__AVX512BW__)) || (BATON_WIDTH == 8 && defined(__AVX2__))

#if BATON_WIDTH == 16
INLINE vi multiply_bytes(vi u, vi s) { return (vi)_mm512_maddubs_epi16((__m512i)u, (__m512i)s); }
INLINE vi multiply_shorts(vi a, vi b) { return (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b); }
#else
INLINE vi multiply_bytes(vi u, vi s) { return (vi)_mm256_maddubs_epi16((__m256i)u, (__m256i)s); }
INLINE vi multiply_shorts(vi a, vi b) { return (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
#endif
typedef int16_t vs __attribute__((vector_size(4 * kWidth)));

// Weights up to 15: a lane's halves take pairs of products for a whole group, 8 * 2 * 15 * 127 = 30,480 < 2^15.
struct NibbleDot : Words {
    INLINE vi add(vi sum, vi w, vi x) { return in_order((vi)((vs)sum + (vs)multiply_bytes(w, x))); }
    INLINE vi total(vi sum, vi w, vi high) {
        vi low = multiply_shorts(sum, (vi)((vs){} + (int16_t)1));
        return low + multiply_shorts(multiply_bytes(w, high), (vi)((vs){} + (int16_t)128));
    }
};

// Weights up to 255 would overflow there: even and odd bytes widened to 16 bits, on both sides.
struct ByteDot {
    static constexpr bool kBytes = false;
    static constexpr int kWords = 2;
    struct Weight {
        vi even, odd;
    };
    typedef Weight Value;

    INLINE Weight weight(vi bytes) { return {bytes & 0x00ff00ff, (vi)((vu16)bytes >> 8)}; }
    INLINE Weight load(const void* p) { return {load_words(p), load_words((const char*)p + sizeof(vi))}; }
    INLINE void store(void* p, Weight w) {
        store_words(p, w.even);
        store_words((char*)p + sizeof(vi), w.odd);
    }
    template <int R>
    INLINE Value value(const int32_t* words, int row) {
        return {splat_word(words[row]), splat_word(words[R + row])};
    }
    INLINE int32_t pack(const vi numbers[32 / kWidth], int, int rows, int32_t* words) {
        alignas(64) int32_t all[32];
        for (int i = 0; i < 32 / kWidth; i++) store_words(all + i * kWidth, numbers[i]);
        for (int step = 0; step < 8; step++, words += 2 * rows) {
            const int32_t* a = all + 4 * step;
            words[0] = (int32_t)((uint16_t)a[0] | (uint32_t)a[2] << 16);
            words[rows] = (int32_t)((uint16_t)a[1] | (uint32_t)a[3] << 16);
        }
        return 0;
    }
    INLINE vi add(vi sum, Weight w, Value x) {
        return in_order(in_order(sum + multiply_shorts(w.even, x.even)) + multiply_shorts(w.odd, x.odd));
    }

  private:
    typedef uint16_t vu16 __attribute__((vector_size(4 * kWidth)));
};
typedef NibbleDot Dot4;
typedef ByteDot Dot8;

#else

typedef PlainDot Dot4;
typedef PlainDot Dot8;

#endif

}  // namespace
