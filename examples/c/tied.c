/* Trains a language model of bytes in C. Its embedding is tied: what a step needs first is what it needs last.
 *
 *   tied ds_config.json TEXT OUT STEPS
 *
 * OUT gets the weights, as model.safetensors.
 */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#include "log_bilinear.h"
#include "spillway/c_api.h"

enum { kEmbedding, kMix }; /* the blocks */

static void check(spillway_status status) {
  if (status == SPILLWAY_OK) return;
  fprintf(stderr, "tied: %s\n", spillway_error_message());
  exit(1);
}

static char* read_file(const char* path, size_t* bytes) {
  enum { kMost = 1 << 24 }; /* enough for an example */
  char* text = calloc(1, kMost);
  FILE* file = fopen(path, "rb");
  if (file == NULL || text == NULL) {
    perror(path);
    exit(1);
  }
  *bytes = fread(text, 1, kMost - 1, file);
  fclose(file);
  return text;
}

/* A step's visits in order. The embedding has two in backward, each with a gradient, which the engine adds up. */
static const struct {
  uint32_t block;
  spillway_pass pass;
  void (*work)(void*, spillway_workers*);
  size_t gradient; /* its place in Step */
} kVisits[] = {{kEmbedding, SPILLWAY_FORWARD, embed, 0},
               {kMix, SPILLWAY_FORWARD, mix, 0},
               {kEmbedding, SPILLWAY_BACKWARD, head, offsetof(Step, dhead)},
               {kMix, SPILLWAY_BACKWARD, mix_backward, offsetof(Step, dmix)},
               {kEmbedding, SPILLWAY_BACKWARD, embed_backward, offsetof(Step, dembedding)}};
enum { kVisitCount = sizeof kVisits / sizeof *kVisits };

static spillway_model* describe(void) {
  static const uint64_t kShapes[][2] = {{kBytes, kWidth}, {kContext, kWidth}};
  spillway_model* model = spillway_model_create();
  check(spillway_model_add_block(model, "embedding"));
  check(spillway_model_add_parameter(model, kEmbedding, "embedding.weight", kShapes[0], 2, 1, 2)); /* 2 gradients */
  check(spillway_model_add_block(model, "mix"));
  check(spillway_model_add_parameter(model, kMix, "mix.weight", kShapes[1], 2, 1, 1));
  for (int v = 0; v < kVisitCount; ++v) check(spillway_model_add_visit(model, kVisits[v].block, kVisits[v].pass));
  check(spillway_model_set_workspace(model, sizeof(Step)));
  check(spillway_model_accept_dtype(model, SPILLWAY_FLOAT32)); /* what the arithmetic above is written for */
  return model;
}

static int first_weights(void* user, uint32_t block, uint32_t parameter, uint64_t first, float* out, uint64_t count) {
  (void)user, (void)parameter, (void)first;
  for (; count > 0; --count) *out++ = block == kMix ? 1.0f / kContext : 0.2f * ((float)rand() / (float)RAND_MAX - 0.5f);
  return 0;
}

static void train_step(spillway_engine* engine, Step* s, spillway_step_report* report) {
  Visit visits[kVisitCount]; /* they live until the step has run */
  for (int v = 0; v < kVisitCount; ++v) {
    const uint32_t block = kVisits[v].block;
    spillway_lease* lease = NULL;
    check(spillway_engine_acquire(engine, block, kVisits[v].pass, NULL, &lease));
    visits[v].step = s;
    visits[v].weight = spillway_lease_weight(lease, 0);
    check(spillway_stream_launch(engine, NULL, kVisits[v].work, &visits[v]));
    if (kVisits[v].pass == SPILLWAY_BACKWARD) {
      check(spillway_engine_push_gradient(engine, block, 0, (char*)s + kVisits[v].gradient, 0, SPILLWAY_FLOAT32, NULL));
    }
    check(spillway_lease_release(lease));
  }
  check(spillway_engine_step(engine, NULL, 0, report)); /* waits for what was enqueued */
}

int main(int argc, char** argv) {
  if (argc != 5) {
    fprintf(stderr, "usage: tied ds_config.json TEXT OUT STEPS\n");
    return 2;
  }
  size_t bytes = 0;
  spillway_config* config = NULL;
  spillway_engine* engine = NULL;
  spillway_options options = {.struct_size = sizeof options};
  options.on_existing = SPILLWAY_REPLACE;
  check(spillway_config_parse(read_file(argv[1], &bytes), argv[1], &config));
  const unsigned char* text = (unsigned char*)read_file(argv[2], &bytes);
  if (bytes <= kContext) {
    fprintf(stderr, "tied: %s: has no more than %d bytes\n", argv[2], kContext);
    return 1;
  }
  check(spillway_engine_create(config, describe(), &options, &engine));
  check(spillway_engine_import_weights(engine, first_weights, NULL));
  Step* s = spillway_engine_workspace(engine, NULL);
  for (int step = 0; step < atoi(argv[4]); ++step) {
    spillway_step_report report = {.struct_size = sizeof report};
    for (int r = 0; r < kRows; ++r) s->rows[r] = text + (size_t)rand() % (bytes - kContext);
    train_step(engine, s, &report);
    printf("step %llu  loss %.4f  norm %.3f\n", (unsigned long long)report.step, s->loss, report.gradient_norm);
  }
  spillway_export_options fp32 = {.struct_size = sizeof fp32};
  fp32.replace = 1;
  check(spillway_engine_export(engine, argv[3], &fp32));
  check(spillway_engine_destroy(engine));
  return 0;
}
