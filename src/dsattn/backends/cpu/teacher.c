/* The teacher of the indexer loss: attention probabilities over the keys of each query row, summed over heads. */
#include "rows.h"

typedef struct {
    const element *rows[KEYS];
    element *nothing;
    word *heads;
    float *sums, *largest, *total;
} teacher_scratch;

static int64_t teacher_buffers(teacher_scratch *s, arena *from, int64_t heads, int64_t width) {
    int64_t wide = padded(heads, LANES);
    s->nothing = TAKE(from, element, width);
    s->heads = TAKE(from, word, width / WORD_ELEMENTS * wide);
    s->sums = TAKE(from, float, KEYS *wide);
    s->largest = TAKE(from, float, wide);
    s->total = TAKE(from, float, wide);
    return from->used;
}

/* Dots of a block of keys with all heads; returns how many keys. */
static int64_t block_dots(teacher_scratch *s, const element *kv, keys_of_row keys, int64_t slot, int64_t heads,
                          int64_t width) {
    int64_t found = key_rows(s->rows, keys, slot, kv, width, s->nothing);
    dots(s->sums, (const word *const *)s->rows, padded(found, DOT_ROWS), s->heads, heads, width / WORD_ELEMENTS,
         errand_for(keys, slot + KEYS, kv, width * sizeof(element)));
    return found;
}

/* The largest dot of every head of a row, and the sum of the others' exponentials, by a pass of its own. */
static void row_softmax(teacher_scratch *s, const element *kv, keys_of_row keys, int64_t heads, int64_t width,
                        float scale) {
    float *largest = s->largest, *total = s->total;
    int64_t wide = padded(heads, LANES);
    for (int64_t h = 0; h < wide; h++) largest[h] = -INFINITY, total[h] = 0;
    for (int64_t slot = 0; slot < keys.count; slot += KEYS) {
        int64_t found = block_dots(s, kv, keys, slot, heads, width);
        for (int64_t h = 0; h < wide; h += LANES) {
            vec before = load(largest + h), high = before, sum = splat(0);
            for (int64_t j = 0; j < found; j++) high = above(load(s->sums + j * wide + h), high);
            vec from = pick(high == -INFINITY, splat(0), high);
            for (int64_t j = 0; j < found; j++) sum += exponential((load(s->sums + j * wide + h) - from) * scale);
            store(total + h, load(total + h) * share_kept(before, high, scale) + sum);
            store(largest + h, high);
        }
    }
}

/* Probabilities of a key, summed over heads: from log-sum-exps in `total` if they are given, else from row_softmax. */
INLINE float head_sum(const teacher_scratch *s, int64_t key, int given, int64_t heads, float scale) {
    int64_t wide = padded(heads, LANES);
    const float *dots_of_key = s->sums + key * wide;
    vec sum = splat(0);
    for (int64_t h = 0; h < wide; h += LANES) {
        vec p, dot = load(dots_of_key + h);
        if (given)
            p = exponential(dot * scale - load(s->total + h));
        else
            p = exponential((dot - load(s->largest + h)) * scale) / load(s->total + h);
        sum += of_heads(p, h, heads);
    }
    return lane_sum(sum);
}

/* sum over heads of exp(logit - lse) of the query rows [begin, end) in a table [rows][columns]; see table_column.

   q [t, heads, width], kv [s, width]; width is a multiple of 16; scale is not negative. lse [t, heads], or NULL: its
   part is computed by a pass of its own. See keys_of for ids, slots, first and count. Returns 0, or 1 without
   memory. */
EXPORT int teacher(const element *q, const element *kv, const int32_t *ids, int64_t slots, const int32_t *first,
                   const int32_t *count, const float *lse, float *table, int64_t columns, int64_t column, int64_t begin,
                   int64_t end, int64_t heads, int64_t width, double scale) {
    teacher_scratch s;
    arena memory = {0};
    int64_t wide = padded(heads, LANES);
    memory.base = aligned_alloc(64, teacher_buffers(&s, &memory, heads, width));
    if (!memory.base) return 1;
    memory.used = 0;
    teacher_buffers(&s, &memory, heads, width);
    memset(s.nothing, 0, sizeof(element) * width);
    for (int64_t row = begin; row < end; row++) {
        keys_of_row keys = keys_of(ids, slots, first, count, row);
        if (keys.count <= 0) continue;
        float *sums = table + (row - begin) * columns + table_column(keys, column);
        pack_heads(s.heads, (const word *)(q + row * heads * width), heads, width / WORD_ELEMENTS);
        if (!lse) row_softmax(&s, kv, keys, heads, width, (float)scale);
        if (lse) memcpy(s.total, lse + row * heads, sizeof(float) * heads);
        for (int64_t h = heads; h < wide; h++) s.total[h] = 1;
        for (int64_t slot = 0; slot < keys.count; slot += KEYS) {
            int64_t found = block_dots(&s, kv, keys, slot, heads, width);
            for (int64_t j = 0; j < found; j++) sums[slot + j] = head_sum(&s, j, lse != NULL, heads, (float)scale);
        }
    }
    free(memory.base);
    return 0;
}
