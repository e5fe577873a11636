/* What the kernels over keys at any address share: which keys a row has, and scratch memory. */
#pragma once

#include "products.h"

/* The keys of a query row: `count` of them, at ids[slot] or, without ids, one after the other from `first` on. */
typedef struct {
    const int32_t *ids;
    int64_t first, count;
} keys_of_row;

INLINE keys_of_row keys_of(const int32_t *ids, int64_t slots, const int32_t *first, const int32_t *count, int64_t row) {
    /* A selection of no slots has no address either. */
    return (keys_of_row){ids ? ids + row * slots : NULL, first ? first[row] : 0, count[row]};
}

INLINE int64_t key_at(keys_of_row keys, int64_t slot) { return keys.ids ? keys.ids[slot] : keys.first + slot; }

/* Addresses of the next keys of a row, up to KEYS of them, filled up with `nothing` to the next multiple of 8.

   Returns how many are keys. */
LOCAL int64_t key_rows(const element **rows, keys_of_row keys, int64_t slot, const element *table, int64_t width,
                       const element *nothing) {
    int64_t count = at_most(KEYS, keys.count - slot), i = 0;
    for (; i < count; i++) rows[i] = table + key_at(keys, slot + i) * width;
    for (; i < padded(count, 8); i++) rows[i] = nothing;
    return count;
}

/* Asks for the rows of a table that are needed soon, before the work that hides the way from memory. */
LOCAL void fetch_rows(const void *table, int64_t row_bytes, keys_of_row keys, int64_t slot) {
    int64_t end = at_most(slot + KEYS, keys.count);
    for (; slot < end; slot++) {
        const char *row = (const char *)table + key_at(keys, slot) * row_bytes;
        for (int64_t place = 0; place < row_bytes; place += 64) __builtin_prefetch(row + place, 0, 2);
    }
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
