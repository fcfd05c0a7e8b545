/* Files and a queue in C, without the rest of Spillway: two threads write halves of a file of 64 MiB and read them back
   through one queue, which gets the file and the memory when they are needed. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "spillway/c_io.h"

enum { kRequest = 4 << 20, kRequests = 16, kThreads = 2 };

static void check(spillway_status status) {
  if (status == SPILLWAY_OK) return;
  fprintf(stderr, "%d: %s\n", (int)status, spillway_error_message());
  exit((int)status);
}

typedef struct {
  spillway_io_queue* queue;
  unsigned char* memory;
  uint32_t file;
  spillway_io_op op;
  int first;
} Work;

/* Any thread may submit. */
static void* submit_half(void* argument) {
  const Work* work = argument;
  for (int i = work->first; i < kRequests; i += kThreads) {
    spillway_io_request request = {0};
    request.op = work->op;
    request.file = work->file;
    request.offset = (uint64_t)i * kRequest;
    request.buffer = work->memory + (size_t)i * kRequest;
    request.bytes = kRequest;
    request.tag = (uint64_t)i;
    check(spillway_io_queue_submit(work->queue, &request, 1, NULL));
  }
  return NULL;
}

/* And any may wait; here it is the one that started them. */
static void move_all(spillway_io_queue* queue, unsigned char* memory, uint32_t file, spillway_io_op op) {
  pthread_t threads[kThreads];
  Work work[kThreads];
  for (int t = 0; t < kThreads; ++t) {
    work[t] = (Work){queue, memory, file, op, t};
    if (pthread_create(&threads[t], NULL, submit_half, &work[t]) != 0) exit(1);
  }
  for (int left = kRequests; left > 0;) {
    spillway_io_completion done[8];
    size_t count = 0;
    check(spillway_io_queue_wait(queue, done, 8, 60, &count));
    for (size_t i = 0; i < count; ++i) check(spillway_io_queue_check(queue, op, &done[i]));
    left -= (int)count;
  }
  for (int t = 0; t < kThreads; ++t) pthread_join(threads[t], NULL);
}

static void show(void* user, const char* text) {
  (void)user;
  puts(text);
}

static unsigned char content(size_t i) { return (unsigned char)(i * 2654435761u >> 13); }

int main(int argc, char** argv) {
  const size_t bytes = (size_t)kRequest * kRequests;
  spillway_io_file_options writable = {.struct_size = sizeof writable, .writable = 1, .create = 1};
  spillway_io_memory_info granted = {.struct_size = sizeof granted};
  spillway_io_stats stats = {.struct_size = sizeof stats};
  spillway_io_queue* queue = NULL;
  spillway_io_file* file = NULL;
  void* memory = NULL;
  uint32_t index = 0;
  int32_t registered = 0;
  if (argc != 2) return fprintf(stderr, "usage: c_io_example NEW_FILE\n"), 2;

  check(spillway_io_queue_create(NULL, &queue));
  check(spillway_io_file_open(argv[1], &writable, &file));
  check(spillway_io_file_preallocate(file, bytes)); /* a full disk shows here, not in the middle */
  check(spillway_io_queue_add_file(queue, file, &index));
  check(spillway_io_memory_allocate(bytes, 0, &memory, &granted));
  check(spillway_io_queue_add_region(queue, memory, bytes, &registered));
  printf("memory %s, %s: ", granted.locked ? "locked" : "not locked", registered ? "registered" : "not registered");
  check(spillway_io_queue_describe(queue, show, NULL));

  unsigned char* const data = memory;
  for (size_t i = 0; i < bytes; ++i) data[i] = content(i);
  move_all(queue, data, index, SPILLWAY_IO_WRITE);
  memset(data, 0, bytes);
  move_all(queue, data, index, SPILLWAY_IO_READ);
  for (size_t i = 0; i < bytes; ++i)
    if (data[i] != content(i)) return fprintf(stderr, "byte %zu is wrong\n", i), 1;
  check(spillway_io_queue_stats(queue, &stats));
  printf("%llu MiB written and read back\n", (unsigned long long)stats.read_bytes >> 20);

  check(spillway_io_queue_destroy(queue));
  check(spillway_io_memory_free(memory));
  check(spillway_io_file_close(file));
  return remove(argv[1]);
}
