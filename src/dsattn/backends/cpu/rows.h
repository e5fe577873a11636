/* What the kernels over keys at any address share: blocks of keys, and scratch memory. */
#pragma once

#include "products.h"

/* Addresses of the next keys of a row, up to KEYS of them, filled up with `nothing` to the next multiple of 8.

   Returns how many are keys. */
LOCAL int64_t key_rows(const element **rows, keys_of_row keys, int64_t slot, const element *table, int64_t width,
                       const element *nothing) {
    int64_t count = at_most(KEYS, keys.count - slot), i = 0;
    for (; i < count; i++) rows[i] = table + key_at(keys, slot + i) * width;
    for (; i < padded(count, 8); i++) rows[i] = nothing;
    return count;
}

/* Where a row begins in a table of scores whose first column is key `column`, of a selection its slot 0. */
INLINE int64_t table_column(keys_of_row keys, int64_t column) { return keys.ids ? 0 : keys.first - column; }

/* What is kept of a sum of exponentials when `high` takes the place of its largest dot, `before`.

   Where that was -inf nothing has been summed, and its product with a scale of 0 would be NaN. */
INLINE vec share_kept(vec before, vec high, float scale) {
    mask unchanged = (mask)(before == high) | (mask)(before == -INFINITY);
    return exponential(pick(unchanged, splat(0), before - high) * scale);
}

/* Under the address sanitizer pieces of memory lie apart, and what is between them may not be touched. */
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define GAP 64
#else
#define GAP 0
#define ASAN_POISON_MEMORY_REGION(from, bytes) ((void)(from), (void)(bytes))
#endif

/* Memory for one call, handed out in pieces that begin at 64 bytes. The first pass only counts. */
typedef struct {
    char *base;
    int64_t used;
} arena;

LOCAL void *take(arena *from, int64_t bytes) {
    char *piece = from->base ? from->base + from->used : NULL;
    int64_t whole = padded(bytes, 64) + GAP;
    if (piece) ASAN_POISON_MEMORY_REGION(piece + bytes, whole - bytes);
    from->used += whole;
    return piece;
}
#define TAKE(from, type, n) ((type *)take(from, (int64_t)sizeof(type) * (n)))
