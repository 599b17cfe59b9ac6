// Exact integer products of weights (bytes 0 .. 255, or 0 .. 15) and activations (-127 .. 127), four to a lane.
//
// A vector of weights holds, for each of kWidth outputs, four consecutive k; a word of activations the same four of
// one row. What differs between machines is how the products are added up; the sum of a group of 32 is the same
// integer everywhere. A `Dot` says: how a group's words lie (kWords each step of four), what a loaded vector of
// weights becomes, and the adding.

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

// A step's four activations in one word, a weight vector as it is.
struct Words {
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
    // words[step * R]: a group's bytes as a row of a panel of R.
    INLINE void pack(const int8_t bytes[32], int rows, int32_t* words) {
        for (int step = 0; step < 8; step++) memcpy(words + step * rows, bytes + 4 * step, 4);
    }
};

struct PlainDot : Words {
    INLINE vi add(vi sum, vi w, vi x) {
        for (int i = 0; i < 4; i++) sum += (vi)(((vu)w >> (8 * i)) & 0xff) * ((vi)((vu)x << (24 - 8 * i)) >> 24);
        return sum;
    }
    INLINE vi total(vi sum) { return sum; }
};

#if BATON_WIDTH == 16 && defined(__AVX512VNNI__)

struct FusedDot : Words {
    INLINE vi add(vi sum, vi w, vi x) { return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x); }
    INLINE vi total(vi sum) { return sum; }
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
    INLINE vi total(vi sum) { return sum; }
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
    INLINE vi total(vi sum) { return multiply_shorts(sum, (vi)((vs){} + (int16_t)1)); }
};

// Weights up to 255 would overflow there: even and odd bytes widened to 16 bits, on both sides.
struct ByteDot {
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
    INLINE void pack(const int8_t bytes[32], int rows, int32_t* words) {
        for (int step = 0; step < 8; step++, bytes += 4, words += 2 * rows) {
            words[0] = (int32_t)((uint16_t)bytes[0] | (uint32_t)bytes[2] << 16);
            words[rows] = (int32_t)((uint16_t)bytes[1] | (uint32_t)bytes[3] << 16);
        }
    }
    INLINE vi add(vi sum, Weight w, Value x) {
        return in_order(in_order(sum + multiply_shorts(w.even, x.even)) + multiply_shorts(w.odd, x.odd));
    }
    INLINE vi total(vi sum) { return sum; }

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
