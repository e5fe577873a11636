/* Attention over the keys of each query row, forward and backward.

   Heads stand side by side in vectors, so the softmax of 16 heads runs at once, over blocks of keys as they come: the
   sum of what came before is scaled when a larger logit appears. */
#include "rows.h"

/* Buffers for one row. */
typedef struct {
    const element *rows[KEYS];
    element *nothing;
    word *heads, *factors;
    float *sums, *largest, *total, *before, *kept, *result, **result_rows;
} forward_scratch;

static int64_t forward_buffers(forward_scratch *s, arena *from, int64_t heads, int64_t width, int64_t values) {
    int64_t wide = padded(heads, LANES);
    s->nothing = TAKE(from, element, width);
    s->heads = TAKE(from, word, width / WORD_ELEMENTS * wide);
    s->factors = TAKE(from, word, KEYS / WORD_ELEMENTS * wide);
    s->sums = TAKE(from, float, KEYS *wide);
    s->largest = TAKE(from, float, wide);
    s->total = TAKE(from, float, wide);
    s->before = TAKE(from, float, wide);
    s->kept = TAKE(from, float, wide);
    s->result = TAKE(from, float, heads *values);
    s->result_rows = TAKE(from, float *, heads);
    return from->used;
}

/* One block of the softmax of LANES heads: dots become factors of the values; what was summed before keeps `kept`.

   The largest dot is subtracted before the scale is applied, so that large logits that are close lose no digits. */
NOINLINE void softmax_block(forward_scratch *s, int64_t head, int64_t wide, int64_t keys, float scale) {
    const float *sums = s->sums + head;
    vec before = load(s->largest + head), high = before, next = before, total = splat(0);
    for (int64_t j = 0; j < keys; j += 2) {
        high = above(load(sums + j * wide), high);
        next = above(load(sums + (j + 1 < keys ? j + 1 : j) * wide), next);
    }
    high = above(high, next);
    /* Of nothing but -inf nothing is subtracted: inf - inf is NaN. */
    vec from = pick(high == -INFINITY, splat(0), high);
    vec kept = share_kept(before, high, scale);
    for (int64_t j = 0; j < keys; j += WORD_ELEMENTS) {
        vec a = exponential((load(sums + j * wide) - from) * scale);
        total += a;
#if defined(BF16)
        vec b = splat(0);
        if (j + 1 < keys) b = exponential((load(sums + (j + 1) * wide) - from) * scale);
        total += b;
        *(words *)(s->factors + j / 2 * wide + head) = pair(a, b);
#else
        store(s->factors + j * wide + head, a);
#endif
    }
    store(s->before + head, load(s->total + head));
    store(s->total + head, load(s->total + head) * kept + total);
    store(s->kept + head, kept);
    store(s->largest + head, high);
}

/* A dot of +inf makes the sum NaN, which is not to hide one of NaN: where there is one, the largest is NaN too. */
static void keep_nan(forward_scratch *s, int64_t head, int64_t wide, int64_t keys) {
    for (int64_t j = 0; j < keys; j++)
        if (isnan(s->sums[j * wide + head])) s->largest[head] = NAN;
    if (isnan(s->before[head])) s->largest[head] = NAN;
}

static void attend_row(forward_scratch *s, const element *query, const element *table, keys_of_row keys,
                       const float *sink, element *out, float *lse, int64_t heads, int64_t width, int64_t values,
                       float scale) {
    int64_t wide = padded(heads, LANES), count = width / WORD_ELEMENTS;
    pack_heads(s->heads, (const word *)query, heads, count);
    for (int64_t h = 0; h < wide; h++) s->largest[h] = -INFINITY, s->total[h] = 0;
    memset(s->result, 0, sizeof(float) * heads * values);
    for (int64_t slot = 0; slot < keys.count; slot += KEYS) {
        int64_t found = key_rows(s->rows, keys, slot, table, width, s->nothing);
        dots(s->sums, (const word *const *)s->rows, padded(found, DOT_ROWS), s->heads, heads, count,
             errand_for(keys, slot + KEYS, table, width * sizeof(element)));
        for (int64_t h = 0; h < wide; h += LANES) softmax_block(s, h, wide, found, scale);
        for (int64_t h = 0; h < heads; h++)
            if (s->largest[h] == INFINITY) keep_nan(s, h, wide, found);
        mix_keys(s->result_rows, heads, values, s->kept, s->factors, wide, s->rows, found, 1, s->nothing);
    }
    for (int64_t h = 0; h < heads; h++) {
        float high = s->largest[h];
        lse[h] = high == INFINITY ? high : high * scale + log(s->total[h]);
        /* The share that the sink leaves: exp(lse - logaddexp(lse, sink)). */
        float kept = sink ? 1 / (1 + exp(sink[h] - lse[h])) : 1;
        vec factor = splat(kept / s->total[h]);
        for (int64_t c = 0; c < values; c += LANES)
            store_rounded(out + h * values + c, load(s->result + h * values + c) * factor);
    }
}

/* Output [t, heads, values] and log-sum-exp [t, heads] of the query rows [begin, end).

   q [t, heads, width], kv [s, width]; width and values are multiples of 16; scale is not negative. See keys_of for the
   next four. Rows without keys are left as they are. Returns 0, or 1 without memory. */
EXPORT int attend(const element *q, const element *kv, const int32_t *ids, int64_t slots, const int32_t *first,
                  const int32_t *count, const float *sink, element *out, float *lse, int64_t begin, int64_t end,
                  int64_t heads, int64_t width, int64_t values, double scale) {
    forward_scratch s;
    arena memory = {0};
    memory.base = aligned_alloc(64, forward_buffers(&s, &memory, heads, width, values));
    if (!memory.base) return 1;
    memory.used = 0;
    forward_buffers(&s, &memory, heads, width, values);
    memset(s.nothing, 0, sizeof(element) * width);
    for (int64_t h = 0; h < heads; h++) s.result_rows[h] = s.result + h * values;
    for (int64_t row = begin; row < end; row++) {
        keys_of_row keys = keys_of(ids, slots, first, count, row);
        if (keys.count > 0)
            attend_row(&s, q + row * heads * width, kv, keys, sink, out + row * heads * values, lse + row * heads,
                       heads, width, values, (float)scale);
    }
    free(memory.base);
    return 0;
}
