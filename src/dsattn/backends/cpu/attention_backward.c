/* Gradients of attention: logits are computed again, probabilities come from the log-sum-exp of the forward.

   p = exp(logit - lse)      d_logit = p * (d_out . v - delta)      delta = d_out . out
   d_q = scale * d_logit . kv      d_kv = scale * d_logit . q + (p . d_out in the value's columns)

   Gradients of keys are added to rows all over memory. So keys are taken range by range, each for all rows of a call:
   what belongs to a range stays in the cache. */
#include "rows.h"

/* Bytes of key gradients in a range. */
#define RANGE_BYTES ((int64_t)4 << 20)

typedef struct {
    const element *rows[KEYS];
    float *key_results[KEYS];
    element *nothing;
    word *heads, *upstream_heads, *factors, *key_factors, *row_buffer;
    const word **row_mixed;
    const element **head_rows;
    float *sums, *upstream_sums, *lse, *delta, *results, **result_rows;
    int64_t *slots;
} backward_scratch;

static int64_t backward_buffers(backward_scratch *s, arena *from, int64_t rows, int64_t heads, int64_t width,
                                int64_t values) {
    int64_t wide = padded(heads, LANES), pairs = WORD_ELEMENTS == 2;
    s->nothing = (element *)TAKE(from, word, width);
    s->heads = TAKE(from, word, width / WORD_ELEMENTS * wide);
    s->upstream_heads = TAKE(from, word, values / WORD_ELEMENTS * wide);
    s->factors = TAKE(from, word, KEYS / WORD_ELEMENTS * wide);
    s->key_factors = TAKE(from, word, KEYS * 2 * wide / WORD_ELEMENTS + wide);
    s->row_buffer = TAKE(from, word, pairs ? (heads + 1) / 2 * (width + values) : 0);
    s->row_mixed = TAKE(from, const word *, 2 * wide);
    s->head_rows = TAKE(from, const element *, heads);
    s->sums = TAKE(from, float, KEYS *wide);
    s->upstream_sums = TAKE(from, float, KEYS *wide);
    s->lse = TAKE(from, float, wide);
    s->delta = TAKE(from, float, wide);
    s->results = TAKE(from, float, rows * heads * width);
    s->slots = TAKE(from, int64_t, rows);
    s->result_rows = TAKE(from, float *, heads);
    return from->used;
}

INLINE int64_t head_words(int64_t heads) { return (heads + WORD_ELEMENTS - 1) / WORD_ELEMENTS; }

/* d_logit of one key and LANES heads; their probabilities take the place of the logits. */
INLINE vec logit_gradient(backward_scratch *s, int64_t place, int64_t head, int64_t heads, float scale) {
    vec p = of_heads(exponential(load(s->sums + place) * scale - load(s->lse + head)), head, heads);
    store(s->sums + place, p);
    return of_heads(p * (load(s->upstream_sums + place) - load(s->delta + head)), head, heads);
}

/* Factors of a block of keys: d_logits as words along keys, and of each key d_logits, then probabilities, of heads. */
static void backward_block(backward_scratch *s, int64_t keys, int64_t heads, float scale) {
    int64_t wide = padded(heads, LANES), all = wide / WORD_ELEMENTS;
    for (int64_t j = 0; j < keys; j += WORD_ELEMENTS)
        for (int64_t h = 0; h < wide; h += LANES) {
            vec d = logit_gradient(s, j * wide + h, h, heads, scale);
            store_rounded((element *)(s->key_factors + j * 2 * all) + h, d);
#if defined(BF16)
            vec next = splat(0);
            if (j + 1 < keys) {
                next = logit_gradient(s, (j + 1) * wide + h, h, heads, scale);
                store_rounded((element *)(s->key_factors + (j + 1) * 2 * all) + h, next);
            }
            *(words *)(s->factors + j / 2 * wide + h) = pair(d, next);
#endif
        }
    /* After all d_logits: what stands for padded heads is written over. */
    for (int64_t j = 0; j < keys; j++)
        for (int64_t h = 0; h < wide; h += LANES)
            store_rounded((element *)(s->key_factors + j * 2 * all + head_words(heads)) + h,
                          load(s->sums + j * wide + h));
}

/* The heads of a row of q, then of d_out, as what `mix` sums over for the gradients of keys. */
static void mix_heads(backward_scratch *s, const element *query, const element *upstream, int64_t heads, int64_t width,
                      int64_t values) {
    int64_t used = head_words(heads);
    for (int64_t h = 0; h < heads; h++) s->head_rows[h] = query + h * width;
    mixed_rows(s->row_mixed, s->head_rows, heads, s->row_buffer, 0, width, s->nothing);
    for (int64_t h = 0; h < heads; h++) s->head_rows[h] = upstream + h * values;
    mixed_rows(s->row_mixed + used, s->head_rows, heads, s->row_buffer + used * width, 0, values, s->nothing);
}

/* delta of every head of a row. */
static void row_delta(float *delta, const element *out, const element *upstream, int64_t heads, int64_t values) {
    for (int64_t h = 0; h < heads; h++) {
        float sum[PAD] = {0}, whole = 0;
        for (int64_t c = 0; c < values; c += PAD)
            for (int64_t i = 0; i < PAD; i++)
                sum[i] += number(out[h * values + c + i]) * number(upstream[h * values + c + i]);
        for (int64_t i = 0; i < PAD; i++) whole += sum[i];
        delta[h] = whole;
    }
}

