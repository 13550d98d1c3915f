/* Gradients cut to a grid and added up in int64: out[i] += Σ_p trunc(factor[p] · grads[p][i]).
 *
 * float64 products, cut toward zero: the same integers as engine/integer_noise.py, in any order and for any number of
 * threads. The caller has clipped: products are below 2^53. A factor of 0 leaves its row out, whatever is in it. */
#include "parallel.h"

#include <stdint.h>

#define COLUMNS 4096

struct cut {
    const void *grads;
    const double *factor;
    int64_t *out;
    int64_t rows, width;
    int wide;
};

#define DEFINE_CUT(name, real)                                                                       \
    static void name(const real *restrict grads, double factor, int64_t *restrict out, int64_t count) { \
        for (int64_t i = 0; i < count; i++) out[i] += (int64_t)((double)grads[i] * factor);          \
    }
DEFINE_CUT(cut_float, float)
DEFINE_CUT(cut_double, double)

static void cut_columns(int part, void *context) {
    const struct cut *cut = context;
    const int64_t first = (int64_t)part * COLUMNS;
    const int64_t count = cut->width - first < COLUMNS ? cut->width - first : COLUMNS;
    for (int64_t p = 0; p < cut->rows; p++) {
        const int64_t at = p * cut->width + first;
        if (cut->factor[p] == 0) continue;
        if (cut->wide)
            cut_double((const double *)cut->grads + at, cut->factor[p], cut->out + first, count);
        else
            cut_float((const float *)cut->grads + at, cut->factor[p], cut->out + first, count);
    }
}

LAMINA_EXPORT void lamina_cut_add(const void *grads, int wide, int64_t rows, int64_t width, const double *factor,
                                  int64_t *out, int threads) {
    struct cut cut = {grads, factor, out, rows, width, wide};
    lamina_parallel((int)((width + COLUMNS - 1) / COLUMNS), threads, cut_columns, &cut);
}
