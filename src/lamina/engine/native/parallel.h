/* What every source file here shares: exported functions, and work spread over threads. */
#ifndef LAMINA_PARALLEL_H
#define LAMINA_PARALLEL_H

#define LAMINA_EXPORT __attribute__((visibility("default")))
#define LAMINA_ABI 6 /* raised with every change of an exported function; `ABI` in __init__.py must be the same */

/* Calls body(part, context) once for each part in 0 … parts-1, on at most `threads` threads, in any order.
   What is computed must depend on the part alone, never on the thread. */
typedef void (*lamina_body)(int part, void *context);
void lamina_parallel(int parts, int threads, lamina_body body, void *context);

#endif
