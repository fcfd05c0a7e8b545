#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <random>
#include <vector>

#include "spillway/error.h"
#include "spillway/safetensors.h"
#include "src/formats/safetensors_header.h"
#include "tests/seed.h"
#include "tests/src/model_directory.h"

namespace spillway {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class SafetensorsReaderTest : public ModelDirectory {
 protected:
  std::string refusal() const {
    try {
      SafetensorsReader::open(directory_);
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  }
  std::string refusal_of(const std::string& header, std::size_t data_bytes) const {
    write_file("model.safetensors", safetensors_file(header, data_bytes));
    return refusal();
  }
};

const char* const kGood = R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";

// Written by safetensors 0.8.0 (Python): save_file({"bf": [1.5, -2, inf] bf16, "half": [[0.1, -65504], [6e-8, nan]]
// fp16, "w": [[1, 2.5, -3], [4, 5, 1e-40]] fp32, "mask": [True, False] bool, "empty": zeros (0, 3)},
// metadata={"format": "pt"}).
const unsigned char kReal[] = {
#include "tests/src/real_model.inc"
};

TEST(Printable, NamesAreUtf8WhateverTheyWere) {
  EXPECT_EQ(printable("h.0.größe"), "h.0.größe");
  EXPECT_EQ(printable("a\n\x7f"
                      "b\xff\xc3"),
            "a??b??");
  EXPECT_EQ(printable("\xed\xa0\x80"), "???") << "half a surrogate pair";
  EXPECT_EQ(printable(std::string(119, 'x') + "öy"), std::string(119, 'x') + "ö…") << "never cut inside a character";
}

TEST_F(SafetensorsReaderTest, ReadsWhatTheFormatsOwnLibraryWrote) {
  write_file("model.safetensors", std::string(reinterpret_cast<const char*>(kReal), sizeof(kReal)));
  auto reader = SafetensorsReader::open(directory_);
  ASSERT_EQ(reader.tensors().size(), 5u);

  const TensorEntry* w = reader.find("w");
  ASSERT_NE(w, nullptr);
  EXPECT_EQ(w->shape, (std::vector<std::uint64_t>{2, 3}));
  EXPECT_EQ(w->type, DType::kFloat32);
  std::vector<float> values(6);
  reader.read(*w, 0, values);
  EXPECT_EQ(values, (std::vector<float>{1, 2.5, -3, 4, 5, 1e-40f}));
  reader.read(*w, 4, std::span(values).first(2));
  EXPECT_EQ(values, (std::vector<float>{5, 1e-40f, -3, 4, 5, 1e-40f}));

  values.resize(3);
  reader.read(*reader.find("bf"), 0, values);
  EXPECT_EQ(values, (std::vector<float>{1.5, -2, INFINITY}));
  values.resize(4);
  reader.read(*reader.find("half"), 0, values);
  EXPECT_EQ(values[0], 0x1.998p-4f);
  EXPECT_EQ(values[1], -65504.0f);
  EXPECT_EQ(values[2], 0x1p-24f);
  EXPECT_TRUE(std::isnan(values[3]));

  EXPECT_EQ(reader.find("mask")->dtype, "BOOL");
  EXPECT_FALSE(reader.find("mask")->type.has_value());
  EXPECT_THROW(reader.read(*reader.find("mask"), 0, values), Error);
  EXPECT_EQ(reader.find("empty")->elements, 0u);
  EXPECT_EQ(reader.find("x"), nullptr);
  EXPECT_EQ(reader.file(*w), directory_ / "model.safetensors");
}

TEST_F(SafetensorsReaderTest, ReadingPastATensorsEndIsRefused) {
  write_file("model.safetensors", safetensors_file(kGood, 8));
  auto reader = SafetensorsReader::open(directory_);
  std::vector<float> values(2);
  const TensorEntry& w = reader.tensors()[0];
  reader.read(w, 0, values);
  EXPECT_THROW(reader.read(w, 1, values), Error);
  EXPECT_THROW(reader.read(w, UINT64_MAX, values), Error);
}

TEST_F(SafetensorsReaderTest, TensorsLargerThanAChunkAreReadAtAnyPlace) {
  // 600,000 bf16 values of 2 bytes, the value of element i being its index's low bits: more than one chunk of 1 MiB.
  const std::uint64_t count = 600'000;
  std::string data(2 * count, '\0');
  for (std::uint64_t i = 0; i < count; ++i) {
    const auto bits = static_cast<std::uint16_t>(i % 0x7f80);
    std::memcpy(data.data() + 2 * i, &bits, 2);
  }
  const std::string header = R"({"w":{"dtype":"BF16","shape":[600000],"data_offsets":[0,1200000]}})";
  write_file("model.safetensors", safetensors_file(header, 0) + data);
  auto reader = SafetensorsReader::open(directory_);
  std::vector<float> values(count - 7);
  reader.read(reader.tensors()[0], 7, values);
  for (std::uint64_t i = 0; i < values.size(); ++i) {
    ASSERT_EQ(std::bit_cast<std::uint32_t>(values[i]) >> 16, (i + 7) % 0x7f80) << i;
  }
}

TEST_F(SafetensorsReaderTest, AFileCutShortAfterOpeningIsAnErrorWithItsOffset) {
  write_file("model.safetensors", safetensors_file(kGood, 8));
  auto reader = SafetensorsReader::open(directory_);
  std::filesystem::resize_file(directory_ / "model.safetensors", 8 + strlen(kGood) + 6);
  std::vector<float> values(2);
  try {
    reader.read(reader.tensors()[0], 0, values);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kCorrupt);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("model.safetensors"), HasSubstr("2 bytes early")));
  }
}

