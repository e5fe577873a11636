/* Indexer scores over the keys of each query row, wherever they are, and their gradients.

   d_weights = sum over keys of d_score * gate(dot)      d_dot = d_score * weight where the gate is open
   d_index_q = d_dot . index_k      d_index_k = d_dot . index_q */
#include "rows.h"

typedef struct {
    const element *rows[KEYS];
    float *key_results[KEYS];
    element *nothing;
    word *heads, *factors, *key_factors, *row_buffer;
    const word **row_mixed;
    const element **head_rows;
    float *sums, *weights, *d_weights, *result, **result_rows;
} indexer_scratch;

static int64_t indexer_buffers(indexer_scratch *s, arena *from, int64_t heads, int64_t width) {
    int64_t wide = padded(heads, LANES);
    s->nothing = (element *)TAKE(from, word, width);
    s->heads = TAKE(from, word, width / WORD_ELEMENTS * wide);
    s->factors = TAKE(from, word, KEYS / WORD_ELEMENTS * wide);
    s->key_factors = TAKE(from, word, KEYS * wide / WORD_ELEMENTS);
    s->row_buffer = TAKE(from, word, WORD_ELEMENTS == 2 ? (heads + 1) / 2 * width : 0);
    s->row_mixed = TAKE(from, const word *, wide);
    s->head_rows = TAKE(from, const element *, heads);
    s->sums = TAKE(from, float, KEYS *wide);
    s->weights = TAKE(from, float, wide);
    s->d_weights = TAKE(from, float, wide);
    s->result = TAKE(from, float, heads *width);
    s->result_rows = TAKE(from, float *, heads);
    return from->used;
}

static int prepare(indexer_scratch *s, arena *memory, int64_t heads, int64_t width) {
    memory->base = aligned_alloc(64, indexer_buffers(s, memory, heads, width));
    if (!memory->base) return 1;
    memory->used = 0;
    indexer_buffers(s, memory, heads, width);
    memset(s->nothing, 0, sizeof(word) * width);
    for (int64_t h = 0; h < heads; h++) s->result_rows[h] = s->result + h * width;
    return 0;
}

static void begin_row(indexer_scratch *s, const element *query, const float *weights, int64_t heads, int64_t width) {
    int64_t wide = padded(heads, LANES);
    pack_heads(s->heads, (const word *)query, heads, width / WORD_ELEMENTS);
    for (int64_t h = 0; h < wide; h++) s->weights[h] = h < heads ? weights[h] : 0;
}

/* Scores of the query rows [begin, end) in a table [rows][columns]; see table_column.

   index_q [t, heads, width], weights [t, heads], index_k [s, width]; width is a multiple of 16. See keys_of for ids,
   slots, first and count. Returns 0, or 1 without memory. */
EXPORT int gathered_scores(const element *index_q, const float *weights, const element *index_k, const int32_t *ids,
                           int64_t slots, const int32_t *first, const int32_t *count, float *table, int64_t columns,
                           int64_t column, int64_t begin, int64_t end, int64_t heads, int64_t width, double scale,
                           int relu) {
    indexer_scratch s;
    arena memory = {0};
    if (prepare(&s, &memory, heads, width)) return 1;
    int64_t wide = padded(heads, LANES);
    for (int64_t row = begin; row < end; row++) {
        keys_of_row keys = keys_of(ids, slots, first, count, row);
        if (keys.count <= 0) continue;
        float *scores = table + (row - begin) * columns + table_column(keys, column);
        begin_row(&s, index_q + row * heads * width, weights + row * heads, heads, width);
        for (int64_t slot = 0; slot < keys.count; slot += KEYS) {
            int64_t found = key_rows(s.rows, keys, slot, index_k, width, s.nothing);
            dots(s.sums, (const word *const *)s.rows, padded(found, DOT_ROWS), s.heads, heads, width / WORD_ELEMENTS,
                 errand_for(keys, slot + KEYS, index_k, width * sizeof(element)));
            for (int64_t j = 0; j < found; j++) {
                vec sum = splat(0);
                for (int64_t h = 0; h < wide; h += LANES) {
                    vec dot = load(s.sums + j * wide + h);
                    if (relu) dot = positive_part(dot);
                    sum += of_heads(dot * load(s.weights + h), h, heads);
                }
                /* -0 + 0 is 0. */
                scores[slot + j] = lane_sum(sum) * (float)scale + 0.0f;
            }
        }
    }
    free(memory.base);
    return 0;
}

