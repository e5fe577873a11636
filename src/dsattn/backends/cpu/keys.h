/* Which keys a query row has, and how their rows are asked for before they are needed. */
#pragma once

#include "vector.h"

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

/* Rows of a table that are needed soon. They are asked for a few at a time, in the midst of other work: all at once
   they would stand in each other's way. */
typedef struct {
    keys_of_row keys;
    const char *table;
    int64_t row_bytes, slot, end;
} errand;

/* The rows of a block of keys. */
INLINE errand errand_for(keys_of_row keys, int64_t slot, const void *table, int64_t row_bytes) {
    return (errand){keys, table, row_bytes, slot, at_most(slot + KEYS, keys.count)};
}

INLINE void run_errand(errand *what, int64_t rows) {
    for (; rows > 0 && what->slot < what->end; rows--, what->slot++) {
        const char *row = what->table + key_at(what->keys, what->slot) * what->row_bytes;
        for (int64_t place = 0; place < what->row_bytes; place += 64) __builtin_prefetch(row + place, 0, 2);
    }
}
