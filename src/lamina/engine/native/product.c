/* Per-contribution gradients of linear maps and convolutions: formed one contribution at a time, measured, clipped and
   added, without storing more than one of them per thread. The torch rules in grads.py and layers/conv.py are the oracle.

   Contributions are cut into `parts` that depend on shapes alone, each with an accumulator of its own, and accumulators are
   added in order: the sum is the same, bit for bit, for any number of threads. */
#include "parallel.h"

#include <math.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define DEPTH 128 /* positions that are packed at a time */
#define WIDE_UNITS 512 /* contributions: more of them are added up in float64, DEPTH of them at a time */
#define CHUNK 16  /* contributions whose norms are measured by one thread at a time */
#define BLOCK 16  /* panels of rows and of columns of a block of outer products */
#define SHARES 8  /* into which rows of the sum are cut */
#define MIN_SAFE_NORM 1e-15 /* norms between which products in float32 lose nothing */
#define MAX_SAFE_NORM 1e15
#define MIN_EXACT_FACTOR 1e-20 /* a smaller one times v could lose bits before it meets u: it waits for the product */

enum add { NOT, FIRST, AFTER }; /* what is in a tile before: overwritten · summed first · added to the sum */
enum mode { NORM, CLIP, ADD, FORM }; /* norms · clip and add · add with given factors · every gradient by itself */

/* In the order of `_Product` in products.py, which checks everything that is said here. */
struct product {
    int64_t mode, threads, parts, units, convolution, joined;
    int64_t outputs, inputs, taps, groups, positions, space_size; /* of one group; of one row */
    int64_t space[3], places[3], kernel[3], stride[3], padding[3], dilation[3];
    const float *u, *v;         /* (rows, groups, inputs, space) and (rows, groups, outputs, places); linear: (rows, positions, width) */
    const int64_t *rows, *start; /* rows of contribution p: rows[start[p]] … rows[start[p + 1] - 1] */
    const double *bound, *others; /* (units) */
    double scale, least;
    double *norm_sq, *factor; /* (units) */
    float *out, *sums, *bias; /* the tensor, or (units, tensor) for FORM; (units, groups · outputs) sums of v, or NULL; where these are added, or NULL */
    float *workspace;
    float *accumulators; /* the rest is set by lamina_product */
    int64_t grad_size, padded_size, line_size, left_size, right_size;
    atomic_ullong *used;
};

/* In the order of `_OUTER` in products.py: one layer, G[p] = g[p] ⊗ a[p]. */
struct outer {
    int64_t outputs, inputs, joined; /* joined: the norm of g counts too, for a bias */
    const float *g, *a;
    float *out, *bias;            /* where it is added; bias may be NULL */
    const double *bound, *others; /* (units), others may be NULL */
    double *g_norm, *a_norm, *norm_sq, *factor;
};

/* In the order of `_Outers`: layers of the same contributions. NORM: measured · CLIP: measured and added · ADD: added, with factors
   and norms from before. */
struct outers {
    int64_t mode, count, units;
    double scale, least;
    const struct outer *layers;
};

struct memory {
    float *left, *right, *grad, *padded, *line;
};

/* The contribution before this one: its G waits to be added to `sum` times `factor` (0: it does not), over it if it is the first. */
struct last {
    float *sum, factor;
    int first;
};

struct kernels {
    lamina_body part, sum_rows, outer_rows, outer_block;
    int64_t rows, columns;
};

static int take_memory(const struct product *job, struct memory *m) {
    for (;;) {
        unsigned long long used = atomic_load(job->used);
        const int slot = __builtin_ctzll(~used);
        if (!atomic_compare_exchange_weak(job->used, &used, used | 1ull << slot)) continue;
        float *at = job->workspace + slot * (job->left_size + job->right_size + job->grad_size + job->line_size + job->padded_size);
        m->left = at, m->right = m->left + job->left_size, m->grad = m->right + job->right_size;
        m->line = m->grad + job->grad_size, m->padded = m->line + job->line_size;
        return slot;
    }
}

