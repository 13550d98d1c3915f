/* Threads are those of the OpenMP runtime that torch has loaded, so that two pools do not fight for the cores:
   the loader passes its GOMP_parallel. Without it everything runs on the calling thread. */
#include "parallel.h"

#include <stdatomic.h>
#include <stddef.h>

typedef void (*gomp_parallel)(void (*)(void *), void *, unsigned, unsigned);
static gomp_parallel start_threads;

struct work {
    atomic_int next;
    int parts;
    lamina_body body;
    void *context;
};

static void take_parts(void *argument) {
    struct work *work = argument;
    for (int part; (part = atomic_fetch_add(&work->next, 1)) < work->parts;) work->body(part, work->context);
}

void lamina_parallel(int parts, int threads, lamina_body body, void *context) {
    struct work work = {.parts = parts, .body = body, .context = context};
    atomic_init(&work.next, 0);
    if (threads > parts) threads = parts;
    if (threads > 1 && start_threads != NULL)
        start_threads(take_parts, &work, (unsigned)threads, 0);
    else
        take_parts(&work);
}

LAMINA_EXPORT const char *lamina_sources(void) { return LAMINA_SOURCES; }

LAMINA_EXPORT void lamina_use_threads(void *parallel) { start_threads = (gomp_parallel)parallel; }

/* 2: AVX-512, 1: AVX2 with FMA, 0: neither. */
LAMINA_EXPORT int lamina_processor(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq")) return 2;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 1;
#endif
    return 0;
}
