/* Types of one build: a dtype (BF16 or F32 is defined) and the vectors of the instruction set that is compiled for.

   Products run over words: a word is what one lane of a vector holds of the dimension that is summed over. It is one
   number of fp32, and two neighbours of bf16, whose products are added up in fp32. */
#pragma once

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#include <immintrin.h>
#elif defined(__AVX2__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

#define INLINE static inline __attribute__((always_inline))
#define LOCAL static __attribute__((unused))
#define NOINLINE LOCAL __attribute__((noinline))
#define EXPORT __attribute__((visibility("default")))
/* A loop over a tile, whose sums are registers: it has to be unrolled. */
#define EACH(i, n) _Pragma("GCC unroll 16") for (int i = 0; i < (n); i++)

#if defined(BF16)
typedef uint32_t word;
typedef uint16_t element;
#define WORD_ELEMENTS 2
#else
typedef float word, element;
#define WORD_ELEMENTS 1
#endif

/* Aligned as its elements are: rows of the caller's tensors begin anywhere. */
typedef float vec __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(float)), may_alias));
typedef int32_t mask __attribute__((vector_size(VECTOR_BYTES)));
#define LANES ((int64_t)(VECTOR_BYTES / sizeof(float)))

/* Callers pad columns to a multiple of this many, whatever the vectors; heads are padded to the lanes here. */
#define PAD 16
/* Keys that are worked on at once. */
#define KEYS 64

INLINE int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t padded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

INLINE vec load(const float *from) { return *(const vec *)from; }
INLINE void store(float *to, vec x) { *(vec *)to = x; }
INLINE vec splat(float x) { return x - (vec){0}; }
INLINE vec pick(mask which, vec a, vec b) { return (vec)((which & (mask)a) | (~which & (mask)b)); }

/* x in the lanes of heads that there are, from head `first` of `heads` on; 0, whatever x is, in padded ones. */
INLINE vec of_heads(vec x, int64_t first, int64_t heads) {
    if (first + LANES <= heads) return x;
    mask real_head;
    for (int64_t i = 0; i < LANES; i++) real_head[i] = -(int32_t)(first + i < heads);
    return (vec)((mask)x & real_head);
}

INLINE float lane_sum(vec x) {
    float sum[LANES];
    store(sum, x);
    for (int64_t half = LANES / 2; half > 0; half /= 2)
        for (int64_t i = 0; i < half; i++) sum[i] += sum[i + half];
    return sum[0];
}

/* a where it is above b, else b: of a NaN in b, b. */
INLINE vec above(vec a, vec b) {
#if VECTOR_BYTES == 64
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return pick(a > b, a, b);
#endif
}

/* max(x, 0), which leaves NaN as it is. */
INLINE vec positive_part(vec x) { return above(splat(0), x); }

/* e to the x: 0 from far enough below on, NaN of NaN. */
INLINE vec exponential(vec x) {
    /* x = n ln 2 + r; adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits. */
    const vec shift = splat(12582912.0f), lowest = splat(-110.0f);
    x = -above(splat(-89.0f), -above(lowest, x));
    vec shifted = x * 1.44269504f + shift, n = shifted - shift;
    vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    vec p = r * (1.0f / 5040) + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * (r * r) + r + 1.0f;
#if VECTOR_BYTES == 64
    return (vec)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    /* In two steps, since 2^n may be no normal number. */
    mask power = (mask)shifted - (mask)shift, half = power >> 1;
    return p * (vec)((half + 127) << 23) * (vec)((power - half + 127) << 23);
#endif
}

#if defined(BF16)

typedef uint32_t words __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));

INLINE words load_words(const word *from) { return *(const words *)from; }

INLINE vec add_products(vec sum, words a, words b) {
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
INLINE vec add_product(vec sum, word a, words b) { return add_products(sum, (words)_mm512_set1_epi32((int)a), b); }

/* Two vectors rounded to bf16, as words that hold a lane of `low` and the same lane of `high`. */
INLINE words pair(vec low, vec high) {
    __m512i l = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)low));
    __m512i h = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)high));
    return (words)_mm512_or_si512(l, _mm512_slli_epi32(h, 16));
}

/* 16 numbers rounded to bf16, one after the other. */
INLINE void store_rounded(element *to, vec x) {
    _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh((__m512)x));
}

INLINE float number(element x) {
    union {
        uint32_t bits;
        float number;
    } whole = {(uint32_t)x << 16};
    return whole.number;
}

/* Two rows of `columns` elements, a multiple of 16, as one row of words with a column in each. */
NOINLINE void interleave(word *to, const element *low, const element *high, int64_t columns) {
    /* Element i of the first row is number i, of the second row number 32 + i. */
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i first = _mm512_or_si512(_mm512_slli_epi32(_mm512_add_epi32(lane, _mm512_set1_epi32(32)), 16), lane);
    const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
    int64_t c = 0;
    for (; c + 2 * LANES <= columns; c += 2 * LANES) {
        __m512i l = _mm512_loadu_si512(low + c), h = _mm512_loadu_si512(high + c);
        _mm512_storeu_si512(to + c, _mm512_permutex2var_epi16(l, first, h));
        _mm512_storeu_si512(to + c + LANES, _mm512_permutex2var_epi16(l, second, h));
    }
    for (; c < columns; c += LANES) {
        __m512i l = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(low + c)));
        __m512i h = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(high + c)));
        _mm512_storeu_si512(to + c, _mm512_or_si512(l, _mm512_slli_epi32(h, 16)));
    }
}

#else

typedef vec words;

INLINE words load_words(const word *from) { return load(from); }
INLINE vec add_products(vec sum, words a, words b) { return sum + a * b; }
INLINE vec add_product(vec sum, word a, words b) { return sum + a * b; }
INLINE void store_rounded(element *to, vec x) { store(to, x); }
INLINE float number(element x) { return x; }

#endif

/* Two neighbouring words, again and again. */
INLINE words splat_two(const word *from) {
    typedef int64_t longs __attribute__((vector_size(VECTOR_BYTES)));
    int64_t both;
    memcpy(&both, from, sizeof both);
    return (words)(both - (longs){0});
}

/* Sums of neighbouring lanes, those of a first. */
INLINE vec sum_of_twos(vec a, vec b) {
#if VECTOR_BYTES == 64
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    return (vec)_mm512_add_ps(_mm512_permutex2var_ps((__m512)a, even, (__m512)b),
                              _mm512_permutex2var_ps((__m512)a, odd, (__m512)b));
#else
    vec sum;
    for (int64_t i = 0; i < LANES; i++) {
        vec from = i < LANES / 2 ? a : b;
        sum[i] = from[2 * i % LANES] + from[2 * i % LANES + 1];
    }
    return sum;
#endif
}