static void give_back(const struct product *job, int slot) { atomic_fetch_and(job->used, ~(1ull << slot)); }

/* Whether g or a is so small or large that a product in float32 would lose bits. */
static inline int is_odd(const struct outer *layer, int64_t p) {
    const double g = layer->g_norm[p], a = layer->a_norm[p];
    return !(g > MIN_SAFE_NORM && g < MAX_SAFE_NORM && a > MIN_SAFE_NORM && a < MAX_SAFE_NORM);
}

typedef float four __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t choice __attribute__((vector_size(16)));

static inline void transpose4(const float *x, int64_t apart, float *to, int64_t to_apart) {
    const four a = *(const four *)x, b = *(const four *)(x + apart), c = *(const four *)(x + 2 * apart), d = *(const four *)(x + 3 * apart);
    const four ab = __builtin_shuffle(a, b, (choice){0, 4, 1, 5}), cd = __builtin_shuffle(c, d, (choice){0, 4, 1, 5});
    const four ef = __builtin_shuffle(a, b, (choice){2, 6, 3, 7}), gh = __builtin_shuffle(c, d, (choice){2, 6, 3, 7});
    *(four *)to = __builtin_shuffle(ab, cd, (choice){0, 1, 4, 5});
    *(four *)(to + to_apart) = __builtin_shuffle(ab, cd, (choice){2, 3, 6, 7});
    *(four *)(to + 2 * to_apart) = __builtin_shuffle(ef, gh, (choice){0, 1, 4, 5});
    *(four *)(to + 3 * to_apart) = __builtin_shuffle(ef, gh, (choice){2, 3, 6, 7});
}

static inline void copy_floats(float *to, const float *x, int64_t n) {
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) *(four *)(to + i) = *(const four *)(x + i);
    for (; i < n; i++) to[i] = x[i];
}

/* The input of one row and group, (inputs, space), as (padded space, inputs). Its border was zeroed before. */
static const float *channels_last(const struct product *job, const float *u, float *padded) {
    const int64_t n = job->inputs, *size = job->space, *pad = job->padding;
    const int64_t height = size[1] + 2 * pad[1], width = size[2] + 2 * pad[2];
    for (int64_t z = 0; z < size[0]; z++)
        for (int64_t y = 0; y < size[1]; y++) {
            float *to = padded + (((z + pad[0]) * height + y + pad[1]) * width + pad[2]) * n;
            const float *x = u + (z * size[1] + y) * size[2];
            int64_t c = 0;
            for (; c + 4 <= n; c += 4) {
                int64_t k = 0;
                for (; k + 4 <= size[2]; k += 4) transpose4(x + c * job->space_size + k, job->space_size, to + k * n + c, n);
                for (; k < size[2]; k++)
                    for (int64_t m = c; m < c + 4; m++) to[k * n + m] = x[m * job->space_size + k];
            }
            if (n == 1) copy_floats(to, x, size[2]);
            for (; c < n && n > 1; c++)
                for (int64_t k = 0; k < size[2]; k++) to[k * n + c] = x[c * job->space_size + k];
        }
    return padded;
}

/* Some numbers of the bias: the sums of v of all contributions, times their factors. */
static void add_bias(const struct product *job, int64_t from, int64_t to) {
    const int64_t outputs = job->groups * job->outputs;
    for (int64_t low = from; low < to; low += CHUNK) {
        const int64_t count = to - low < CHUNK ? to - low : CHUNK;
        double sum[CHUNK] = {0};
        for (int64_t p = 0; p < job->units; p++)
            if (job->factor[p] != 0) /* the others may not be finite */
                for (int64_t o = 0; o < count; o++) sum[o] += job->factor[p] * job->sums[p * outputs + low + o];
        for (int64_t o = 0; o < count; o++) job->bias[low + o] += (float)sum[o];
    }
}

#define NAME(x) x##_portable
#define LANES 4
#define ROWS 4
#define FMA(a, b, c) ((a) * (b) + (c))
#include "product.h"