TEST_F(SafetensorsReaderTest, FilesThatAreNotWholeAreRefused) {
  EXPECT_THAT(refusal(), HasSubstr("neither model.safetensors nor"));
  write_file("pytorch_model.bin", "x");
  EXPECT_THAT(refusal(), HasSubstr("safe_serialization"));
  write_file("model.safetensors", "1234567");
  EXPECT_THAT(refusal(), HasSubstr("a file of 7 bytes"));
  write_file("model.safetensors", safetensors_file(kGood, 8).substr(0, 30));
  EXPECT_THAT(refusal(), HasSubstr("its header claims"));
  EXPECT_THAT(refusal_of(kGood, 7),
              AllOf(HasSubstr("model.safetensors: tensor \"w\""), HasSubstr("outside the file's 7")));
  EXPECT_THAT(refusal_of(kGood, 9), HasSubstr("1 bytes of data belong to no tensor"));
  EXPECT_EQ(refusal_of(kGood, 8), "accepted");
  std::string huge = safetensors_file(kGood, 8);
  const std::uint64_t length = UINT64_MAX;  // 8 + length overflows
  std::memcpy(huge.data(), &length, 8);
  write_file("model.safetensors", huge);
  EXPECT_THAT(refusal(), HasSubstr("claims 18446744073709551615 bytes"));
}

TEST_F(SafetensorsReaderTest, AHeaderOfMoreThan100MillionBytesIsRefusedUnread) {
  write_file("model.safetensors", safetensors_file("", 0));
  std::filesystem::resize_file(directory_ / "model.safetensors", 200'000'000);  // sparse
  const std::uint64_t length = 100'000'001;
  std::fstream stream(directory_ / "model.safetensors", std::ios::binary | std::ios::in | std::ios::out);
  stream.write(reinterpret_cast<const char*>(&length), 8);
  stream.close();
  EXPECT_THAT(refusal(), HasSubstr("at most 100000000 bytes"));
}

TEST_F(SafetensorsReaderTest, APipeIsNotWaitedFor) {
  ASSERT_EQ(::mkfifo((directory_ / "model.safetensors").c_str(), 0600), 0);
  EXPECT_THAT(refusal(), HasSubstr("not a regular file"));
}

struct Hostile {
  const char* header;
  std::size_t data_bytes;
  const char* message;
};

