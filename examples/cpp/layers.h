// The arithmetic of train.cc, which knows nothing of the engine's blocks: a table of rows with classes, linear layers
// with ReLU between them, and the loss. All of it is enqueued: a closure holds pointers and numbers, runs later on the
// stream's thread, and spreads itself over the workers. On CUDA these would be kernels.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "spillway/device.h"

struct Table {
  std::size_t columns = 0, classes = 0;
  std::vector<float> values;          // row-major
  std::vector<std::size_t> class_of;  // each row

  // Lines of numbers with commas between them, the last of which is the class, from 0 on. A line of names is left out.
  explicit Table(const char* path) {
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);) {
      if (line.find_first_not_of("0123456789.,+-eE \r") != std::string::npos) continue;
      std::istringstream cells(line);
      std::vector<float> row;
      for (std::string cell; std::getline(cells, cell, ',');) row.push_back(std::stof(cell));
      if (row.size() < 2) continue;
      columns = row.size() - 1;
      class_of.push_back(static_cast<std::size_t>(row.back()));
      classes = std::max(classes, class_of.back() + 1);
      values.insert(values.end(), row.begin(), row.end() - 1);
    }
  }
};

struct Layer {
  std::size_t rows, in, out;
  bool last;  // without ReLU

  // y = x Wᵀ + b.
  void forward(spillway::Stream& stream, const float* x, const float* weight, const float* bias, float* y) const {
    stream.launch([=, layer = *this](spillway::HostWorkers& workers) {
      workers.parallel_for(layer.rows, [&](std::size_t r) {
        for (std::size_t o = 0; o < layer.out; ++o) {
          float sum = bias[o];
          for (std::size_t i = 0; i < layer.in; ++i) sum += x[r * layer.in + i] * weight[o * layer.in + i];
          y[r * layer.out + o] = layer.last ? sum : std::max(sum, 0.0f);
        }
      });
    });
  }

  // From the gradient of y, which it changes, to those of weight, bias and x. No sum is split among workers, so that
  // bits do not depend on how many there are.
  void backward(spillway::Stream& stream, const float* x, const float* weight, const float* y, float* dy,
                float* dweight, float* dbias, float* dx) const {
    stream.launch([=, layer = *this](spillway::HostWorkers& workers) {
      const std::size_t rows = layer.rows, in = layer.in, out = layer.out;
      const bool last = layer.last;
      workers.parallel_for(layer.out, [=](std::size_t o) {
        std::fill_n(dweight + o * in, in, 0.0f);
        dbias[o] = 0;
        for (std::size_t r = 0; r < rows; ++r) {
          if (!last && y[r * out + o] <= 0) dy[r * out + o] = 0;
          dbias[o] += dy[r * out + o];
          for (std::size_t i = 0; i < in; ++i) dweight[o * in + i] += dy[r * out + o] * x[r * in + i];
        }
      });
      workers.parallel_for(layer.rows, [=](std::size_t r) {
        std::fill_n(dx + r * in, in, 0.0f);
        for (std::size_t o = 0; o < out; ++o) {
          for (std::size_t i = 0; i < in; ++i) dx[r * in + i] += dy[r * out + o] * weight[o * in + i];
        }
      });
    });
  }
};

// The mean cross entropy of the rows, and its gradient.
inline void loss_and_gradient(spillway::Stream& stream, std::size_t rows, std::size_t classes, const float* y,
                              const std::size_t* class_of, float* dy, double* loss) {
  stream.launch([=](spillway::HostWorkers&) {
    *loss = 0;
    for (std::size_t r = 0; r < rows; ++r) {
      const float *begin = y + r * classes, most = *std::max_element(begin, begin + classes);
      float sum = 0;
      for (std::size_t c = 0; c < classes; ++c) sum += dy[r * classes + c] = std::exp(begin[c] - most);
      for (std::size_t c = 0; c < classes; ++c) {
        dy[r * classes + c] = (dy[r * classes + c] / sum - (c == class_of[r])) / static_cast<float>(rows);
      }
      *loss += (std::log(sum) + most - begin[class_of[r]]) / static_cast<double>(rows);
    }
  });
}