#if defined(__x86_64__)
#include <immintrin.h>
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define NAME(x) x##_avx2
#define LANES 8
#define ROWS 6
#define FMA(a, b, c) ((NAME(reg))_mm256_fmadd_ps(_mm256_set1_ps(a), (__m256)(b), (__m256)(c)))
#include "product.h"
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx2,fma")
#define NAME(x) x##_avx512
#define LANES 16
#define ROWS 8
#define FMA(a, b, c) ((NAME(reg))_mm512_fmadd_ps(_mm512_set1_ps(a), (__m512)(b), (__m512)(c)))
#include "product.h"
#pragma GCC pop_options
#endif

static const struct kernels *chosen(int64_t processor) {
#if defined(__x86_64__)
    if (processor == 2) return &kernels_avx512;
    if (processor == 1) return &kernels_avx2;
#endif
    (void)processor;
    return &kernels_portable;
}

static int64_t panels(int64_t n, int64_t width) { return (n + width - 1) / width * width; }

/* Sets the sizes of buffers; returns how many floats of workspace the job needs. */
static int64_t plan_memory(struct product *job, const struct kernels *with) {
    const int64_t columns = job->inputs * job->taps;
    job->left_size = panels(job->outputs, with->rows) * DEPTH;
    job->right_size = panels(columns, with->columns) * DEPTH;
    job->grad_size = job->groups * panels(job->outputs, with->rows) * panels(columns, with->columns);
    job->line_size = panels(columns, with->columns) + 16;
    job->padded_size = 0;
    if (job->convolution) {
        job->padded_size = job->inputs;
        for (int i = 0; i < 3; i++) job->padded_size *= job->space[i] + 2 * job->padding[i];
        job->padded_size = panels(job->padded_size, 16);
    }
    const int64_t each = job->left_size + job->right_size + job->grad_size + job->line_size + job->padded_size;
    const int64_t sums = job->mode == CLIP || job->mode == ADD ? job->parts * job->grad_size : 0;
    return job->threads * each + sums;
}

LAMINA_EXPORT void lamina_outers(const struct outers *job, int64_t threads, int64_t processor) {
    const struct kernels *with = chosen(processor);
    int64_t blocks = 0;
    for (const struct outer *layer = job->layers; layer < job->layers + job->count; layer++)
        blocks += panels(layer->outputs, BLOCK * with->rows) / (BLOCK * with->rows) * (panels(layer->inputs, BLOCK * with->columns) / (BLOCK * with->columns));
    if (job->mode != ADD) lamina_parallel((int)(job->count * ((job->units + CHUNK - 1) / CHUNK)), (int)threads, with->outer_rows, (void *)job);
    if (job->mode != NORM) lamina_parallel((int)blocks, (int)threads, with->outer_block, (void *)job);
}

LAMINA_EXPORT int64_t lamina_product_memory(struct product *job, int64_t processor) { return plan_memory(job, chosen(processor)); }

/* Returns how many norms are not finite, where they were measured. */
LAMINA_EXPORT int64_t lamina_product(struct product *job, int64_t processor) {
    const struct kernels *with = chosen(processor);
    atomic_ullong used = 0;
    const int64_t whole = plan_memory(job, with);
    job->used = &used;
    const int64_t sums = job->mode == CLIP || job->mode == ADD ? job->parts * job->grad_size : 0;
    job->accumulators = job->workspace + whole - sums;
    if (job->padded_size)
        for (int64_t slot = 0; slot < job->threads; slot++)
            memset(job->workspace + (slot + 1) * ((whole - sums) / job->threads) - job->padded_size, 0, sizeof(float) * (size_t)job->padded_size);
    lamina_parallel((int)job->parts, (int)job->threads, with->part, job);
    if (sums) lamina_parallel(SHARES, (int)job->threads, with->sum_rows, job);
    return job->mode == ADD ? 0 : count_broken(job->norm_sq, job->units);
}
