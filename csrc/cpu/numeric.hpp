// Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
// Payload elements to and from float, rounding to nearest even as the GPU's conversions do.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace mscclpp_dispatcher::cpu {

struct Bf16 {
  using Storage = uint16_t;
  static float load(Storage bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
  static Storage store(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    if (std::isnan(value)) {
      return 0x7fff;
    }
    return static_cast<Storage>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
};

struct Fp16 {
  using Storage = uint16_t;
  static float load(Storage bits) {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
    const uint32_t exponent = (bits >> 10) & 0x1f;
    const uint32_t mantissa = bits & 0x3ff;
    if (exponent == 0x1f) {
      return std::bit_cast<float>(sign | 0x7f800000 | mantissa << 13);
    }
    if (exponent == 0) { // zero or subnormal: mantissa * 2^-24 is exact in float
      const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
      return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
    }
    return std::bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
  }
  static Storage store(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint32_t sign = (bits >> 16) & 0x8000;
    const float magnitude = std::fabs(value);
    if (std::isnan(value)) {
      return 0x7fff;
    }
    if (magnitude >= 65520.0f) { // rounds past the largest half
      return static_cast<Storage>(sign | 0x7c00);
    }
    if (magnitude < 0x1p-14f) { // subnormal: rint rounds to nearest even in units of 2^-24
      return static_cast<Storage>(sign | static_cast<uint32_t>(std::rint(magnitude * 0x1p24f)));
    }
    const uint32_t rounded = (bits & 0x7fffffff) + 0xfff + ((bits >> 13) & 1);
    return static_cast<Storage>(sign | ((rounded >> 13) - (112u << 10)));
  }
};

struct Fp32 {
  using Storage = float;
  static float load(Storage value) { return value; }
  static Storage store(float value) { return value; }
};

} // namespace mscclpp_dispatcher::cpu
