// Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
// Payload elements in 16-byte vectors: to float, and back with one rounding to nearest even.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace mscclpp_dispatcher {

struct Bf16 {
  static constexpr int kPerVector = 8;
  static __device__ __forceinline__ void load(const uint4& vector, float (&values)[kPerVector]) {
    const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[2 * i] = __uint_as_float(words[i] << 16);
      values[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  }
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
  static __device__ __forceinline__ uint4 store(const float (&values)[kPerVector]) {
    return {pack(values[0], values[1]), pack(values[2], values[3]), pack(values[4], values[5]),
            pack(values[6], values[7])};
  }
};

struct Fp16 {
  static constexpr int kPerVector = 8;
  static __device__ __forceinline__ void load(const uint4& vector, float (&values)[kPerVector]) {
    const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
      values[2 * i] = pair.x;
      values[2 * i + 1] = pair.y;
    }
  }
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
  static __device__ __forceinline__ uint4 store(const float (&values)[kPerVector]) {
    return {pack(values[0], values[1]), pack(values[2], values[3]), pack(values[4], values[5]),
            pack(values[6], values[7])};
  }
};

struct Fp32 {
  static constexpr int kPerVector = 4;
  static __device__ __forceinline__ void load(const uint4& vector, float (&values)[kPerVector]) {
    values[0] = __uint_as_float(vector.x);
    values[1] = __uint_as_float(vector.y);
    values[2] = __uint_as_float(vector.z);
    values[3] = __uint_as_float(vector.w);
  }
  static __device__ __forceinline__ uint4 store(const float (&values)[kPerVector]) {
    return {__float_as_uint(values[0]), __float_as_uint(values[1]), __float_as_uint(values[2]),
            __float_as_uint(values[3])};
  }
};

} // namespace mscclpp_dispatcher
