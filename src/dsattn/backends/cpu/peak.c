/* What the multipliers of one core can do: products of registers, with nothing loaded or stored. */
#include "vector.h"

/* Runs `rounds` times 16 independent products of vectors; returns how many flops that is. */
EXPORT double peak(int64_t rounds, float *result) {
    vec sum[16];
    words b;
    memset(&b, 0, sizeof b);
    word a = 0;
    for (int i = 0; i < 16; i++) sum[i] = splat(i);
    for (int64_t r = 0; r < rounds; r++) {
        EACH (i, 16) sum[i] = add_product(sum[i], a, b);
        /* The compiler may not know what stands in them. */
#if defined(__x86_64__)
        EACH (i, 16) __asm__ volatile("" : "+v"(sum[i]));
#else
        EACH (i, 16) __asm__ volatile("" : "+w"(sum[i]));
#endif
    }
    *result = 0;
    for (int i = 0; i < 16; i++) *result += lane_sum(sum[i]);
    return (double)rounds * 16 * 2 * WORD_ELEMENTS * LANES;
}
