// Goes on with what DeepSpeed trained: two layers, the first of them frozen.
#include <cstdio>

#include "spillway/engine.h"
#include "spillway/import.h"

using namespace spillway;

int main(int, char** argv) {  // ds_config.json, DeepSpeed's checkpoints, where the snapshot goes
  const Config config = load_config(argv[1]);
  ModelDescription model;
  model.blocks.push_back({"first", {{.name = "first.weight", .shape = {7, 5}, .trainable = false}}});
  model.blocks.push_back(
      {"second", {{.name = "second.weight", .shape = {5, 3}}, {.name = "second.bias", .shape = {3}}}});
  const DeepSpeedInfo facts = import_deepspeed(argv[2], model, argv[3], {.weights = config.weights});
  std::printf("DeepSpeed %s stopped at step %d\n", facts.version.c_str(), static_cast<int>(facts.optimizer_steps));
  const auto engine = Engine::create(config, model, {.snapshot = argv[3]});
  std::printf("this run is at step %d\n", static_cast<int>(engine->current_step()));
}
