// Operations on rows: the tables, norms, rotary positions, gated activations, sums.
#include <cstring>

#include "tools/models/ops/ops_host.h"

namespace spillway::models {

void HostOps::run(const Embedding& op, Stream& stream) {
  const std::size_t width = shape_.width, m = tokens(op.count);
  require_in_hbm(op.tokens, m * sizeof(std::uint32_t));
  require_tensor(op.token_weight, shape_.vocabulary * width);
  if (op.position_weight != nullptr) require_tensor(op.position_weight, shape_.positions * width);
  require_tensor(op.out, m * width);
  SPILLWAY_CHECK(op.position_weight == nullptr || op.scale == 1, "only a token's own row is scaled");
  stream.launch([this, op, width, tokens = m](HostWorkers& workers) {
    for_pieces(workers, tokens, kRowsPerPiece, [&](std::size_t first, std::size_t count) {
      for (std::size_t m = first; m < first + count; ++m) {
        const std::byte* row = at(op.token_weight, op.tokens[m] * width);
        if (op.position_weight == nullptr)
          kernels_.scale(row, op.scale, at(op.out, m * width), width);
        else
          kernels_.add(row, at(op.position_weight, (op.first + m) % shape_.sequence * width), at(op.out, m * width),
                       width);
      }
    });
  });
}

void HostOps::run(const EmbeddingBackward& op, Stream& stream) {
  const std::size_t width = shape_.width, m = tokens(op.count);
  require_in_hbm(op.tokens, m * sizeof(std::uint32_t));
  require_tensor(op.dout, m * width);
  require_in_hbm(op.dtoken_weight, shape_.vocabulary * width * sizeof(float));
  if (op.dposition_weight != nullptr) require_in_hbm(op.dposition_weight, shape_.positions * width * sizeof(float));
  stream.launch([this, op](HostWorkers& workers) { embedding_backward(op, workers); });
}

// Split by columns: rows of the table are hit by several tokens, and their order must not change.
void HostOps::embedding_backward(const EmbeddingBackward& op, HostWorkers& workers) const {
  const std::size_t width = shape_.width;
  for_pieces(workers, width, kPanel, [&](std::size_t first, std::size_t count) {
    for (std::size_t m = 0; m < tokens(op.count); ++m) {
      const std::byte* row = at(op.dout, m * width + first);
      kernels_.accumulate_scaled(row, op.scale, op.dtoken_weight + op.tokens[m] * width + first, count);
      if (op.dposition_weight == nullptr) continue;
      kernels_.accumulate(row, op.dposition_weight + (op.first + m) % shape_.sequence * width + first, count);
    }
  });
}

void HostOps::run(const LayerNorm& op, Stream& stream) {
  const std::size_t width = shape_.width, m = tokens(op.count), bytes = m * width * element_bytes();
  require_in_hbm(op.x, bytes);
  require_in_hbm(op.out, bytes);
  require_in_hbm(op.weight, width * element_bytes());
  require_in_hbm(op.bias, width * element_bytes());
  require_in_hbm(op.statistics, m * sizeof(LayerNormStatistics));
  stream.launch([this, op, width](HostWorkers& workers) {
    auto* statistics = reinterpret_cast<LayerNormStatistics*>(op.statistics);
    for_pieces(workers, tokens(op.count), kRowsPerPiece, [&](std::size_t first, std::size_t count) {
      for (std::size_t m = first; m < first + count; ++m) {
        statistics[m] =
            kernels_.layer_norm(at(op.x, m * width), op.weight, op.bias, at(op.out, m * width), width, shape_.epsilon);
      }
    });
  });
}

void HostOps::run(const LayerNormBackward& op, Stream& stream) {
  const std::size_t width = shape_.width, m = tokens(op.count), bytes = m * width * element_bytes();
  require_in_hbm(op.x, bytes);
  require_in_hbm(op.dout, bytes);
  require_in_hbm(op.dx, bytes);
  if (op.residual != nullptr) require_in_hbm(op.residual, bytes);
  require_in_hbm(op.weight, width * element_bytes());
  require_in_hbm(op.statistics, m * sizeof(LayerNormStatistics));
  SPILLWAY_CHECK((op.dweight == nullptr) == (op.dbias == nullptr), "weight and bias of a norm are trained together");
  if (op.dweight != nullptr) require_in_hbm(op.dweight, width * size_of(op.gradient));
  if (op.dbias != nullptr) require_in_hbm(op.dbias, width * size_of(op.gradient));
  SPILLWAY_CHECK(!op.accumulate || op.gradient == DType::kFloat32, "sums of gradients are fp32");
  stream.launch([this, op](HostWorkers& workers) { layer_norm_backward(op, workers); });
}

void HostOps::layer_norm_backward(const LayerNormBackward& op, HostWorkers& workers) const {
  const std::size_t width = shape_.width;
  const auto* statistics = reinterpret_cast<const LayerNormStatistics*>(op.statistics);
  // Columns first: dx may then lie over x or dout.
  for_pieces(workers, op.dweight == nullptr ? 0 : width, kPanel, [&](std::size_t first, std::size_t count) {
    float dweight[kPanel] = {}, dbias[kPanel] = {};
    kernels_.layer_norm_backward_columns(at(op.x, first), at(op.dout, first), width, tokens(op.count), count,
                                         statistics, dweight, dbias);
    store_gradient(dweight, 1, count, op.gradient, op.accumulate, op.dweight, first, width);
    store_gradient(dbias, 1, count, op.gradient, op.accumulate, op.dbias, first, width);
  });
  for_pieces(workers, tokens(op.count), kRowsPerPiece, [&](std::size_t first, std::size_t count) {
    for (std::size_t m = first; m < first + count; ++m) {
      kernels_.layer_norm_backward(at(op.x, m * width), op.weight, at(op.dout, m * width),
                                   op.residual == nullptr ? nullptr : at(op.residual, m * width), at(op.dx, m * width),
                                   width, statistics[m]);
    }
  });
}

void HostOps::run(const RmsNorm& op, Stream& stream) {
  const std::size_t columns = std::size_t{op.groups} * op.columns, m = tokens(op.count);
  require_rows(op.x, m, op.x_stride, columns);
  require_rows(op.out, m, op.out_stride, columns);
  require_tensor(op.weight, op.columns);
  require_in_hbm(op.statistics, m * op.groups * sizeof(float));
  stream.launch([this, op](HostWorkers& workers) {
    for_pieces(workers, tokens(op.count), kRowsPerPiece, [&](std::size_t first, std::size_t count) {
      for (std::size_t row = first * op.groups; row < (first + count) * op.groups; ++row) {
        const std::size_t m = row / op.groups, column = row % op.groups * op.columns;
        op.statistics[row] = kernels_.rms_norm(at(op.x, m * op.x_stride + column), op.weight, op.offset,
                                               at(op.out, m * op.out_stride + column), op.columns, shape_.epsilon);
      }
    });
  });
}

void HostOps::run(const RmsNormBackward& op, Stream& stream) {
  const std::size_t columns = std::size_t{op.groups} * op.columns, m = tokens(op.count);
  require_rows(op.x, m, op.x_stride, columns);
  require_rows(op.dout, m, op.dout_stride, columns);
  require_rows(op.dx, m, op.dx_stride, columns);
  SPILLWAY_CHECK(op.residual == nullptr || op.groups == 1, "what is added to a gradient is one row a token");
  if (op.residual != nullptr) require_tensor(op.residual, m * op.columns);
  require_tensor(op.weight, op.columns);
  require_in_hbm(op.statistics, m * op.groups * sizeof(float));
  if (op.dweight != nullptr) require_in_hbm(op.dweight, op.columns * size_of(op.gradient));
  SPILLWAY_CHECK(!op.accumulate || op.gradient == DType::kFloat32, "sums of gradients are fp32");
  stream.launch([this, op](HostWorkers& workers) { rms_norm_backward(op, workers); });
}

void HostOps::rms_norm_backward(const RmsNormBackward& op, HostWorkers& workers) const {
  // Columns first: dx may then lie over dout.
  for_pieces(workers, op.dweight == nullptr ? 0 : op.columns, kPanel, [&](std::size_t first, std::size_t count) {
    float dweight[kPanel] = {};
    for (std::size_t g = 0; g < op.groups; ++g) {
      const std::size_t column = g * op.columns + first;
      kernels_.rms_norm_backward_columns({at(op.x, column), op.x_stride}, {at(op.dout, column), op.dout_stride},
                                         tokens(op.count), count, op.statistics + g, op.groups, dweight);
    }
    store_gradient(dweight, 1, count, op.gradient, op.accumulate, op.dweight, first, op.columns);
  });
  for_pieces(workers, tokens(op.count), kRowsPerPiece, [&](std::size_t first, std::size_t count) {
    for (std::size_t row = first * op.groups; row < (first + count) * op.groups; ++row) {
      const std::size_t m = row / op.groups, column = row % op.groups * op.columns;
      kernels_.rms_norm_backward(at(op.x, m * op.x_stride + column), op.weight, op.offset,
                                 at(op.dout, m * op.dout_stride + column),
                                 op.residual == nullptr ? nullptr : at(op.residual, m * op.columns),
                                 at(op.dx, m * op.dx_stride + column), op.columns, op.statistics[row]);
    }
  });
}

void HostOps::run(const Rotary& op, Stream& stream) {
  const std::size_t m = tokens(op.count);
  require_rows(op.x, m, op.stride, std::size_t{op.heads} * op.head_width);
  SPILLWAY_CHECK(op.rotated % 2 == 0 && op.rotated <= op.head_width, "columns are turned in pairs");
  require_in_hbm(op.table, std::size_t{shape_.sequence} * op.rotated * sizeof(float));
  if (op.positions != nullptr) require_in_hbm(op.positions, m * sizeof(std::uint32_t));
  stream.launch([this, op](HostWorkers& workers) {
    for_pieces(workers, tokens(op.count), kRowsPerPiece, [&](std::size_t first, std::size_t count) {
      for (std::size_t m = first; m < first + count; ++m) {
        const std::size_t position = op.positions != nullptr ? op.positions[m] : m % shape_.sequence;
        for (std::size_t h = 0; h < op.heads; ++h) {
          kernels_.rotate(at(op.x, m * op.stride + h * op.head_width), op.table + position * op.rotated, op.rotated / 2,
                          op.backward);
        }
      }
    });
  });
}

void HostOps::run(const GatedActivation& op, Stream& stream) {
  const std::size_t inner = shape_.inner, m = tokens(op.count);
  require_tensor(op.gate_up, 2 * m * inner);
  require_tensor(op.out, m * inner);
  const auto gated = kernels_.gated[static_cast<std::size_t>(op.activation)];
  stream.launch([this, op, inner, gated](HostWorkers& workers) {
    for_pieces(workers, tokens(op.count), kRowsPerPiece, [&](std::size_t first, std::size_t count) {
      for (std::size_t m = first; m < first + count; ++m) {
        const std::byte* gate = at(op.gate_up, 2 * m * inner);
        gated(gate, gate + inner * element_bytes(), at(op.out, m * inner), inner);
      }
    });
  });
}

void HostOps::run(const GatedActivationBackward& op, Stream& stream) {
  const std::size_t inner = shape_.inner, m = tokens(op.count);
  require_tensor(op.gate_up, 2 * m * inner);
  require_tensor(op.dout, m * inner);
  require_tensor(op.dgate_up, 2 * m * inner);
  const auto gated_backward = kernels_.gated_backward[static_cast<std::size_t>(op.activation)];
  stream.launch([this, op, inner, gated_backward](HostWorkers& workers) {
    for_pieces(workers, tokens(op.count), kRowsPerPiece, [&](std::size_t first, std::size_t count) {
      for (std::size_t m = first; m < first + count; ++m) {
        const std::size_t gate = 2 * m * inner, up = gate + inner;
        gated_backward(at(op.gate_up, gate), at(op.gate_up, up), at(op.dout, m * inner), at(op.dgate_up, gate),
                       at(op.dgate_up, up), inner);
      }
    });
  });
}

// body(first, count): pieces of tensors of as many elements each.
template <typename Body>
void HostOps::each_element(std::initializer_list<const void*> tensors, std::size_t elements, Stream& stream,
                           const Body& body) const {
  for (const void* tensor : tensors) require_tensor(tensor, elements);
  stream.launch([elements, body](HostWorkers& workers) { for_pieces(workers, elements, kElementsPerPiece, body); });
}

void HostOps::run(const Scale& op, Stream& stream) {
  each_element({op.x, op.out}, tokens(op.count) * op.columns, stream, [this, op](std::size_t first, std::size_t count) {
    kernels_.scale(at(op.x, first), op.factor, at(op.out, first), count);
  });
}

void HostOps::run(const Gelu& op, Stream& stream) {
  each_element({op.before, op.after}, tokens(op.count) * op.columns, stream,
               [this, op](std::size_t first, std::size_t count) {
                 kernels_.gelu(at(op.before, first), at(op.after, first), count);
               });
}

void HostOps::run(const GeluBackward& op, Stream& stream) {
  each_element({op.before, op.dx}, tokens(op.count) * op.columns, stream,
               [this, op](std::size_t first, std::size_t count) {
                 kernels_.gelu_backward(at(op.before, first), at(op.dx, first), at(op.dx, first), count);
               });
}

void HostOps::run(const Add& op, Stream& stream) {
  each_element({op.a, op.b, op.sum}, tokens(op.count) * shape_.width, stream,
               [this, op](std::size_t first, std::size_t count) {
                 kernels_.add(at(op.a, first), at(op.b, first), at(op.sum, first), count);
               });
}

void HostOps::run(const CopyRows& op, Stream& stream) {
  require_rows(op.from, tokens(op.count), op.from_stride, op.columns);
  require_rows(op.to, tokens(op.count), op.to_stride, op.columns);
  stream.launch([this, op](HostWorkers& workers) {
    for_pieces(workers, tokens(op.count), kRowsPerPiece, [&](std::size_t first, std::size_t count) {
      for (std::size_t m = first; m < first + count; ++m) {
        std::memcpy(at(op.to, m * op.to_stride), at(op.from, m * op.from_stride), op.columns * element_bytes());
      }
    });
  });
}

}  // namespace spillway::models
