/* Goes on in C with what DeepSpeed trained: one layer in bf16. */
#include <stdio.h>
#include <stdlib.h>

#include "spillway/c_api.h"

static void check(spillway_status status) {
  if (status == SPILLWAY_OK) return;
  fprintf(stderr, "%d: %s\n", (int)status, spillway_error_message());
  exit((int)status);
}

static void show(void* user, const char* json) { fputs(json, (FILE*)user); }

int main(int argc, char** argv) { /* text of a ds_config.json, DeepSpeed's checkpoints, where the snapshot goes */
  const uint64_t weight[] = {5, 3}, bias[] = {3};
  const spillway_dtype bf16 = SPILLWAY_BFLOAT16;
  spillway_import_options how = {.struct_size = sizeof how};
  spillway_options options = {.struct_size = sizeof options};
  spillway_config* config = NULL;
  spillway_engine* engine = NULL;
  if (argc != 4) return 2;
  how.tag = "global_step4";
  how.weights = &bf16;
  spillway_model* model = spillway_model_create();
  check(spillway_model_add_block(model, "layer"));
  check(spillway_model_add_parameter(model, 0, "weight", weight, 2, 1, 1));
  check(spillway_model_add_parameter(model, 0, "bias", bias, 1, 1, 1));

  check(spillway_import_deepspeed(argv[2], model, argv[3], &how, show, stdout));
  options.on_existing = SPILLWAY_REPLACE;
  options.snapshot = argv[3];
  check(spillway_config_parse(argv[1], "argument", &config));
  check(spillway_engine_create(config, model, &options, &engine));
  fprintf(stderr, "step %d\n", (int)spillway_engine_current_step(engine));
  spillway_engine_destroy(engine);
  spillway_model_destroy(model);
  spillway_config_destroy(config);
  return 0;
}
