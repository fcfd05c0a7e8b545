#include "spillway/config_type.h"

#include <gtest/gtest.h>

namespace spillway {
namespace {

TEST(ConfigType, TheTypeIsNamedAndNothingElseChanges) {
  // Not even how a number is written; and only the model's own key is the model's.
  const auto text = [](const std::string& type) {
    return R"({"dtype")" + type + R"(, "task_specific_params": {"dtype": "int8", "b": 1.50e-05}, "c": [1]})";
  };
  EXPECT_EQ(with_type(text(" : \"float\\u0031\\u0036\""), DType::kFloat32), text(": \"float32\""));
  EXPECT_EQ(with_type(text(" : \"float32\""), DType::kFloat32), text(" : \"float32\""));
  EXPECT_EQ(with_type(text(": \"float32\""), DType::kBFloat16), text(": \"bfloat16\""));
  EXPECT_EQ(with_type(R"({"torch_dtype": "bfloat16", "dtype": "float32"})", DType::kFloat16),
            R"({"torch_dtype": "float16", "dtype": "float16"})");
}

TEST(ConfigType, WhatNamesNoTypeComesBackAsItIs) {
  for (const std::string text : {"", "{}", "[]", "null", "{\"layers\": 3}\n", "{\"torch_dtype\": null}",
                                 "[\"dtype\", \"float32\"]", "{\"dtype\": \"float32\"", "{\"dtype\": \"float32\"} {"}) {
    EXPECT_EQ(with_type(text, DType::kBFloat16), text);
  }
  const std::string zero("{\"dtype\": \"float32\"}\0{", 22);
  EXPECT_EQ(with_type(zero, DType::kFloat32), zero);
}

}  // namespace
}  // namespace spillway