TEST_F(SafetensorsReaderTest, HostileHeadersAreRefusedByTensor) {
  const Hostile cases[] = {
      {"", 0, "not JSON"},
      {"[]", 0, "not an object of tensors"},
      {"{", 0, "not JSON"},
      {"{}x", 0, "not JSON"},
      {"{} {}", 0, "not JSON"},
      {R"({"w":1})", 0, "tensor \"w\": not {"},
      {R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},})", 8, "not JSON"},
      {R"({"w":{"dtype":"F32","shape":[[2]],"data_offsets":[0,8]}})", 8, "tensor \"w\": not {"},
      {R"({"w":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", 8, "tensor \"w\": not {"},
      {R"({"w":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}})", 8, "tensor \"w\": not {"},
      {R"({"w":{"dtype":"F32","shape":[99999999999999999999],"data_offsets":[0,8]}})", 8, "tensor \"w\": not {"},
      {R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0]}})", 8, "tensor \"w\": not {"},
      {R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8,8]}})", 8, "tensor \"w\": not {"},
      {R"({"w":{"dtype":"F32","shape":[2]}})", 8, "is missing"},
      {R"({"w":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 8, "a field occurs twice"},
      {R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"x":1}})", 8, "unknown field \"x\""},
      {R"({"w":{"dtype":"Q4","shape":[2],"data_offsets":[0,8]}})", 8, "unknown dtype \"Q4\""},
      {R"({"w":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})", 8, "3 elements of F32 do not take 8 bytes"},
      {R"({"w":{"dtype":"BF16","shape":[2],"data_offsets":[0,8]}})", 8, "2 elements of BF16 do not take 8"},
      {R"({"w":{"dtype":"F4","shape":[3],"data_offsets":[0,1]}})", 1, "3 elements of F4 do not take 1 bytes"},
      {R"({"w":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", 0, "overflows"},
      {R"({"w":{"dtype":"F64","shape":[4611686018427387904],"data_offsets":[0,0]}})", 0, "its size overflows"},
      {R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", 8, "outside"},
      {R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}})", 16, "starts at 8, after"},
      {R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,18446744073709551615]}})", 8, "outside"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
       R"("b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})",
       12, "tensor \"b\": its data starts at 4, before"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
       R"("b":{"dtype":"F32","shape":[1],"data_offsets":[12,16]}})",
       16, "tensor \"b\": its data starts at 12, after"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
       R"("a":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}})",
       16, "tensor \"a\": it occurs twice"},
      {R"({"__metadata__":{"k":1}})", 0, "not an object of tensors"},
      {R"({"__metadata__":{"k":{}}})", 0, "not an object of tensors"},
      {R"({"__metadata__":{},"__metadata__":{}})", 0, "__metadata__ occurs twice"},
      {"{\"\xff\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "not JSON"},
  };
  for (const Hostile& hostile : cases) {
    EXPECT_THAT(refusal_of(hostile.header, hostile.data_bytes), HasSubstr(hostile.message)) << hostile.header;
  }
  EXPECT_THAT(refusal_of(std::string("{}\0x", 4), 0), HasSubstr("zero byte"));
  EXPECT_NE(refusal_of(std::string(1'000'000, '['), 0), "accepted");  // and no stack is exhausted
  EXPECT_EQ(refusal_of("{}", 0), "accepted");
}

