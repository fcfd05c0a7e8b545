/* Pulls two blocks of weights towards zero, in C: the smallest program on spillway/c_api.h. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "spillway/c_api.h"

enum { kValues = 512 * 300 };

static void check(spillway_status status) {
  if (status == SPILLWAY_OK) return;
  fprintf(stderr, "%d: %s\n", (int)status, spillway_error_message());
  exit((int)status);
}

static int ones(void* user, uint32_t block, uint32_t parameter, uint64_t first, float* out, uint64_t count) {
  (void)block, (void)parameter, (void)first;
  *(uint64_t*)user += count;
  while (count-- > 0) *out++ = 1;
  return 0;
}

static int keep_first(void* user, uint32_t block, uint32_t parameter, uint64_t first, const float* values,
                      uint64_t count) {
  (void)parameter, (void)count;
  if (first == 0) ((float*)user)[block] = values[0];
  return 0;
}

typedef struct {
  const float* weight;
  float* gradient;
} Copy;

/* The gradient of |w|^2 / 2 is w. One of 300 parts. */
static void copy_part(void* user, size_t part) {
  const Copy* copy = user;
  memcpy(copy->gradient + part * 512, copy->weight + part * 512, 512 * sizeof(float));
}

static void copy_weight(void* user, spillway_workers* workers) {
  spillway_workers_parallel_for(workers, 300, copy_part, user);
}

static void show(void* user, const char* text) {
  (void)user;
  puts(text);
}

int main(int argc, char** argv) { /* text of a ds_config.json, directory for the trained weights */
  spillway_config* config = NULL;
  spillway_engine* engine = NULL;
  spillway_step_report report = {.struct_size = sizeof report};
  spillway_options options = {.struct_size = sizeof options};
  spillway_export_options bf16 = {.struct_size = sizeof bf16};
  const uint64_t shape[] = {512, 300};
  float first[2] = {0, 0};
  uint64_t given = 0;
  uint32_t block;
  Copy copies[2];
  if (argc != 3) return 2;
  options.on_existing = SPILLWAY_REPLACE;
  bf16.dtype = SPILLWAY_BFLOAT16;
  check(spillway_config_parse(argv[1], "argument", &config));

  spillway_model* model = spillway_model_create();
  for (block = 0; block < 2; ++block) {
    const char* name = block == 0 ? "a" : "b";
    check(spillway_model_add_block(model, name));
    check(spillway_model_add_parameter(model, block, name, shape, 2, 1, 1));
  }
  check(spillway_model_set_workspace(model, kValues * sizeof(float)));
  check(spillway_model_accept_dtype(model, SPILLWAY_FLOAT32)); /* what the arithmetic below is written for */
  check(spillway_engine_create(config, model, &options, &engine));
  spillway_model_destroy(model);
  spillway_config_destroy(config);

  check(spillway_engine_describe(engine, show, NULL));
  check(spillway_engine_import_weights(engine, ones, &given));
  for (int step = 1; step <= 10; ++step) {
    for (int visit = 0; visit < 4; ++visit) { /* a, b, b, a */
      const spillway_pass pass = visit < 2 ? SPILLWAY_FORWARD : SPILLWAY_BACKWARD;
      spillway_lease* lease = NULL;
      block = visit == 1 || visit == 2;
      check(spillway_engine_acquire(engine, block, pass, NULL, &lease));
      if (pass == SPILLWAY_BACKWARD) {
        Copy* copy = &copies[block]; /* of a step, they live until it has run */
        copy->weight = spillway_lease_weight(lease, 0);
        copy->gradient = spillway_engine_workspace(engine, NULL);
        check(spillway_stream_launch(engine, NULL, copy_weight, copy));
        check(spillway_engine_push_gradient(engine, block, 0, copy->gradient, kValues, SPILLWAY_FLOAT32, NULL));
      }
      check(spillway_lease_release(lease));
    }
    check(spillway_engine_step(engine, "blob", 4, &report));
  }
  printf("given %llu, step %llu, norm %g, link %s, blob %zu\n", (unsigned long long)given,
         (unsigned long long)spillway_engine_current_step(engine), report.gradient_norm, report.link,
         spillway_engine_blob(engine, NULL, 0));
  check(spillway_engine_export_weights(engine, 1, keep_first, first));
  printf("weights %g %g\n", first[0], first[1]);
  check(spillway_engine_export(engine, argv[2], &bf16));
  check(spillway_engine_destroy(engine));
  return 0;
}
