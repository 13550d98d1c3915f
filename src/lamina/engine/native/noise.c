/* Gaussian noise of a private step in one pass over memory: AES-128 counter mode, Box-Muller, scale, add.
 *
 * The layout of the stream is that of engine/random_stream.py: a piece of n elements takes h = 2*ceil(n/4) pairs; its
 * first h words are radii, the next h angles; element i < h is the cosine member of pair i, element h + i the sine one.
 *
 *     u = |w1 | 1| / 2^63 in (0, 1]     r = sqrt(-2 ln u)     theta = 2 pi w2 / 2^64     (r cos theta, r sin theta)
 *
 * All of it is made of +, -, *, /, sqrt and fused multiply-add alone, each rounded once (no table, no libm): the same
 * bits on every processor, for every vector width, for any number of threads. Float64 sums, and sums that are rounded to
 * a grid, get float64 draws within 1e-15 * (1 + r) of exact: fdlibm's polynomials. Float32 sums get draws within 4e-7 * (1 + r),
 * which is less than their own rounding: u, its distance to 1 and the angle are taken from the words in float64, what
 * follows is float32 (the polynomials of fdlibm's logf and of Cephes' sinf and cosf).
 *
 * Nothing here branches or looks up memory by a secret. Keys, words and draws are wiped before a call returns.
 */
#include "parallel.h"

#include <stdint.h>
#include <string.h>

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
#pragma GCC optimize("O3", "no-fast-math", "fp-contract=off", "no-math-errno", "no-trapping-math")
#endif

#if defined(__x86_64__)
#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))
#define PAIRS 256 /* of one chunk: words, radii and draws stay in the first-level cache */
#define FMA(a, b, c) __builtin_fma(a, b, c)
#define FMA32(a, b, c) __builtin_fmaf(a, b, c)
#define FOR(i, n) for (int64_t i = 0; i < (n); i++)

typedef struct {
    uint64_t tensor, block; /* where its key stream begins */
    int64_t size;           /* elements, at most a cell */
    void *out;
    double std, spacing; /* spacing > 0: the sum is rounded to its multiples */
    double unit;         /* what the sum is multiplied by; of a rounded sum, the number of multiples */
} Piece;

typedef struct {
    uint64_t words[2][PAIRS];
    union {
        struct { double radius[PAIRS], draws[2][PAIRS]; };
        struct { float power[PAIRS], rest[PAIRS], radius32[PAIRS], draws32[2][PAIRS]; uint32_t quarter[PAIRS]; };
    };
} Space;

enum { FLOAT64 = 1, FILL = 2 };

static void wipe(void *memory, size_t size) {
    memset(memory, 0, size);
    __asm__ volatile("" : : "r"(memory) : "memory");
}

/* ------------------------------------------------------------------------------------------------ key stream */

#define AES_NI __attribute__((target("avx2,fma,aes")))
#define VECTOR_AES __attribute__((target("fma,avx512f,avx512dq,avx512bw,avx512vl,aes,vaes,prefer-vector-width=512")))
#define BATCH 16 /* blocks are made so many at a time: buffers are whole batches */

INLINE AES_NI __m128i next_key(__m128i key, __m128i made) {
    key = _mm_xor_si128(key, _mm_slli_si128(key, 4));
    key = _mm_xor_si128(key, _mm_slli_si128(key, 8));
    return _mm_xor_si128(key, _mm_shuffle_epi32(made, 0xff));
}

AES_NI static void expand_key(const uint8_t *key, __m128i *k) {
#define NEXT(i, constant) k[i] = next_key(k[i - 1], _mm_aeskeygenassist_si128(k[i - 1], constant))
    k[0] = _mm_loadu_si128((const __m128i *)key);
    NEXT(1, 0x01); NEXT(2, 0x02); NEXT(3, 0x04); NEXT(4, 0x08); NEXT(5, 0x10);
    NEXT(6, 0x20); NEXT(7, 0x40); NEXT(8, 0x80); NEXT(9, 0x1b); NEXT(10, 0x36);
}

