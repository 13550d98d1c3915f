/* One contribution's gradient G = Σ over its positions of v ⊗ u, for one instruction set.

   Included by product.c once for each, with NAME, LANES, ROWS and FMA set. Tiles of ROWS × COLUMNS numbers are
   summed in registers from operands packed as [panel][position][ROWS or COLUMNS], zeros where a panel is not full. G and
   the accumulators stay in the order of tiles until the end: [group][panel of columns][panel of rows][ROWS][COLUMNS]. */

#define COLUMNS (LANES * 2)
typedef float NAME(vec) __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float NAME(reg) __attribute__((vector_size(4 * LANES)));
typedef double NAME(wide) __attribute__((vector_size(8 * LANES)));
#define VEC NAME(vec)

static inline VEC NAME(load)(const float *p) { return *(const VEC *)p; }
static inline void NAME(store)(float *p, VEC x) { *(VEC *)p = x; }

/* Rows of c are `apart` numbers from each other. AFTER: what was summed is added to c as a whole, so that how it was rounded does not
   depend on what is in c. */
static inline __attribute__((always_inline)) void NAME(tile)(int64_t depth, const float *a, const float *b, float *c, int64_t apart, int add) {
    NAME(reg) sum[ROWS][2];
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; m++) {
        sum[m][0] = add == FIRST ? (NAME(reg))NAME(load)(c + m * apart) : (NAME(reg)){0};
        sum[m][1] = add == FIRST ? (NAME(reg))NAME(load)(c + m * apart + LANES) : (NAME(reg)){0};
    }
    for (int64_t k = 0; k < depth; k++, a += ROWS, b += COLUMNS) {
        const NAME(reg) low = (NAME(reg))NAME(load)(b), high = (NAME(reg))NAME(load)(b + LANES);
#pragma GCC unroll 16
        for (int m = 0; m < ROWS; m++) {
            sum[m][0] = FMA(a[m], low, sum[m][0]);
            sum[m][1] = FMA(a[m], high, sum[m][1]);
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; m++) {
        NAME(store)(c + m * apart, (VEC)(add == AFTER ? (NAME(reg))NAME(load)(c + m * apart) + sum[m][0] : sum[m][0]));
        NAME(store)(c + m * apart + LANES, (VEC)(add == AFTER ? (NAME(reg))NAME(load)(c + m * apart + LANES) + sum[m][1] : sum[m][1]));
    }
}

/* Four squares per lane in float32, all else in float64: see "Norms that do not read low" in grads.py. */
static double NAME(squares)(const float *x, int64_t n) {
    NAME(wide) total = {0};
    for (int64_t i = 0; i < n; i += 4 * LANES) {
        VEC a = NAME(load)(x + i), b = NAME(load)(x + i + LANES), c = NAME(load)(x + i + 2 * LANES), d = NAME(load)(x + i + 3 * LANES);
        total += __builtin_convertvector((a * a + b * b) + (c * c + d * d), NAME(wide));
    }
    double sum = 0;
    for (int i = 0; i < LANES; i++) sum += total[i];
    return sum;
}

static void NAME(add_scaled)(float *out, const float *x, float factor, int64_t n, int first) {
    if (first)
        for (int64_t i = 0; i < n; i += LANES) NAME(store)(out + i, factor * NAME(load)(x + i));
    else
        for (int64_t i = 0; i < n; i += LANES) NAME(store)(out + i, NAME(load)(out + i) + factor * NAME(load)(x + i));
}