/* Factors of a block of keys: d_dots as words along keys, and as words along heads; d_weights is added to. */
static void gradient_block(indexer_scratch *s, const float *d_scores, int64_t keys, int64_t heads, float scale,
                           int relu) {
    int64_t wide = padded(heads, LANES);
    element *of_key = (element *)s->key_factors;
    for (int64_t h = 0; h < wide; h += LANES) {
        vec d_weights = load(s->d_weights + h), weights = load(s->weights + h), before = splat(0);
        for (int64_t j = 0; j < padded(keys, WORD_ELEMENTS); j++) {
            vec d = splat(0);
            if (j < keys) {
                vec dot = load(s->sums + j * wide + h), d_score = splat(d_scores[j] * scale);
                d = d_score * weights;
                /* Not where dot > 0: a NaN must not hide behind the gate. */
                if (relu) d = pick(dot <= 0, splat(0), d), dot = positive_part(dot);
                d = of_heads(d, h, heads);
                d_weights += d_score * dot;
                store_rounded(of_key + j * wide + h, d);
            }
#if defined(BF16)
            if (j % 2) *(words *)(s->factors + j / 2 * wide + h) = pair(before, d);
            before = d;
#endif
        }
        (void)before;
        store(s->d_weights + h, d_weights);
    }
}

/* Gradients for the query rows [begin, end): d_index_q and d_weights are written, d_index_k [s, width] added to.

   d_scores: a table as gathered_scores has it. Rows without keys are left as they are. Returns 0, or 1 without
   memory. */
EXPORT int scores_backward(const element *index_q, const float *weights, const element *index_k, const int32_t *ids,
                           int64_t slots, const int32_t *first, const int32_t *count, const float *d_scores,
                           int64_t columns, int64_t column, element *d_index_q, float *d_index_k, float *d_weights,
                           int64_t begin, int64_t end, int64_t heads, int64_t width, double scale, int relu) {
    indexer_scratch s;
    arena memory = {0};
    if (prepare(&s, &memory, heads, width)) return 1;
    int64_t wide = padded(heads, LANES), all = wide / WORD_ELEMENTS, used = (heads + WORD_ELEMENTS - 1) / WORD_ELEMENTS;
    for (int64_t row = begin; row < end; row++) {
        keys_of_row keys = keys_of(ids, slots, first, count, row);
        if (keys.count <= 0) continue;
        const element *query = index_q + row * heads * width;
        const float *given = d_scores + (row - begin) * columns + table_column(keys, column);
        begin_row(&s, query, weights + row * heads, heads, width);
        for (int64_t h = 0; h < heads; h++) s.head_rows[h] = query + h * width;
        mixed_rows(s.row_mixed, s.head_rows, heads, s.row_buffer, 0, width, s.nothing);
        memset(s.result, 0, sizeof(float) * heads * width);
        memset(s.d_weights, 0, sizeof(float) * wide);
        for (int64_t slot = 0; slot < keys.count; slot += KEYS) {
            int64_t found = key_rows(s.rows, keys, slot, index_k, width, s.nothing);
            for (int64_t j = 0; j < found; j++) s.key_results[j] = d_index_k + key_at(keys, slot + j) * width;
            dots(s.sums, (const word *const *)s.rows, padded(found, DOT_ROWS), s.heads, heads, width / WORD_ELEMENTS,
                 errand_for(keys, slot + KEYS, index_k, width * sizeof(element)));
            gradient_block(&s, given + slot, found, heads, (float)scale, relu);
#if defined(BF16)
            mix_keys(s.result_rows, heads, width, NULL, s.factors, wide, s.rows, found, 1, s.nothing);
#else
            mix_keys(s.result_rows, heads, width, NULL, s.key_factors, wide, s.rows, found, 1, s.nothing);
#endif
            mix(s.key_results, found, 0, width, NULL, s.key_factors, 1, all, s.row_mixed, 0, 0, 1, used);
        }
        for (int64_t c = 0; c < heads * width; c += LANES)
            store_rounded(d_index_q + row * heads * width + c, load(s.result + c));
        memcpy(d_weights + row * heads, s.d_weights, sizeof(float) * heads);
    }
    free(memory.base);
    return 0;
}
