// OpenMP for oneDNN in the wheel's program: a team of one. Spillway holds oneDNN at one thread a call and shares its
// panels out itself, so the real libgomp would only stand beside PyTorch's. What libdnnl asks for is all that is here;
// one that asks for more does not load.
#include <stdbool.h>

// The caller runs the body itself, as one of the team: there are no others to start.
void GOMP_parallel_start(void (*body)(void*), void* data, unsigned threads) { (void)body, (void)data, (void)threads; }
void GOMP_parallel_end(void) {}
void GOMP_barrier(void) {}

// The whole range in one piece, and no second one.
bool GOMP_loop_static_start(long start, long end, long step, long chunk, long* from, long* to) {
  (void)chunk;
  *from = start;
  *to = end;
  return step > 0 ? start < end : start > end;
}
bool GOMP_loop_static_next(long* from, long* to) {
  (void)from, (void)to;
  return false;
}
void GOMP_loop_end_nowait(void) {}

int omp_get_max_threads(void) { return 1; }
int omp_get_num_threads(void) { return 1; }
int omp_get_thread_num(void) { return 0; }
int omp_in_parallel(void) { return 0; }
void omp_set_num_threads(int threads) { (void)threads; }
