// Decoders as the planner and the trainer see them: blocks, tensors and visits, under Hugging Face's names.
#pragma once

#include <cstdint>

#include "tools/models/decoder/config.h"
#include "tools/models/shape.h"
#include "tools/models/trained_model.h"

namespace spillway::models {

ModelShape decoder_shape(DecoderConfig config);
// Blocks: the embedding, the layers, and, unless it is tied to the embedding, the head with the final norm.
ModelDescription decoder_parameters(const DecoderConfig& config);
// Of decoder_config(); for rows of `sequence` tokens. Visits: embedding and layers forward; the head (forward, loss and
// backward in one, on the block of its weights); layers backward; embedding backward. Every parameter is pushed once.
TrainedModel trained_decoder(const DecoderConfig& config, std::uint32_t sequence);

}  // namespace spillway::models
