/* What the multipliers of one core can do: products of registers, with nothing loaded or stored. */
#include "vector.h"

/* Runs `rounds` times 16 independent products of vectors with the words that `factor` points to, and writes their sums;
   returns how many flops that is. */
EXPORT double peak(int64_t rounds, const word *factor, float *result) {
    vec sum[16];
    EACH (i, 16) sum[i] = splat(i);
    /* Read at run time: the compiler may not know that a product is 0. */
    word a = factor[0];
    words b = load_words(factor);
    for (int64_t r = 0; r < rounds; r++)
        EACH (i, 16) sum[i] = add_product(sum[i], a, b);
    for (int i = 0; i < 16; i++) store(result + i * LANES, sum[i]);
    return (double)rounds * 16 * 2 * WORD_ELEMENTS * LANES;
}