/* `count` positions of v, from `from` of row `row`, into panels of ROWS, times `factor`; their sum is added to `sums`. */
static void NAME(pack_v)(const struct product *job, const float *v, int64_t from, int64_t count, float *to, float factor, float *sums) {
    const int64_t outputs = job->outputs;
    for (int64_t panel = 0; panel * ROWS < outputs; panel++, to += DEPTH * ROWS) {
        const int64_t here = outputs - panel * ROWS < ROWS ? outputs - panel * ROWS : ROWS;
        if (job->convolution) {
            const float *x = v + panel * ROWS * job->positions + from;
            int64_t k = 0;
            if (here == ROWS && ROWS % 4 == 0)
                for (; k + 4 <= count; k += 4)
                    for (int m = 0; m < ROWS; m += 4) transpose4(x + m * job->positions + k, job->positions, to + k * ROWS + m, ROWS);
            for (; k < count; k++)
                for (int m = 0; m < ROWS; m++) to[k * ROWS + m] = m < here ? x[m * job->positions + k] : 0;
        } else {
            const float *x = v + from * outputs + panel * ROWS;
            if (here == ROWS)
                for (int64_t k = 0; k < count; k++)
                    for (int m = 0; m < ROWS; m++) to[k * ROWS + m] = x[k * outputs + m];
            else
                for (int64_t k = 0; k < count; k++)
                    for (int m = 0; m < ROWS; m++) to[k * ROWS + m] = m < here ? x[k * outputs + m] : 0;
        }
        if (sums != NULL) {
            float sum[ROWS] = {0};
            for (int64_t k = 0; k < count; k++)
                for (int m = 0; m < ROWS; m++) sum[m] += to[k * ROWS + m];
            for (int m = 0; m < here; m++) sums[panel * ROWS + m] += sum[m];
        }
        if (factor != 1)
            for (int64_t i = 0; i < count * ROWS; i++) to[i] *= factor;
    }
}

/* `count` positions of u into panels of COLUMNS. */
static void NAME(pack_u)(const struct product *job, const float *u, int64_t from, int64_t count, float *to) {
    const int64_t columns = job->inputs;
    for (int64_t k = 0; k < count; k++) {
        const float *x = u + (from + k) * columns;
        float *place = to + k * COLUMNS;
        int64_t c = 0;
        for (; c + COLUMNS <= columns; c += COLUMNS, place += DEPTH * COLUMNS)
            for (int n = 0; n < 2; n++) NAME(store)(place + n * LANES, NAME(load)(x + c + n * LANES));
        if (c < columns)
            for (int n = 0; n < COLUMNS; n++) place[n] = c + n < columns ? x[c + n] : 0;
    }
}

/* The same of a convolution: what the kernel sees at each position, (kernel, inputs), of the padded input with channels last. */
static void NAME(pack_windows)(const struct product *job, const float *padded, int64_t from, int64_t count, float *to) {
    const int64_t n = job->inputs, *kernel = job->kernel, *step = job->dilation, *stride = job->stride;
    const int64_t height = job->space[1] + 2 * job->padding[1], width = job->space[2] + 2 * job->padding[2];
    const int64_t taps = step[2] == 1 ? kernel[2] : 1, run = n * taps; /* numbers that lie together */
    int64_t x = from % job->places[2], y = from / job->places[2] % job->places[1], z = from / job->places[2] / job->places[1];
    for (int64_t k = 0, line; k < count; k += line, to += line * COLUMNS, x = 0) { /* positions that follow each other along the last axis */
        line = count - k < job->places[2] - x ? count - k : job->places[2] - x;
        int64_t column = 0;
        for (int64_t a = 0; a < kernel[0]; a++)
            for (int64_t b = 0; b < kernel[1]; b++) {
                const float *at = padded + (((z * stride[0] + a * step[0]) * height + y * stride[1] + b * step[1]) * width + x * stride[2]) * n;
                for (int64_t c = 0; c < kernel[2]; c += taps)
                    for (int64_t i = 0, here; i < run; i += here, column += here) {
                        here = COLUMNS - column % COLUMNS < run - i ? COLUMNS - column % COLUMNS : run - i;
                        float *place = to + column / COLUMNS * DEPTH * COLUMNS + column % COLUMNS;
                        const float *seen = at + c * step[2] * n + i;
                        if (here == COLUMNS)
                            for (int64_t t = 0; t < line; t++, place += COLUMNS, seen += stride[2] * n) {
                                NAME(store)(place, NAME(load)(seen));
                                NAME(store)(place + LANES, NAME(load)(seen + LANES));
                            }
                        else if (here == 8) /* as often as not: a kernel of 8, or 8 channels */
                            for (int64_t t = 0; t < line; t++, place += COLUMNS, seen += stride[2] * n) memcpy(place, seen, 8 * sizeof(float));
                        else
                            for (int64_t t = 0; t < line; t++, place += COLUMNS, seen += stride[2] * n) copy_floats(place, seen, here);
                    }
            }
        if (column % COLUMNS)
            for (int64_t t = 0; t < line; t++)
                memset(to + column / COLUMNS * DEPTH * COLUMNS + t * COLUMNS + column % COLUMNS, 0, sizeof(float) * (size_t)(COLUMNS - column % COLUMNS));
        if (++y == job->places[1]) y = 0, z++;
    }
}

