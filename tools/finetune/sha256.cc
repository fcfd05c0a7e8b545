#include "tools/finetune/sha256.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>

namespace spillway::models::finetune {
namespace {

// The first 32 bits after the point of the cube roots of the first 64 primes.
constexpr std::array<std::uint32_t, 64> kRounds = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

}  // namespace

void Sha256::mix(const unsigned char* block) {
  std::array<std::uint32_t, 64> w;
  for (std::size_t i = 0; i < 16; ++i) {
    w[i] = std::uint32_t{block[4 * i]} << 24 | std::uint32_t{block[4 * i + 1]} << 16 |
           std::uint32_t{block[4 * i + 2]} << 8 | block[4 * i + 3];
  }
  for (std::size_t i = 16; i < 64; ++i) {
    const std::uint32_t early = w[i - 15], late = w[i - 2];
    w[i] = w[i - 16] + (std::rotr(early, 7) ^ std::rotr(early, 18) ^ early >> 3) + w[i - 7] +
           (std::rotr(late, 17) ^ std::rotr(late, 19) ^ late >> 10);
  }
  auto [a, b, c, d, e, f, g, h] = state_;
  for (std::size_t i = 0; i < 64; ++i) {
    const std::uint32_t first =
        h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) + ((e & f) ^ (~e & g)) + kRounds[i] + w[i];
    const std::uint32_t second =
        (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + first, d = c, c = b, b = a, a = first + second;
  }
  const std::array<std::uint32_t, 8> mixed = {a, b, c, d, e, f, g, h};
  for (std::size_t i = 0; i < 8; ++i) state_[i] += mixed[i];
}

void Sha256::add(std::span<const unsigned char> bytes) {
  std::size_t held = bytes_ % 64;
  bytes_ += bytes.size();
  while (!bytes.empty()) {
    if (held == 0 && bytes.size() >= 64) {
      mix(bytes.data());
      bytes = bytes.subspan(64);
      continue;
    }
    const std::size_t taken = std::min(64 - held, bytes.size());
    std::memcpy(waiting_.data() + held, bytes.data(), taken);
    held += taken;
    bytes = bytes.subspan(taken);
    if (held == 64) mix(waiting_.data()), held = 0;
  }
}

std::string Sha256::finish() {
  const std::uint64_t bits = 8 * bytes_;
  // A one, zeros up to 8 bytes before the end of a block, and how many bits there were.
  std::array<unsigned char, 72> end{};
  end[0] = 0x80;
  const std::size_t zeros = (119 - bytes_ % 64) % 64;
  for (std::size_t i = 0; i < 8; ++i) end[1 + zeros + i] = static_cast<unsigned char>(bits >> (56 - 8 * i));
  add(std::span(end).first(1 + zeros + 8));
  std::string text;
  for (const std::uint32_t word : state_) text += fmt::format("{:08x}", word);
  return text;
}

}  // namespace spillway::models::finetune
