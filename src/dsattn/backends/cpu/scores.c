/* Indexer scores of query rows against a range of keys, which stand side by side in vectors.

   Keys are packed once, in panels of PANEL keys: [panel][word][key]. A tile keeps the dots of a few heads with a panel
   in registers; the relu and the head weights are applied to them there. */
#include "vector.h"

#define PANEL 64
#define VECTORS ((int)(PANEL / LANES))

/* As many heads and vectors as registers hold. */
#if defined(__AVX512F__)
#define HEADS 4
#define PART 4
#else
#define HEADS 4
#define PART 2
#endif

/* Rows [rows][count] as columns [count][stride], the rows from the last one on to `stride` 0. */
static void pack(word *to, const word *from, int64_t rows, int64_t count, int64_t stride) {
    /* A strip of words at a time: what is written stays in the nearest cache until its lines are full. */
    for (int64_t begin = 0; begin < count; begin += 16) {
        int64_t end = at_most(begin + 16, count);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t w = begin; w < end; w++) to[w * stride + r] = from[r * count + w];
        for (int64_t w = begin; w < end; w++)
            for (int64_t r = rows; r < stride; r++) to[w * stride + r] = 0;
    }
}

/* Packs the panels [begin, end) of index_k [s, words]; keys from s on are 0. */
EXPORT int pack_keys(const word *keys, word *panels, int64_t begin, int64_t end, int64_t num_keys, int64_t count) {
    for (int64_t p = begin; p < end; p++)
        pack(panels + p * PANEL * count, keys + p * PANEL * count, at_most(PANEL, num_keys - p * PANEL), count, PANEL);
    return 0;
}

/* Adds weight * gate(dot) of `heads` heads to a part of a panel's scores. */
INLINE void score_tile(const int heads, const int relu, float *scores, const word *query, const float *weights,
                       const word *panel, int64_t count) {
    vec sum[HEADS][PART] = {{{0}}};
    const word *row[HEADS];
    EACH (h, heads) row[h] = query + h * count;
    for (int64_t w = 0; w < count; w++) {
        words key[PART];
        EACH (v, PART) key[v] = load_words(panel + w * PANEL + v * LANES);
        EACH (h, heads)
            EACH (v, PART) sum[h][v] = add_product(sum[h][v], row[h][w], key[v]);
    }
    EACH (v, PART) {
        vec score = load(scores + v * LANES);
        EACH (h, heads) score += weights[h] * (relu ? positive_part(sum[h][v]) : sum[h][v]);
        store(scores + v * LANES, score);
    }
}

INLINE void score_panel(const int relu, float *scores, const word *query, const float *weights, const word *panel,
                        int64_t heads, int64_t count) {
    for (int64_t part = 0; part < PANEL; part += PART * LANES) {
        int64_t h = 0;
#define TILE(n) score_tile(n, relu, scores + part, query + h * count, weights + h, panel + part, count)
        for (; h + HEADS <= heads; h += HEADS) TILE(HEADS);
        switch (heads - h) {
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
}

NOINLINE void score_with_relu(float *scores, const word *query, const float *weights, const word *panel, int64_t heads,
                              int64_t count) {
    score_panel(1, scores, query, weights, panel, heads, count);
}

NOINLINE void score_without(float *scores, const word *query, const float *weights, const word *panel, int64_t heads,
                            int64_t count) {
    score_panel(0, scores, query, weights, panel, heads, count);
}

/* Scores of the query rows [begin, end) in a table [rows][width] whose first column is key `column`.

   q [t, heads, words], weights [t, heads], panels as pack_keys makes them. Only the windows [first, first + count) of
   the rows are written. */
EXPORT int indexer_scores(const word *q, const float *weights, const word *panels, const int32_t *first,
                          const int32_t *count, float *table, int64_t width, int64_t column, int64_t begin, int64_t end,
                          int64_t heads, int64_t row_words, double scale, int relu) {
    int64_t lowest = INT64_MAX, highest = 0;
    for (int64_t row = begin; row < end; row++) {
        if (count[row] <= 0) continue;
        int64_t last = (first[row] + (int64_t)count[row] - 1) / PANEL;
        lowest = at_most(lowest, first[row] / PANEL);
        highest = last + 1 > highest ? last + 1 : highest;
    }
    for (int64_t p = lowest; p < highest; p++)
        for (int64_t row = begin; row < end; row++) {
            int64_t from = p * PANEL, to = at_most(from + PANEL, first[row] + (int64_t)count[row]);
            int64_t skipped = first[row] > from ? first[row] - from : 0;
            if (from + skipped >= to) continue;
            float scores[PANEL] = {0};
            (relu ? score_with_relu : score_without)(scores, q + row * heads * row_words, weights + row * heads,
                                                     panels + p * PANEL * row_words, heads, row_words);
            /* -0 + 0 is 0. */
            for (int64_t k = 0; k < PANEL; k += LANES) store(scores + k, load(scores + k) * (float)scale + 0.0f);
            memcpy(table + (row - begin) * width + from + skipped - column, scores + skipped,
                   sizeof(float) * (to - from - skipped));
        }
    return 0;
}