/* G of contribution p into `grad`, or added to it if `add`. Returns the squared norm of what is there then. What was in `grad`
   before is added to an accumulator first, tile by tile, while these are near: `last` says where and by which factor. */
static double NAME(form)(const struct product *job, int64_t p, struct memory *m, float *grad, int add, float factor, float *sums, struct last *last) {
    const int64_t row_panels = (job->outputs + ROWS - 1) / ROWS, column_panels = (job->inputs * job->taps + COLUMNS - 1) / COLUMNS;
    const int64_t size = row_panels * column_panels * ROWS * COLUMNS;
    double norm_sq = 0;
    float *sum = last != NULL && last->factor != 0 ? last->sum : NULL;
    for (int64_t group = 0; group < job->groups; group++, grad += size, sum = sum == NULL ? NULL : sum + size) {
        int64_t filled = 0, some = add;
        for (int64_t j = job->start[p]; j < job->start[p + 1]; j++) {
            const int64_t width = job->outputs * job->positions, row = job->rows[j] * job->groups + group;
            const float *v = job->v + row * width, *u = job->u + row * job->inputs * job->space_size;
            if (job->convolution) u = channels_last(job, u, m->padded);
            for (int64_t from = 0, count; from < job->positions; from += count) {
                count = job->positions - from < DEPTH - filled ? job->positions - from : DEPTH - filled;
                NAME(pack_v)(job, v, from, count, m->left + filled * ROWS, factor, sums == NULL ? NULL : sums + group * job->outputs);
                (job->convolution ? NAME(pack_windows) : NAME(pack_u))(job, u, from, count, m->right + filled * COLUMNS);
                filled += count;
                const int complete = from + count == job->positions && j + 1 == job->start[p + 1];
                if (filled < DEPTH && !complete) continue;
                float *c = grad;
                for (int64_t n = 0; n < column_panels; n++)
                    for (int64_t k = 0; k < row_panels; k++, c += ROWS * COLUMNS) {
                        if (sum != NULL && !some) NAME(add_scaled)(sum + (c - grad), c, last->factor, ROWS * COLUMNS, last->first);
                        NAME(tile)(filled, m->left + k * DEPTH * ROWS, m->right + n * DEPTH * COLUMNS, c, COLUMNS, (int)some);
                        if (complete && job->mode != ADD) norm_sq += NAME(squares)(c, ROWS * COLUMNS);
                    }
                filled = 0, some = 1;
            }
        }
        if (!some && sum != NULL) NAME(add_scaled)(sum, grad, last->factor, size, last->first);
        if (!some) memset(grad, 0, sizeof(float) * (size_t)size);
    }
    if (sum != NULL) last->first = 0;
    if (last != NULL) last->factor = 0;
    return norm_sq;
}