TEST_F(SafetensorsReaderTest, RandomDamageToAHeaderNeverCrashesTheReader) {
  std::mt19937_64 random(test_seed());
  const std::string whole(reinterpret_cast<const char*>(kReal), sizeof(kReal));
  int refused = 0;
  for (int round = 0; round < 300; ++round) {
    std::string damaged = whole;
    for (std::uint64_t n = 1 + random() % 3; n > 0; --n) {
      const std::size_t at = random() % damaged.size();
      if (random() % 8 == 0) damaged.resize(at + 1);
      damaged[random() % damaged.size()] = static_cast<char>(random());
    }
    write_file("model.safetensors", damaged);
    try {
      auto reader = SafetensorsReader::open(directory_);
      std::vector<float> values;
      for (const TensorEntry& entry : reader.tensors()) {
        if (!entry.type) continue;
        ASSERT_LE(entry.elements, whole.size());
        values.resize(entry.elements);
        reader.read(entry, 0, values);
      }
    } catch (const Error&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 50);
}

class ShardedModelTest : public SafetensorsReaderTest {
 protected:
  ShardedModelTest() {
    write_file("model-00001-of-00002.safetensors", safetensors_file(kGood, 8));
    write_file("model-00002-of-00002.safetensors",
               safetensors_file(R"({"v":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 4));
  }
  std::string refusal_of_index(const std::string& weight_map) const {
    write_file("model.safetensors.index.json",
               "{\"metadata\": {\"total_size\": 12}, \"weight_map\": " + weight_map + "}");
    return refusal();
  }
};

TEST_F(ShardedModelTest, AnIndexLeadsToEachTensorsFile) {
  const char* map = R"({"v": "model-00002-of-00002.safetensors", "w": "model-00001-of-00002.safetensors"})";
  ASSERT_EQ(refusal_of_index(map), "accepted");
  auto reader = SafetensorsReader::open(directory_);
  EXPECT_EQ(reader.file(*reader.find("w")), directory_ / "model-00001-of-00002.safetensors");
  EXPECT_EQ(reader.file(*reader.find("v")), directory_ / "model-00002-of-00002.safetensors");
  float value = 0;
  reader.read(*reader.find("v"), 0, std::span(&value, 1));
  EXPECT_EQ(std::bit_cast<std::uint32_t>(value), 0x03020100u);
}

// As a download cache has it: names in the model's directory, files elsewhere.
TEST_F(ShardedModelTest, FilesMayBeSymbolicLinksThatTheUserMade) {
  std::filesystem::create_directory(directory_ / "blobs");
  std::filesystem::rename(directory_ / "model-00002-of-00002.safetensors", directory_ / "blobs/1234");
  std::filesystem::create_symlink("blobs/1234", directory_ / "model-00002-of-00002.safetensors");
  const char* map = R"({"v": "model-00002-of-00002.safetensors", "w": "model-00001-of-00002.safetensors"})";
  ASSERT_EQ(refusal_of_index(map), "accepted");
  auto reader = SafetensorsReader::open(directory_);
  EXPECT_EQ(reader.file(*reader.find("v")), directory_ / "model-00002-of-00002.safetensors");
}

TEST_F(ShardedModelTest, AnIndexThatLeavesTheDirectoryOrDisagreesIsRefused) {
  const std::string one = "model-00001-of-00002.safetensors", two = "model-00002-of-00002.safetensors";
  const auto map = [&](const std::string& v, const std::string& more = "") {
    return "{\"v\": \"" + v + "\"" + more + ", \"w\": \"" + one + "\"}";
  };
  for (const char* outside : {"../x", "/etc/passwd", "..", ".", "", "a/b", "x\\u0000y"}) {
    EXPECT_THAT(refusal_of_index(map(outside)), HasSubstr("its own directory")) << outside;
  }
  EXPECT_THAT(refusal_of_index(map("model-3.safetensors")),
              HasSubstr("model-3.safetensors: cannot be opened (No such file"));
  EXPECT_THAT(refusal_of_index(map(one)), HasSubstr("tensor \"v\" is not in it"));
  EXPECT_THAT(refusal_of_index(map(two, ", \"x\": \"" + two + "\"")), HasSubstr("tensor \"x\" is not in it"));
  EXPECT_THAT(refusal_of_index(map(two, ", \"v\": \"" + two + "\"")), HasSubstr("tensor \"v\": it occurs twice"));
  EXPECT_THAT(refusal_of_index("[]"), HasSubstr("no weight_map"));
  EXPECT_THAT(refusal_of_index("{}"), HasSubstr("no weight_map"));
  EXPECT_THAT(refusal_of_index("{\"v\": 1}"), HasSubstr("its own directory"));
  EXPECT_THAT(refusal_of_index("{"), HasSubstr("index.json:1:"));
  EXPECT_THAT(refusal_of_index(std::string(100, '[')), HasSubstr("nested deeper"));

  const char* both =
      R"({"v":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"w":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})";
  write_file(two, safetensors_file(both, 8));
  EXPECT_THAT(refusal_of_index(map(two)), HasSubstr("tensor \"w\" is in another file"));
  const char* extra =
      R"({"v":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"x":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})";
  write_file(two, safetensors_file(extra, 8));
  EXPECT_THAT(refusal_of_index(map(two)), HasSubstr("tensor \"x\" is in it, but not in the index"));
}

}  // namespace
}  // namespace spillway
