/* What every source file here shares: exported functions, and work spread over threads. */
#ifndef LAMINA_PARALLEL_H
#define LAMINA_PARALLEL_H

#define LAMINA_EXPORT __attribute__((visibility("default")))
#ifndef LAMINA_SOURCES
#define LAMINA_SOURCES "unknown" /* setup.py gives the digest of all sources, which the loader compares: sources.py */
#endif

/* Calls body(part, context) once for each part in 0 … parts-1, on at most `threads` threads, in any order.
   What is computed must depend on the part alone, never on the thread. */
typedef void (*lamina_body)(int part, void *context);
void lamina_parallel(int parts, int threads, lamina_body body, void *context);

#endif