/* Row o of G, from the order of tiles, summed in float64 over `parts` accumulators, added to (or put into) `out`. */
static void NAME(untile)(const struct product *job, int64_t o, const float *grad, int64_t parts, int64_t apart, float *out, float *line, int add) {
    const int64_t columns = job->inputs * job->taps, row_panels = (job->outputs + ROWS - 1) / ROWS;
    const int64_t column_panels = (columns + COLUMNS - 1) / COLUMNS, group = o / job->outputs, row = o % job->outputs;
    const float *x = grad + (group * column_panels * row_panels + row / ROWS) * ROWS * COLUMNS + row % ROWS * COLUMNS;
    for (int64_t c = 0; c < columns; c += COLUMNS, x += row_panels * ROWS * COLUMNS) {
        for (int n = 0; n < 2; n++) {
            if (parts == 1) {
                NAME(store)(line + c + n * LANES, NAME(load)(x + n * LANES));
                continue;
            }
            NAME(wide) sum = {0};
            for (int64_t part = 0; part < parts; part++) sum += __builtin_convertvector(NAME(load)(x + part * apart + n * LANES), NAME(wide));
            NAME(store)(line + c + n * LANES, __builtin_convertvector(sum, VEC));
        }
    }
    out += o * columns;
    for (int64_t tap = 0, c = 0; tap < job->taps; tap++) /* of a convolution channels come last here, taps there */
        for (int64_t i = 0; i < job->inputs; i++, c++) {
            float *place = out + i * job->taps + tap;
            *place = add ? *place + line[c] : line[c];
        }
}

static void NAME(part)(int part, void *context) {
    const struct product *job = context;
    struct memory m;
    const int slot = take_memory(job, &m);
    float *sum = job->accumulators + part * job->grad_size, *grad = m.grad;
    const int64_t outputs = job->groups * job->outputs, low = job->units * part / job->parts, high = job->units * (part + 1) / job->parts;
    struct last last = {sum, 0, 1};
    int first = 1;
    for (int64_t p = low; p < high; p++) {
        float *sums = job->sums == NULL ? NULL : job->sums + p * outputs;
        if (job->mode == ADD) {
            if (job->factor[p] == 0) continue;
            if (job->factor[p] < MIN_EXACT_FACTOR) {
                NAME(form)(job, p, &m, grad, 0, 1, NULL, NULL);
                NAME(add_scaled)(sum, grad, (float)job->factor[p], job->grad_size, first);
            } else
                NAME(form)(job, p, &m, sum, !first, (float)job->factor[p], NULL, NULL);
            first = 0;
            continue;
        }
        if (sums != NULL) memset(sums, 0, sizeof(float) * (size_t)outputs);
        double norm_sq = NAME(form)(job, p, &m, grad, 0, 1, sums, &last);
        job->norm_sq[p] = norm_sq;
        if (job->mode == FORM)
            for (int64_t o = 0; o < outputs; o++) NAME(untile)(job, o, grad, 1, 0, job->out + p * outputs * job->inputs * job->taps, m.line, 0);
        if (job->mode != CLIP) continue;
        if (job->joined)
            for (int64_t o = 0; o < outputs; o++) norm_sq += (double)sums[o] * sums[o];
        if (job->others != NULL) norm_sq += job->others[p];
        job->norm_sq[p] = norm_sq;
        job->factor[p] = clip_factor(norm_sq, job->bound[p], job->scale, job->least);
        last.factor = (float)job->factor[p];
    }
    if (last.factor != 0) NAME(add_scaled)(sum, grad, last.factor, job->grad_size, last.first), last.first = 0;
    if (first && last.first && (job->mode == CLIP || job->mode == ADD)) memset(sum, 0, sizeof(float) * (size_t)job->grad_size);
    give_back(job, slot);
}

