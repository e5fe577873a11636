/* Exact top-k: score descending, key ascending; NaN first. A radix selection finds the score of the last key. */
#include "vector.h"

typedef uint32_t order;
#define ORDER_BITS 32
#define DIGIT_BITS 11
#define DIGITS (1 << DIGIT_BITS)

/* An integer that sorts as the score does; every NaN is the largest. */
INLINE order order_of(float score) {
    order x;
    memcpy(&x, &score, sizeof x);
    x = x >> (ORDER_BITS - 1) ? ~x : x | (order)1 << (ORDER_BITS - 1);
    return score != score ? ~(order)0 : x;
}

/* The digit of the `k`-th largest of `n` orders; lowers k by those above it. Digits stand in [shift, shift + bits). */
static int64_t digit_of(const order *from, int64_t n, int shift, int bits, int64_t *k) {
    /* Four tables: equal digits in a row do not wait for each other. */
    uint32_t counts[4][DIGITS] = {{0}};
    order lowest = ((order)1 << bits) - 1;
    int64_t i = 0;
    for (; i + 4 <= n; i += 4)
        for (int t = 0; t < 4; t++) counts[t][(from[i + t] >> shift) & lowest]++;
    for (; i < n; i++) counts[0][(from[i] >> shift) & lowest]++;
    int64_t digit = (int64_t)lowest, above = 0;
    for (;; digit--) {
        int64_t here = (int64_t)counts[0][digit] + counts[1][digit] + counts[2][digit] + counts[3][digit];
        if (above + here >= *k) break;
        above += here;
    }
    *k -= above;
    return digit;
}

/* The order of the k-th largest of n scores, 1 <= k <= n; `*k` becomes how many of those equal to it are taken.

   orders and some: n each; orders receives the order of every score. */
static order threshold_of(const float *scores, int64_t n, int64_t *k, order *orders, order *some) {
    for (int64_t i = 0; i < n; i++) orders[i] = order_of(scores[i]);
    const order *from = orders;
    order found = 0;
    int64_t left = n;
    for (int high = ORDER_BITS; high > 0;) {
        int bits = high < DIGIT_BITS ? high : DIGIT_BITS, shift = high - bits;
        order digit = (order)digit_of(from, left, shift, bits, k);
        found |= digit << shift;
        if (shift == 0) break;
        int64_t kept = 0;
        for (int64_t i = 0; i < left; i++) {
            order x = from[i];
            some[kept] = x;
            kept += x >> shift == found >> shift;
        }
        from = some, left = kept, high = shift;
    }
    return found;
}

/* Ids [t, k] int32, ascending, and their scores (may be NULL) of the query rows [begin, end) of a table of scores.

   table: [rows][width] with key `column` first. first, count: the window of each row. Slots past min(k, count) are
   left as they are. Returns 0, or 1 without memory. */
EXPORT int topk(const float *table, int64_t width, int64_t column, const int32_t *first, const int32_t *count,
                int32_t *ids, float *kept, int64_t k, int64_t begin, int64_t end) {
    int64_t longest = 1;
    for (int64_t row = begin; row < end; row++)
        if (count[row] > longest) longest = count[row];
    order *orders = malloc(2 * sizeof(order) * longest);
    if (!orders) return 1;
    for (int64_t row = begin; row < end; row++) {
        int64_t n = count[row], ties = k;
        if (n <= 0) continue;
        const float *scores = table + (row - begin) * width + first[row] - column;
        int32_t *to = ids + row * k;
        float *to_scores = kept ? kept + row * k : NULL;
        if (n <= k) {
            for (int64_t i = 0; i < n; i++) to[i] = (int32_t)(first[row] + i);
            if (to_scores) memcpy(to_scores, scores, sizeof(float) * n);
            continue;
        }
        order last = threshold_of(scores, n, &ties, orders, orders + longest);
        for (int64_t i = 0, slot = 0; slot < k; i++) {
            int64_t tied = orders[i] == last && ties > 0, taken = orders[i] > last || tied;
            ties -= tied;
            to[slot] = (int32_t)(first[row] + i);
            if (to_scores) to_scores[slot] = scores[i];
            slot += taken;
        }
    }
    free(orders);
    return 0;
}