/* Blocks `block`, `block` + 1, ... of `tensor`, at least `count`, in whole batches. The counter is big-endian. */
INLINE AES_NI void blocks_128(const __m128i *keys, uint64_t tensor, uint64_t block, int64_t count, uint64_t *out) {
    const int64_t high = (int64_t)__builtin_bswap64(tensor);
    for (int64_t done = 0; done < count; done += BATCH) {
        for (int64_t half = 0; half < BATCH; half += 8) {
            __m128i x[8];
            FOR(j, 8) x[j] = _mm_set_epi64x((int64_t)__builtin_bswap64(block + (uint64_t)(done + half + j)), high);
            FOR(j, 8) x[j] = _mm_xor_si128(x[j], keys[0]);
            for (int round = 1; round < 10; round++) FOR(j, 8) x[j] = _mm_aesenc_si128(x[j], keys[round]);
            FOR(j, 8) _mm_storeu_si128((__m128i *)(out + 2 * (done + half + j)), _mm_aesenclast_si128(x[j], keys[10]));
        }
    }
}

INLINE VECTOR_AES void blocks_512(const __m128i *keys, uint64_t tensor, uint64_t block, int64_t count, uint64_t *out) {
    const __m512i turn = _mm512_broadcast_i32x4(_mm_set_epi8(8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    const __m512i four = _mm512_set_epi64(4, 0, 4, 0, 4, 0, 4, 0);
    const int64_t t = (int64_t)tensor, b = (int64_t)block;
    __m512i at = _mm512_set_epi64(b, t, b, t, b, t, b, t), k[11];
    at = _mm512_add_epi64(at, _mm512_set_epi64(3, 0, 2, 0, 1, 0, 0, 0));
    FOR(round, 11) k[round] = _mm512_broadcast_i32x4(keys[round]);
    for (int64_t done = 0; done < count; done += BATCH) {
        __m512i x[4];
        FOR(j, 4) {
            x[j] = _mm512_xor_si512(_mm512_shuffle_epi8(at, turn), k[0]);
            at = _mm512_add_epi64(at, four);
        }
        for (int round = 1; round < 10; round++) FOR(j, 4) x[j] = _mm512_aesenc_epi128(x[j], k[round]);
        FOR(j, 4) _mm512_storeu_si512(out + 2 * done + 8 * j, _mm512_aesenclast_epi128(x[j], k[10]));
    }
}

/* ------------------------------------------------------------------------------------------- from words to draws */

INLINE double as_double(uint64_t bits) { double x; memcpy(&x, &bits, 8); return x; }
INLINE uint64_t as_bits(double x) { uint64_t bits; memcpy(&bits, &x, 8); return bits; }
INLINE float as_float(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
INLINE uint32_t as_bits32(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }

/* (double)(int64_t)word, rounded once: two halves by their place in the mantissas of 2^84 and 2^52, which every
 * vector unit can do. `direct`: one instruction, where the vector unit has it. */
INLINE double from_signed(uint64_t word, int direct) {
    if (direct) return (double)(int64_t)word;
    const double high = as_double((word >> 32 ^ 0x80000000u) | 0x4530000000000000u) - 0x1.0000080100000p84;
    return high + as_double((word & 0xffffffffu) | 0x4330000000000000u);
}

/* -2 ln u for 2^-63 <= u <= 1 (fdlibm e_log.c): u = 2^k (1 + f), 1 + f in [sqrt(1/2), sqrt(2)). */
INLINE double minus_twice_log(double u) {
    const uint64_t bits = as_bits(u), biased = (bits - 0x3fe6a09e667f3bcdu + (1023ull << 52)) >> 52;
    const double k = as_double(biased | 0x4330000000000000u) - (0x1p52 + 1023.0);
    const double f = as_double(bits - ((biased - 1023) << 52)) - 1.0;
    const double s = f / (2.0 + f), z = s * s, w = z * z, half = 0.5 * f * f;
    const double even = FMA(FMA(1.531383769920937332e-01, w, 2.222219843214978396e-01), w, 3.999999999940941908e-01);
    const double odd = FMA(FMA(FMA(1.479819860511658591e-01, w, 1.818357216161805012e-01), w,
                               2.857142874366239149e-01), w, 6.666666666666735130e-01);
    const double low = FMA(s, half + FMA(z, odd, w * even), k * 1.90821492927058770002e-10);
    return -2.0 * FMA(k, 6.93147180369123816490e-01, f - (half - low));
}

INLINE void squared_radii(const uint64_t *restrict words, double *restrict radius, int64_t count, int direct) {
    FOR(i, count) radius[i] = minus_twice_log(__builtin_fabs(from_signed(words[i] | 1, direct)) * 0x1p-63);
}

/* r cos theta and r sin theta: the nearest quarter turn is taken off the word exactly, the rest is in [-pi/4, pi/4]
 * (fdlibm k_sin.c, k_cos.c). */
INLINE void turns(const uint64_t *restrict words, const double *restrict radius, double *restrict cosines,
                  double *restrict sines, int64_t count, double std, int direct) {
    FOR(i, count) {
        const uint64_t quarter = (words[i] + (1ull << 61)) >> 62;
        const double x = from_signed(words[i] - (quarter << 62), direct) * 0x1.921fb54442d18p-62, z = x * x;
        double s = FMA(FMA(1.58969099521155010221e-10, z, -2.50507602534068634195e-08), z, 2.75573137070700676789e-06);
        s = FMA(FMA(FMA(s, z, -1.98412698298579493134e-04), z, 8.33333333332248946124e-03), z, -1.66666666666666324348e-01);
        s = FMA(x * z, s, x);
        double c = FMA(FMA(-1.13596475577881948265e-11, z, 2.08757232129817482790e-09), z, -2.75573143513906633035e-07);
        c = FMA(FMA(FMA(c, z, 2.48015872894767294178e-05), z, -1.38888888888741095749e-03), z, 4.16666666666666019037e-02);
        c = FMA(z, FMA(z, c, -0.5), 1.0);
        const uint64_t swap = (as_bits(s) ^ as_bits(c)) & (0 - (quarter & 1));
        const double r = radius[i] * std;
        cosines[i] = as_double(as_bits(c) ^ swap ^ ((quarter + 1) >> 1 << 63)) * r;
        sines[i] = as_double(as_bits(s) ^ swap ^ (quarter >> 1 << 63)) * r;
    }
}

/* The same in float32. u = 2^k (1 + f) is taken apart in float64: f is exact, so that a radius near 0 keeps all its digits. */
INLINE void squared_radii_32(const uint64_t *restrict words, float *restrict power, float *restrict rest, float *restrict radius, int64_t count, int direct) {
    FOR(i, count) {
        const uint64_t bits = as_bits(__builtin_fabs(from_signed(words[i] | 1, direct))), biased = (bits - 0x3fe6a09e667f3bcdu + (1023ull << 52)) >> 52;
        power[i] = (float)(as_double(biased | 0x4330000000000000u) - (0x1p52 + 1023.0 + 63.0));
        rest[i] = (float)(as_double(bits - ((biased - 1023) << 52)) - 1.0);
    }
    FOR(i, count) {
        const float f = rest[i], s = f / (2.0f + f), z = s * s, w = z * z, half = 0.5f * f * f;
        const float odd = FMA32(w, 0x91e9ee.0p-25f, 0xaaaaaa.0p-24f), even = FMA32(w, 0xf89e26.0p-26f, 0xccce13.0p-25f);
        const float low = FMA32(s, half + FMA32(z, odd, w * even), power[i] * 9.0580006145e-06f);
        radius[i] = -2.0f * FMA32(power[i], 6.9313812256e-01f, f - (half - low));
    }
}

INLINE void turns_32(const uint64_t *restrict words, float *restrict rest, uint32_t *restrict quarter, const float *restrict radius,
                     float *restrict cosines, float *restrict sines, int64_t count, float std, int direct) {
    FOR(i, count) {
        const uint64_t nearest = (words[i] + (1ull << 61)) >> 62;
        rest[i] = (float)(from_signed(words[i] - (nearest << 62), direct) * 0x1.921fb54442d18p-62);
        quarter[i] = (uint32_t)nearest;
    }
    FOR(i, count) {
        const float x = rest[i], z = x * x, r = radius[i] * std;
        const float s = FMA32(x * z, FMA32(FMA32(-1.9515295891e-4f, z, 8.3321608736e-3f), z, -1.6666654611e-1f), x);
        float c = FMA32(FMA32(2.443315711809948e-5f, z, -1.388731625493765e-3f), z, 4.166664568298827e-2f);
        c = FMA32(z, FMA32(z, c, -0.5f), 1.0f);
        const uint32_t swap = (as_bits32(s) ^ as_bits32(c)) & (0 - (quarter[i] & 1));
        cosines[i] = as_float(as_bits32(c) ^ swap ^ ((quarter[i] + 1) >> 1 << 31)) * r;
        sines[i] = as_float(as_bits32(s) ^ swap ^ (quarter[i] >> 1 << 31)) * r;
    }
}

/* By hand, because a compiler that sets errno for sqrt does not vectorise it. */
INLINE AES_NI void roots_256(double *x, int64_t count) {
    for (int64_t i = 0; i < count; i += 4) _mm256_storeu_pd(x + i, _mm256_sqrt_pd(_mm256_loadu_pd(x + i)));
}
INLINE VECTOR_AES void roots_512(double *x, int64_t count) {
    for (int64_t i = 0; i < count; i += 8) _mm512_storeu_pd(x + i, _mm512_sqrt_pd(_mm512_loadu_pd(x + i)));
}

INLINE AES_NI void roots32_256(float *x, int64_t count) {
    for (int64_t i = 0; i < count; i += 8) _mm256_storeu_ps(x + i, _mm256_sqrt_ps(_mm256_loadu_ps(x + i)));
}
INLINE VECTOR_AES void roots32_512(float *x, int64_t count) {
    for (int64_t i = 0; i < count; i += 16) _mm512_storeu_ps(x + i, _mm512_sqrt_ps(_mm512_loadu_ps(x + i)));
}

INLINE void store_draws(float *restrict out, const float *restrict draws, int64_t count, int fill, float unit) {
    if (fill) memcpy(out, draws, sizeof(float) * (size_t)(count > 0 ? count : 0));
    else FOR(i, count) out[i] = (out[i] + draws[i]) * unit;
}

#define DEFINE_STORE(name, real)                                                                                                \
    INLINE void name(real *restrict out, const double *restrict draws, int64_t count, int fill, double spacing, double unit) { \
        const double inverse = 1.0 / spacing;                                                                                   \
        if (spacing > 0)                                                                                                        \
            FOR(i, count) out[i] = (real)(__builtin_rint(((double)out[i] + draws[i]) * inverse) * unit);                        \
        else if (fill)                                                                                                          \
            FOR(i, count) out[i] = (real)draws[i];                                                                              \
        else                                                                                                                    \
            FOR(i, count) out[i] = (out[i] + (real)draws[i]) * (real)unit;                                                      \
    }
DEFINE_STORE(store_float, float)
DEFINE_STORE(store_double, double)

#define DEFINE_DRAW(name, target, blocks, roots, roots32, direct)                                                               \
    target static void name(const Piece *piece, const __m128i *keys, Space *space, int flags) {             \
        const int64_t pairs = (piece->size + 3) / 4 * 2;                                                    \
        const int in_float32 = !(flags & FLOAT64) && !(piece->spacing > 0);                                 \
        float std = (float)piece->std;                                                                      \
        if ((double)std < piece->std) std = as_float(as_bits32(std) + 1); /* rounded up */                  \
        for (int64_t at = 0; at < pairs; at += PAIRS) {                                                     \
            const int64_t count = pairs - at < PAIRS ? pairs - at : PAIRS, padded = (count + 15) / 16 * 16; \
            const uint64_t block = piece->block + (uint64_t)at / 2;                                         \
            blocks(keys, piece->tensor, block, count / 2, space->words[0]);                          \
            blocks(keys, piece->tensor, block + (uint64_t)pairs / 2, count / 2, space->words[1]);    \
            if (in_float32) {                                                                               \
                squared_radii_32(space->words[0], space->power, space->rest, space->radius32, padded, direct); \
                roots32(space->radius32, padded);                                                           \
                turns_32(space->words[1], space->rest, space->quarter, space->radius32, space->draws32[0], space->draws32[1], padded, std, direct); \
                for (int64_t member = 0; member < 2; member++) {                                            \
                    const int64_t first = member * pairs + at, left = piece->size - first;                  \
                    store_draws((float *)piece->out + first, space->draws32[member], left < count ? left : count, flags & FILL, (float)piece->unit); \
                }                                                                                           \
                continue;                                                                                   \
            }                                                                                               \
            for (int64_t j = 0; j < padded; j += 16) { /* root and division wait while the polynomials go on */ \
                squared_radii(space->words[0] + j, space->radius + j, 16, direct);                          \
                roots(space->radius + j, 16);                                                               \
                turns(space->words[1] + j, space->radius + j, space->draws[0] + j, space->draws[1] + j, 16, piece->std, direct); \
            }                                                                                               \
            for (int64_t member = 0; member < 2; member++) {                                                \
                const int64_t first = member * pairs + at, left = piece->size - first;                      \
                const int64_t live = left < count ? left : count;                                           \
                if (flags & FLOAT64)                                                                        \
                    store_double((double *)piece->out + first, space->draws[member], live, flags & FILL, piece->spacing, piece->unit); \
                else                                                                                        \
                    store_float((float *)piece->out + first, space->draws[member], live, flags & FILL, piece->spacing, piece->unit); \
            }                                                                                               \
        }                                                                                                   \
    }
DEFINE_DRAW(draw_256, AES_NI, blocks_128, roots_256, roots32_256, 0)
DEFINE_DRAW(draw_512, VECTOR_AES, blocks_512, roots_512, roots32_512, 1)

/* ------------------------------------------------------------------------------------------------ what Python calls */

/* 0: no such instructions, use the other path; 1: AVX2, FMA and AES; 2: AVX-512 and vector AES. */
LAMINA_EXPORT int lamina_noise_level(void) {
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("aes")) return 0;
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw")
        && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("vaes") ? 2 : 1;
}

typedef struct {
    __m128i keys[11];
    const Piece *pieces;
    int flags, level;
} Work;

static void draw_piece(int i, void *context) {
    const Work *work = context;
    Space space;
    if (work->level >= 2) draw_512(&work->pieces[i], work->keys, &space, work->flags);
    else draw_256(&work->pieces[i], work->keys, &space, work->flags);
    wipe(&space, sizeof space);
}

LAMINA_EXPORT void lamina_noise_draw(const uint8_t *key, const Piece *pieces, int count, int flags, int level, int threads) {
    Work work = {.pieces = pieces, .flags = flags, .level = level};
    expand_key(key, work.keys);
    lamina_parallel(count, threads, draw_piece, &work);
    wipe(&work, sizeof work);
}

VECTOR_AES static void words_512(const __m128i *keys, uint64_t tensor, uint64_t block, int64_t count, uint64_t *out) {
    blocks_512(keys, tensor, block, count, out);
}

/* The key stream itself, for tests: `count` blocks, a multiple of 16. */
LAMINA_EXPORT AES_NI void lamina_noise_words(const uint8_t *key, uint64_t tensor, uint64_t block, int64_t count, uint64_t *out, int level) {
    __m128i keys[11];
    expand_key(key, keys);
    if (level >= 2) words_512(keys, tensor, block, count, out);
    else blocks_128(keys, tensor, block, count, out);
    wipe(keys, sizeof keys);
}

#else /* no kernel for this processor: Python asks for the level first, and draws by itself */

LAMINA_EXPORT int lamina_noise_level(void) { return 0; }
LAMINA_EXPORT void lamina_noise_draw(void) {}
LAMINA_EXPORT void lamina_noise_words(void) {}

#endif
