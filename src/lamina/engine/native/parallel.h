/* What every source file here shares: exported functions, work spread over threads, and the clip factor. */
#ifndef LAMINA_PARALLEL_H
#define LAMINA_PARALLEL_H

#include <math.h>
#include <stdint.h>

#define LAMINA_EXPORT __attribute__((visibility("default")))
#ifndef LAMINA_SOURCES
#define LAMINA_SOURCES "unknown" /* setup.py gives the digest of all sources, which the loader compares: sources.py */
#endif

/* `clip_weights` of clipping.py, for one contribution. */
static inline double clip_factor(double norm_sq, double bound, double scale, double least) {
    if (!isfinite(norm_sq)) return 0;
    const double factor = bound / sqrt(norm_sq < 1e-300 ? 1e-300 : norm_sq);
    return factor > scale ? scale : factor > least ? factor : 0;
}

static inline int64_t count_broken(const double *norm_sq, int64_t n) {
    int64_t broken = 0;
    for (int64_t i = 0; i < n; i++) broken += !isfinite(norm_sq[i]);
    return broken;
}

/* Calls body(part, context) once for each part in 0 … parts-1, on at most `threads` threads, in any order.
   What is computed must depend on the part alone, never on the thread. */
typedef void (*lamina_body)(int part, void *context);
void lamina_parallel(int parts, int threads, lamina_body body, void *context);

#endif
