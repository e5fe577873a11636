/* Indexer scores of query rows against a range of keys, which stand side by side in vectors.

   Keys are packed once, in panels of PANEL keys: [panel][word][key]. A tile keeps the dots of a few heads with a panel in
   registers; the relu and the head weights are applied to them there. */
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

/* Packs the panels [begin, end) of index_k [s, words]; keys from s on are 0. */
EXPORT int pack_keys(const word *keys, word *panels, int64_t begin, int64_t end, int64_t num_keys, int64_t count) {
    for (int64_t p = begin; p < end; p++) {
        word *panel = panels + p * PANEL * count;
        int64_t some = at_most(PANEL, num_keys - p * PANEL);
        for (int64_t w = 0; w < count; w++) {
            for (int64_t k = 0; k < some; k++) panel[w * PANEL + k] = keys[(p * PANEL + k) * count + w];
            for (int64_t k = some; k < PANEL; k++) panel[w * PANEL + k] = 0;
        }
    }
    return 0;
}

/* Adds weight * gate(dot) of `heads` heads to a part of a panel's scores. */
INLINE void score_tile(const int heads, const int relu, float *scores, const word *query, const float *weights,
                       const word *panel, int64_t count) {
    vec sum[HEADS][PART] = {{{0}}};
    const word *row[HEADS];
    UNROLL for (int h = 0; h < heads; h++) row[h] = query + h * count;
    for (int64_t w = 0; w < count; w++) {
        words key[PART];
        UNROLL for (int v = 0; v < PART; v++) key[v] = load_words(panel + w * PANEL + v * LANES);
        UNROLL for (int h = 0; h < heads; h++)
            UNROLL for (int v = 0; v < PART; v++) sum[h][v] = add_product(sum[h][v], row[h][w], key[v]);
    }
    UNROLL for (int v = 0; v < PART; v++) {
        vec score = load(scores + v * LANES);
        UNROLL for (int h = 0; h < heads; h++) score += weights[h] * (relu ? positive_part(sum[h][v]) : sum[h][v]);
        store(scores + v * LANES, score);
    }
}

INLINE void score_panel(const int relu, float *scores, const word *query, const float *weights, const word *panel, int64_t heads,
                        int64_t count) {
    for (int64_t part = 0; part < PANEL; part += PART * LANES) {
        int64_t h = 0;
#define TILE(n) score_tile(n, relu, scores + part, query + h * count, weights + h, panel + part, count)
        for (; h + HEADS <= heads; h += HEADS) TILE(HEADS);
        switch (heads - h) {
        case 3: TILE(3); break;
        case 2: TILE(2); break;
        case 1: TILE(1); break;
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

/* Scores of the query rows [begin, end) in a table [rows][width] whose first column is key `column`, a multiple of PANEL.

   q [t, heads, words], weights [t, heads], panels as pack_keys makes them. Row i is written for the panels that hold its
   window [first, first + count), and only its columns within are right; others hold anything. */
EXPORT int indexer_scores(const word *q, const float *weights, const word *panels, const int32_t *first, const int32_t *count,
                          float *table, int64_t width, int64_t column, int64_t begin, int64_t end, int64_t heads, int64_t words_,
                          double scale, int relu) {
    int64_t lowest = INT64_MAX, highest = 0;
    for (int64_t row = begin; row < end; row++)
        if (count[row] > 0) {
            lowest = at_most(lowest, first[row] / PANEL);
            highest = -at_most(-highest, -(int64_t)((first[row] + count[row] - 1) / PANEL + 1));
        }
    for (int64_t p = lowest; p < highest; p++)
        for (int64_t row = begin; row < end; row++) {
            if (count[row] <= 0 || p < first[row] / PANEL || p > (first[row] + count[row] - 1) / PANEL) continue;
            float *scores = table + (row - begin) * width + p * PANEL - column;
            memset(scores, 0, sizeof(float) * PANEL);
            (relu ? score_with_relu : score_without)(scores, q + row * heads * words_, weights + row * heads,
                                                     panels + p * PANEL * words_, heads, words_);
            /* -0 + 0 is 0. */
            for (int64_t k = 0; k < PANEL; k += LANES) store(scores + k, load(scores + k) * (float)scale + 0.0f);
        }
    return 0;
}