/* All that a row needs beside its keys. */
static void begin_row(backward_scratch *s, const element *query, const element *upstream, const float *lse,
                      const float *delta, float *result, int64_t heads, int64_t width, int64_t values) {
    int64_t wide = padded(heads, LANES);
    for (int64_t h = 0; h < wide; h++) {
        s->lse[h] = h < heads ? lse[h] : 0;
        s->delta[h] = h < heads ? delta[h] : 0;
    }
    for (int64_t h = 0; h < heads; h++) s->result_rows[h] = result + h * width;
    pack_heads(s->heads, (const word *)query, heads, width / WORD_ELEMENTS);
    pack_heads(s->upstream_heads, (const word *)upstream, heads, values / WORD_ELEMENTS);
    mix_heads(s, query, upstream, heads, width, values);
}

/* The keys of a row from `slot` on, up to those of rows from `last` on; returns the next slot. */
static int64_t row_backward(backward_scratch *s, const element *table, keys_of_row keys, int64_t slot, int64_t last,
                            float *d_table, int64_t heads, int64_t width, int64_t values, float scale) {
    int64_t wide = padded(heads, LANES), all = wide / WORD_ELEMENTS, used = head_words(heads), end = slot;
    while (end < keys.count && key_at(keys, end) < last) end++;
    keys.count = end;
    for (; slot < end; slot += KEYS) {
        int64_t found = key_rows(s->rows, keys, slot, table, width, s->nothing), filled = padded(found, DOT_ROWS);
        for (int64_t j = 0; j < found; j++) s->key_results[j] = d_table + key_at(keys, slot + j) * width;
        dots(s->sums, (const word *const *)s->rows, filled, s->heads, heads, width / WORD_ELEMENTS,
             errand_for(keys, slot, d_table, width * sizeof(float)));
        dots(s->upstream_sums, (const word *const *)s->rows, filled, s->upstream_heads, heads, values / WORD_ELEMENTS,
             errand_for(keys, slot + KEYS, table, width * sizeof(element)));
        backward_block(s, found, heads, scale);
#if defined(BF16)
        mix_keys(s->result_rows, heads, width, NULL, s->factors, wide, s->rows, found, scale, s->nothing);
#else
        mix_keys(s->result_rows, heads, width, NULL, s->key_factors, 2 * wide, s->rows, found, scale, s->nothing);
#endif
        mix(s->key_results, found, 0, values, NULL, s->key_factors, 1, 2 * all, s->row_mixed, 0, used, scale, 2 * used);
        mix(s->key_results, found, values, width - values, NULL, s->key_factors, 1, 2 * all, s->row_mixed, values, used,
            scale, used);
    }
    return end;
}

/* Gradients for the query rows [begin, end): d_q [t, heads, width] and delta [t, heads] are written, d_kv [s, width]
   added to.

   lse is that of the forward with the sink in it. ids are in ascending order. For the others see attend; rows without
   keys are left as they are. Returns 0, or 1 without memory. */
EXPORT int attend_backward(const element *q, const element *kv, const int32_t *ids, int64_t slots, const int32_t *first,
                           const int32_t *count, const element *out, const float *lse, const element *d_out,
                           element *d_q, float *d_kv, float *delta, int64_t begin, int64_t end, int64_t num_keys,
                           int64_t heads, int64_t width, int64_t values, double scale) {
    backward_scratch s;
    arena memory = {0};
    memory.base = aligned_alloc(64, backward_buffers(&s, &memory, end - begin, heads, width, values));
    if (!memory.base) return 1;
    memory.used = 0;
    backward_buffers(&s, &memory, end - begin, heads, width, values);
    memset(s.nothing, 0, sizeof(word) * width);
    memset(s.results, 0, sizeof(float) * (end - begin) * heads * width);
    memset(s.slots, 0, sizeof(int64_t) * (end - begin));
    for (int64_t row = begin; row < end; row++)
        if (count[row] > 0)
            row_delta(delta + row * heads, out + row * heads * values, d_out + row * heads * values, heads, values);
    int64_t range = RANGE_BYTES / (width * (int64_t)sizeof(float)) + 1;
    for (int64_t last = range; last < num_keys + range; last += range)
        for (int64_t row = begin; row < end; row++) {
            keys_of_row keys = keys_of(ids, slots, first, count, row);
            int64_t *slot = s.slots + row - begin;
            if (*slot >= keys.count || key_at(keys, *slot) >= last) continue;
            begin_row(&s, q + row * heads * width, d_out + row * heads * values, lse + row * heads, delta + row * heads,
                      s.results + (row - begin) * heads * width, heads, width, values);
            *slot = row_backward(&s, kv, keys, *slot, last, d_kv, heads, width, values, (float)scale);
        }
    for (int64_t row = begin; row < end; row++)
        if (count[row] > 0)
            for (int64_t c = 0; c < heads * width; c += LANES)
                store_rounded(d_q + row * heads * width + c, load(s.results + (row - begin) * heads * width + c));
    free(memory.base);
    return 0;
}
