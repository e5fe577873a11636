/* The two products that every operator is made of.

   dots: keys x heads. Keys are rows at any address, so nothing is gathered; heads stand side by side in vectors.
   mix:  rows x columns. What is summed over (keys, or heads) are rows at any address; columns stand side by side. */
#pragma once

#include "keys.h"

/* Words of a dot that are added up before the next ones: a sum of sums of few loses fewer digits than one of all. */
#define DOT_WORDS 128

/* A tile is ROWS x COLUMNS vectors, held in registers. In that of `dots` a vector holds two words of a head side by
   side: then one load of two words of a key serves twice as many products. */
#if defined(__AVX512F__)
#define DOT_ROWS 8
#define MIX_ROWS 4
#define MIX_COLUMNS 4
#else
#define DOT_ROWS 4
#define MIX_ROWS 4
#define MIX_COLUMNS 2
#endif

INLINE void dot_tile(const int columns, float *sums, int64_t stride, const word *const *rows, const word *heads,
                     int64_t panel, int64_t begin, int64_t end) {
    vec sum[DOT_ROWS][2] = {{{0}}};
    const word *row[DOT_ROWS];
    EACH (r, DOT_ROWS) row[r] = rows[r];
    for (int64_t w = begin; w < end; w += 2) {
        words head[2];
        EACH (c, columns) head[c] = load_words(heads + w * panel + c * LANES);
        EACH (r, DOT_ROWS) {
            words key = splat_two(row[r] + w);
            EACH (c, columns) sum[r][c] = add_products(sum[r][c], key, head[c]);
        }
    }
    EACH (r, DOT_ROWS) {
        vec whole = sum_of_twos(sum[r][0], sum[r][1]);
        if (begin) whole += load(sums + r * stride);
        store(sums + r * stride, whole);
    }
}

/* Not inlined: the registers of a tile are all that there are. */
#define DOT_TILE(columns)                                                                                     \
    NOINLINE void dot_tile_##columns(float *sums, int64_t stride, const word *const *rows, const word *heads, \
                                     int64_t panel, int64_t count, errand *meanwhile) {                       \
        for (int64_t w = 0; w < count; w += DOT_WORDS) {                                                      \
            dot_tile(columns, sums, stride, rows, heads, panel, w, at_most(w + DOT_WORDS, count));            \
            run_errand(meanwhile, 3);                                                                         \
        }                                                                                                     \
    }
DOT_TILE(1)
DOT_TILE(2)

/* sums[key][head] = sum over words of rows[key][w] * heads[w][head].

   sums: [keys][padded heads]. rows: one address for each of `keys`, which is a multiple of 8. heads: `count` words, an
   even number, of `number` heads, as pack_heads makes them. meanwhile: rows that are needed next. */
LOCAL void dots(float *sums, const word *const *rows, int64_t keys, const word *heads, int64_t number, int64_t count,
                errand meanwhile) {
    int64_t wide = padded(number, LANES);
    for (int64_t key = 0; key < keys; key += DOT_ROWS)
        for (int64_t h = 0; h < number; h += LANES)
            (number - h > LANES / 2 ? dot_tile_2 : dot_tile_1)(sums + key * wide + h, wide, rows + key, heads + 2 * h,
                                                               wide, count, &meanwhile);
}

/* The heads of one query row, [heads][words], as vectors of two words of half as many heads as there are lanes:
   [words / 2][2 * padded heads / lanes][lanes / 2][2]. Padded heads are 0. */
LOCAL void pack_heads(word *to, const word *from, int64_t heads, int64_t count) {
    int64_t wide = padded(heads, LANES);
    for (int64_t w = 0; w < count; w += 2) {
        word *vectors = to + w * wide;
        for (int64_t h = 0; h < heads; h++) memcpy(vectors + 2 * h, from + h * count + w, 2 * sizeof(word));
        memset(vectors + 2 * heads, 0, 2 * sizeof(word) * (wide - heads));
    }
}