static void NAME(sum_rows)(int part, void *context) { /* of all accumulators, into out: rows of one share */
    const struct product *job = context;
    struct memory m;
    const int slot = take_memory(job, &m);
    const int64_t outputs = job->groups * job->outputs;
    for (int64_t o = outputs * part / SHARES; o < outputs * (part + 1) / SHARES; o++)
        NAME(untile)(job, o, job->accumulators, job->parts, job->grad_size, job->out, m.line, 1);
    if (job->bias != NULL) add_bias(job, outputs * part / SHARES, outputs * (part + 1) / SHARES);
    give_back(job, slot);
}

static double NAME(row_norm)(const float *x, int64_t n) {
    NAME(wide) total = {0};
    double sum = 0;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        const NAME(wide) v = __builtin_convertvector(NAME(load)(x + i), NAME(wide));
        total += v * v;
    }
    for (int k = 0; k < LANES; k++) sum += total[k];
    for (; i < n; i++) sum += (double)x[i] * x[i];
    return sqrt(sum);
}

/* `OuterProductGrads` of grads.py, some rows of one layer: norms in float64, and the factor where it follows from them. */
static void NAME(outer_rows)(int part, void *context) {
    const struct outers *job = context;
    const int64_t chunks = (job->units + CHUNK - 1) / CHUNK, first = part % chunks * CHUNK;
    const struct outer *layer = job->layers + part / chunks;
    for (int64_t p = first; p < first + CHUNK && p < job->units; p++) {
        const double g_norm = NAME(row_norm)(layer->g + p * layer->outputs, layer->outputs);
        const double a_norm = NAME(row_norm)(layer->a + p * layer->inputs, layer->inputs);
        double norm_sq = g_norm * g_norm * (a_norm * a_norm);
        if (layer->joined) norm_sq += g_norm * g_norm;
        if (layer->others != NULL) norm_sq += layer->others[p];
        layer->g_norm[p] = g_norm, layer->a_norm[p] = a_norm, layer->norm_sq[p] = norm_sq;
        if (job->mode == CLIP) layer->factor[p] = clip_factor(norm_sq, layer->bound[p], job->scale, job->least);
    }
}

/* out += g ⊗ a summed over contributions, times their factors: one block of rows and columns of one layer. Contributions of
   factor 0 are never multiplied, for they may not be finite; those of odd size are made unit vectors, so that nothing vanishes
   before they meet. */
