/* The portable kernels against plain loops, on random linear maps and convolutions: built for aarch64 and run under emulation. */
#include <stdio.h>
#include <stdlib.h>

#include "parallel.c"
#include "product.c"

#define BOUND 0.7

static int64_t between(int64_t low, int64_t high) { return low + rand() % (high - low + 1); }

static float *random_floats(int64_t n) {
    float *x = malloc(sizeof(float) * (size_t)n);
    for (int64_t i = 0; i < n; i++) x[i] = (float)rand() / (float)RAND_MAX - 0.5f;
    return x;
}

/* G of contribution p, number by number. Returns its squared norm. */
static double plain_grad(const struct product *job, int64_t p, double *grad) {
    const int64_t n = job->inputs, places = job->positions, space = job->space_size, taps = job->taps;
    double norm_sq = 0;
    for (int64_t o = 0; o < job->groups * job->outputs; o++)
        for (int64_t i = 0; i < n; i++)
            for (int64_t tap = 0; tap < taps; tap++) {
                const int64_t input = o / job->outputs * n + i;
                double sum = 0;
                for (int64_t t = 0; t < places; t++) {
                    const int64_t at = t * job->stride[2] + tap * job->dilation[2] - job->padding[2];
                    if (!job->convolution)
                        sum += (double)job->v[(p * places + t) * job->outputs + o] * job->u[(p * places + t) * n + i];
                    else if (at >= 0 && at < space)
                        sum += (double)job->v[(p * job->groups * job->outputs + o) * places + t] * job->u[(p * job->groups * n + input) * space + at];
                }
                grad[(o * n + i) * taps + tap] = sum;
                norm_sq += sum * sum;
            }
    return norm_sq;
}

/* The largest difference between a clipped sum of the kernel and of plain loops. */
static double try_case(int convolution) {
    const int64_t units = between(1, 9), inputs = between(1, 20), outputs = between(1, 20), positions = between(1, 40);
    const int64_t groups = convolution ? between(1, 3) : 1, taps = convolution ? between(1, 4) : 1, stride = convolution ? between(1, 3) : 1;
    const int64_t padding = convolution ? between(0, 2) : 0, dilation = convolution ? between(1, 2) : 1;
    const int64_t wide = (positions - 1) * stride + (taps - 1) * dilation + 1 - 2 * padding, space = convolution ? wide : positions;
    if (wide < 1) return 0;
    const int64_t size = groups * outputs * inputs * taps;
    int64_t rows[9], start[10];
    double bound[9], norm_sq[9], factor[9], worst = 0;
    for (int64_t p = 0; p <= units; p++) start[p] = p;
    for (int64_t p = 0; p < units; p++) rows[p] = p, bound[p] = BOUND;
    struct product job = {
        .mode = CLIP, .threads = 1, .parts = units < 4 ? units : 4, .units = units, .convolution = convolution, .outputs = outputs, .inputs = inputs,
        .taps = taps, .groups = groups, .positions = positions, .space_size = space, .space = {1, 1, space}, .places = {1, 1, positions},
        .kernel = {1, 1, taps}, .stride = {1, 1, stride}, .padding = {0, 0, padding}, .dilation = {1, 1, dilation},
        .u = random_floats(units * groups * inputs * space), .v = random_floats(units * groups * outputs * positions), .rows = rows, .start = start,
        .bound = bound, .scale = 1, .norm_sq = norm_sq, .factor = factor, .out = calloc((size_t)size, sizeof(float)),
    };
    job.workspace = malloc(sizeof(float) * (size_t)lamina_product_memory(&job, 0));
    lamina_product(&job, 0);
    double *grad = malloc(sizeof(double) * (size_t)size), *sum = calloc((size_t)size, sizeof(double));
    for (int64_t p = 0; p < units; p++) {
        const double norm = sqrt(plain_grad(&job, p, grad)), by = norm > BOUND ? BOUND / norm : 1;
        for (int64_t i = 0; i < size; i++) sum[i] += by * grad[i];
    }
    for (int64_t i = 0; i < size; i++)
        if (!(fabs(sum[i] - job.out[i]) <= worst)) worst = fabs(sum[i] - job.out[i]);
    free((void *)job.u), free((void *)job.v), free(job.out), free(job.workspace), free(grad), free(sum);
    return worst;
}

int main(void) {
    double worst = 0;
    for (int i = 0; i < 400; i++) {
        srand((unsigned)i);
        const double off = try_case(i % 2);
        if (!(off <= worst)) worst = off;
    }
    printf("%g\n", worst);
    return 0;
}