INLINE void mix_tile(const int rows, const int columns, float *const *to, int64_t to_column, const float *kept,
                     const word *factors, int64_t next_word, int64_t next_row, const word *const *from,
                     int64_t from_column, int64_t scaled, float scale, int64_t count) {
    vec sum[MIX_ROWS][MIX_COLUMNS] = {{{0}}};
    const word *factor[MIX_ROWS];
    EACH (r, rows) factor[r] = factors + r * next_row;
    int64_t w = 0;
    for (int part = scaled == 0; part < 2; part++) {
        for (int64_t end = part ? count : scaled; w < end; w++) {
            words x[MIX_COLUMNS];
            EACH (c, columns) x[c] = load_words(from[w] + from_column + c * LANES);
            EACH (r, rows)
                EACH (c, columns) sum[r][c] = add_product(sum[r][c], factor[r][w * next_word], x[c]);
        }
        if (part == 0)
            EACH (r, rows)
                EACH (c, columns) sum[r][c] *= scale;
    }
    EACH (r, rows)
        EACH (c, columns) {
            float *place = to[r] + to_column + c * LANES;
            vec before = load(place);
            if (kept) before *= kept[r];
            store(place, before + sum[r][c]);
        }
}

INLINE void mix_rows(const int columns, float *const *to, int64_t rows, int64_t to_column, const float *kept,
                     const word *factors, int64_t next_word, int64_t next_row, const word *const *from,
                     int64_t from_column, int64_t scaled, float scale, int64_t count) {
#define TILE(n)                                                                                                     \
    mix_tile(n, columns, to + r, to_column, kept ? kept + r : 0, factors + r * next_row, next_word, next_row, from, \
             from_column, scaled, scale, count)
    int64_t r = 0;
    for (; r + MIX_ROWS <= rows; r += MIX_ROWS) TILE(MIX_ROWS);
    switch (rows - r) {
    case 3:
        TILE(3);
        break;
    case 2:
        TILE(2);
        break;
    case 1:
        TILE(1);
        break;
    }
#undef TILE
}

/* to[row][to_column + c] = kept[row] * itself + sum over words of factor(w, row) * from[w][from_column + c].

   c runs over `columns`.

   to: `rows` addresses. columns: a multiple of the lanes. kept: NULL for all 1. factor(w, row) is
   factors[w * next_word + row * next_row]. from: `count` addresses of rows of words; what the first `scaled` of them
   sum up to is multiplied by `scale`. */
NOINLINE void mix(float *const *to, int64_t rows, int64_t to_column, int64_t columns, const float *kept,
                  const word *factors, int64_t next_word, int64_t next_row, const word *const *from,
                  int64_t from_column, int64_t scaled, float scale, int64_t count) {
#define COLUMNS(n)                                                                                                 \
    mix_rows(n, to, rows, to_column + c, kept, factors, next_word, next_row, from, from_column + c, scaled, scale, \
             count)
    int64_t c = 0;
    for (; c + MIX_COLUMNS * LANES <= columns; c += MIX_COLUMNS * LANES) COLUMNS(MIX_COLUMNS);
    for (; c < columns; c += LANES) COLUMNS(1);
#undef COLUMNS
}

/* What `mix` sums over, for `count` rows: the rows themselves, or pairs of them as rows of words in `buffer`.

   Returns how many words. With an odd number of rows the last one is paired with `nothing`. */
LOCAL int64_t mixed_rows(const word **to, const element *const *rows, int64_t count, word *buffer, int64_t column,
                         int64_t columns, const element *nothing) {
#if defined(BF16)
    for (int64_t i = 0; i < count; i += 2) {
        to[i / 2] = buffer + i / 2 * columns;
        interleave(buffer + i / 2 * columns, rows[i] + column, i + 1 < count ? rows[i + 1] + column : nothing, columns);
    }
    return (count + 1) / 2;
#else
    (void)buffer, (void)columns, (void)nothing;
    for (int64_t i = 0; i < count; i++) to[i] = rows[i] + column;
    return count;
#endif
}

/* mix over the first `columns` columns of up to KEYS rows of elements, times `scale`; factors are [words][stride]. */
LOCAL void mix_keys(float *const *to, int64_t rows, int64_t columns, const float *kept, const word *factors,
                    int64_t stride, const element *const *keys, int64_t count, float scale, const element *nothing) {
    /* A strip of columns at a time, so that pairs of rows stay in the nearest cache. */
    enum { STRIP = WORD_ELEMENTS == 1 ? 1 << 20 : 64 };
    word buffer[WORD_ELEMENTS == 1 ? 1 : KEYS / 2 * STRIP];
    const word *from[KEYS];
    for (int64_t c = 0; c < columns; c += STRIP) {
        int64_t wide = at_most(STRIP, columns - c);
        int64_t words = mixed_rows(from, keys, count, buffer, c, wide, nothing);
        mix(to, rows, c, wide, kept, factors, stride, 1, from, 0, scale == 1 ? 0 : words, scale, words);
    }
}
