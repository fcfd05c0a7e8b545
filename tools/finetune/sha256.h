// SHA-256 (FIPS 180-4), by which a prepared directory names its files, as `sha256sum` does.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace spillway::models::finetune {

class Sha256 {
 public:
  void add(std::span<const unsigned char> bytes);
  // 64 hexadecimal digits of all that was added. Nothing may be added after it.
  std::string finish();

 private:
  void mix(const unsigned char* block);

  std::array<std::uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                         0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<unsigned char, 64> waiting_{};
  std::uint64_t bytes_ = 0;
};

}  // namespace spillway::models::finetune
