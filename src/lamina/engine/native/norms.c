/* Norm layers: Σ g·x̂ and Σ g of every row, in one pass over g and x, where torch operations need four; and gradients that are
   there as they are, clipped and added in one call. */
#include "parallel.h"

#include <stdint.h>
#include <string.h>

#define LANES 16
#define COLUMNS 64 /* that are added up together */
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* In the order of `_Norms` in norm_sums.py. x̂ = (x - mean) · rstd; mean may be NULL. */
struct norms {
    int64_t rows, parts, positions, width, groups; /* groups: 0 if statistics belong to positions, else to groups of channels */
    const float *x, *g, *mean, *rstd;
    float *gain, *shift; /* (rows, width) */
};

/* Channels last: x and g are (rows, positions, width), statistics (rows, positions). */
static void positions_of_row(const struct norms *job, int64_t row) {
    float *gain = job->gain + row * job->width, *shift = job->shift + row * job->width;
    memset(gain, 0, sizeof(float) * (size_t)job->width);
    memset(shift, 0, sizeof(float) * (size_t)job->width);
    for (int64_t t = 0; t < job->positions; t++) {
        const int64_t at = row * job->positions + t;
        const float mean = job->mean == NULL ? 0 : job->mean[at], rstd = job->rstd[at];
        const float *x = job->x + at * job->width, *g = job->g + at * job->width;
        for (int64_t i = 0; i < job->width; i++) {
            gain[i] += g[i] * ((x[i] - mean) * rstd);
            shift[i] += g[i];
        }
    }
}

/* Channels first: x and g are (rows, width, positions), statistics (rows, groups). */
static void channels_of_row(const struct norms *job, int64_t row) {
    for (int64_t c = 0; c < job->width; c++) {
        const int64_t at = row * job->width + c, group = row * job->groups + c / (job->width / job->groups);
        const float mean = job->mean[group], rstd = job->rstd[group];
        const float *x = job->x + at * job->positions, *g = job->g + at * job->positions;
        vec gains = {0}, shifts = {0};
        float gain = 0, shift = 0;
        int64_t i = 0;
        for (; i + LANES <= job->positions; i += LANES) {
            const vec a = *(const vec *)(g + i), b = *(const vec *)(x + i);
            gains += a * ((b - mean) * rstd);
            shifts += a;
        }
        for (; i < job->positions; i++) gain += g[i] * ((x[i] - mean) * rstd), shift += g[i];
        for (int k = 0; k < LANES; k++) gain += gains[k], shift += shifts[k];
        job->gain[at] = gain, job->shift[at] = shift;
    }
}

static void some_rows(int part, void *context) {
    const struct norms *job = context;
    for (int64_t row = job->rows * part / job->parts; row < job->rows * (part + 1) / job->parts; row++)
        job->groups ? channels_of_row(job, row) : positions_of_row(job, row);
}

LAMINA_EXPORT void lamina_norms(struct norms *job, int64_t threads) { lamina_parallel((int)job->parts, (int)threads, some_rows, job); }

/* In the order of `_Dense` in norm_sums.py: a layer of one or two tensors. */
struct dense {
    int64_t units, count, width[2];
    double scale, least;
    const double *bound;
    double *norm_sq, *factor; /* (units) */
    const float *x[2];        /* (units, width) */
    float *out[2];
};

/* Squares in float32, added in float64: see "Norms that do not read low" in grads.py. */
static double row_squares(const float *x, int64_t n) {
    double sum[4] = {0};
    for (int64_t i = 0; i < n; i++) sum[i % 4] += x[i] * x[i];
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

/* Some columns of one tensor, added up in float64. Contributions of factor 0 may not be finite. */
static void add_columns(const struct dense *job, int64_t k, int64_t low) {
    const int64_t width = job->width[k], count = width - low < COLUMNS ? width - low : COLUMNS;
    double sum[COLUMNS] = {0};
    for (int64_t p = 0; p < job->units; p++) {
        const float *x = job->x[k] + p * width + low;
        if (job->factor[p] == 0) continue;
        if (count == COLUMNS)
            for (int64_t i = 0; i < COLUMNS; i++) sum[i] += job->factor[p] * x[i];
        else
            for (int64_t i = 0; i < count; i++) sum[i] += job->factor[p] * x[i];
    }
    for (int64_t i = 0; i < count; i++) job->out[k][low + i] += (float)sum[i];
}

/* Returns how many norms are not finite. */
LAMINA_EXPORT int64_t lamina_dense(const struct dense *job) {
    for (int64_t p = 0; p < job->units; p++) {
        job->norm_sq[p] = 0;
        for (int64_t k = 0; k < job->count; k++) job->norm_sq[p] += row_squares(job->x[k] + p * job->width[k], job->width[k]);
        job->factor[p] = clip_factor(job->norm_sq[p], job->bound[p], job->scale, job->least);
    }
    for (int64_t k = 0; k < job->count; k++)
        for (int64_t low = 0; low < job->width[k]; low += COLUMNS) add_columns(job, k, low);
    return count_broken(job->norm_sq, job->units);
}