static void NAME(outer_block)(int part, void *context) {
    const struct outers *job = context;
    const struct outer *layer = job->layers;
    int64_t row_blocks, item = part;
    for (;; layer++) {
        row_blocks = (layer->outputs + BLOCK * ROWS - 1) / (BLOCK * ROWS);
        const int64_t items = row_blocks * ((layer->inputs + BLOCK * COLUMNS - 1) / (BLOCK * COLUMNS));
        if (item < items) break;
        item -= items;
    }
    const int64_t o0 = item % row_blocks * BLOCK * ROWS, i0 = item / row_blocks * BLOCK * COLUMNS, outputs = layer->outputs, inputs = layer->inputs;
    const int64_t o1 = o0 + BLOCK * ROWS < outputs ? o0 + BLOCK * ROWS : outputs, i1 = i0 + BLOCK * COLUMNS < inputs ? i0 + BLOCK * COLUMNS : inputs;
    float left[BLOCK][DEPTH * ROWS], right[DEPTH * COLUMNS], edge[ROWS * COLUMNS];
    double bias[BLOCK * ROWS] = {0}, *wide_sum = NULL;
    if (job->units > WIDE_UNITS) {
        wide_sum = calloc((size_t)((o1 - o0) * (i1 - i0)), sizeof(double));
        if (wide_sum == NULL) abort(); /* out of memory, as everywhere */
    }
    for (int64_t from = 0, count; from < job->units; from += count) {
        count = job->units - from < DEPTH ? job->units - from : DEPTH;
        for (int64_t k = 0; k < count; k++) {
            const int64_t p = from + k;
            const float *g = layer->g + p * outputs, factor = (float)layer->factor[p];
            const int odd = is_odd(layer, p);
            const double size = layer->g_norm[p] > 1e-300 ? layer->g_norm[p] : 1e-300;
            const float length = (float)(layer->factor[p] * (layer->g_norm[p] * layer->a_norm[p]));
            for (int64_t o = o0; o < o1; o += ROWS) {
                float *to = left[(o - o0) / ROWS] + k * ROWS;
                const int64_t here = o1 - o < ROWS ? o1 - o : ROWS;
                if (layer->factor[p] == 0 || here < ROWS) memset(to, 0, sizeof(float) * ROWS);
                if (layer->factor[p] == 0) continue;
                if (odd)
                    for (int64_t m = 0; m < here; m++) to[m] = (float)(g[o + m] / size) * length;
                else if (here == ROWS)
                    for (int64_t m = 0; m < ROWS; m++) to[m] = g[o + m] * factor;
                else
                    for (int64_t m = 0; m < here; m++) to[m] = g[o + m] * factor;
            }
            if (i0 == 0 && layer->bias != NULL && layer->factor[p] != 0)
                for (int64_t o = o0; o < o1; o++) bias[o - o0] += (double)g[o] * factor;
        }
        for (int64_t i = i0; i < i1; i += COLUMNS) {
            const int64_t wide = i1 - i < COLUMNS ? i1 - i : COLUMNS;
            for (int64_t k = 0; k < count; k++) {
                const int64_t p = from + k;
                const float *a = layer->a + p * inputs + i;
                float *to = right + k * COLUMNS;
                const double size = layer->a_norm[p] > 1e-300 ? layer->a_norm[p] : 1e-300;
                if (layer->factor[p] == 0 || wide < COLUMNS) memset(to, 0, sizeof(float) * COLUMNS);
                if (layer->factor[p] == 0) continue;
                if (is_odd(layer, p))
                    for (int64_t n = 0; n < wide; n++) to[n] = (float)(a[n] / size);
                else if (wide == COLUMNS)
                    for (int n = 0; n < 2; n++) NAME(store)(to + n * LANES, NAME(load)(a + n * LANES));
                else
                    memcpy(to, a, sizeof(float) * (size_t)wide);
            }
            for (int64_t o = o0; o < o1; o += ROWS) {
                float *out = layer->out + o * inputs + i;
                const int64_t high = o1 - o < ROWS ? o1 - o : ROWS;
                if (high == ROWS && wide == COLUMNS && wide_sum == NULL) {
                    NAME(tile)(count, left[(o - o0) / ROWS], right, out, inputs, AFTER);
                    continue;
                }
                NAME(tile)(count, left[(o - o0) / ROWS], right, edge, COLUMNS, NOT);
                double *sum = wide_sum == NULL ? NULL : wide_sum + (o - o0) * (i1 - i0) + i - i0;
                for (int64_t m = 0; m < high; m++)
                    if (sum != NULL)
                        for (int64_t n = 0; n < wide; n++) sum[m * (i1 - i0) + n] += edge[m * COLUMNS + n];
                    else
                        for (int64_t n = 0; n < wide; n++) out[m * inputs + n] += edge[m * COLUMNS + n];
            }
        }
    }
    if (i0 == 0 && layer->bias != NULL)
        for (int64_t o = o0; o < o1; o++) layer->bias[o] += (float)bias[o - o0];
    if (wide_sum != NULL)
        for (int64_t o = o0; o < o1; o++)
            for (int64_t i = i0; i < i1; i++) layer->out[o * inputs + i] += (float)wide_sum[(o - o0) * (i1 - i0) + i - i0];
    free(wide_sum);
}

static const struct kernels NAME(kernels) = {NAME(part), NAME(sum_rows), NAME(outer_rows), NAME(outer_block), ROWS, COLUMNS};

#undef COLUMNS
#undef VEC
#undef NAME
#undef LANES
#undef ROWS
#undef FMA
