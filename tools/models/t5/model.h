// T5, which is planned for and not trained: an encoder, and a decoder that attends to it.
#pragma once

#include "tools/models/shape.h"

namespace spillway::models {

class ConfigJson;

ModelShape t5_shape(const ConfigJson& json);
ModelDescription t5_parameters(const ModelShape& shape);

}  // namespace spillway::models
