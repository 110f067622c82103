// Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
// Where the low-latency operations run. The runtime owns one backend and is its only caller.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "common/layout.hpp"
#include "common/workload.hpp"

namespace mscclpp_dispatcher {

class LlBackend {
public:
  virtual ~LlBackend() = default;

  // Enqueues on the stream (CUDA) or runs before returning (CPU).
  virtual void dispatch(const Workload& workload, const DeviceContext& context, const RegionLayout& layout,
                        const Buffers& buffers, uint64_t stream) = 0;
  virtual void combine(const Workload& workload, const DeviceContext& context, const RegionLayout& layout,
                       const Buffers& buffers, uint64_t stream) = 0;

  // Copies between host memory and a region; complete on return; works while a stream of ours is idle.
  virtual void write(uint8_t* region, const void* host, size_t bytes) = 0;
  virtual void read(void* host, const uint8_t* region, size_t bytes) = 0;

  // Memory that launches can write and the host can read at any time.
  virtual FaultWords* fault_words() = 0;
};

// idle is called about every 100 ms of waiting, outside any lock; it may throw (an interrupt).
std::unique_ptr<LlBackend> make_cpu_backend(std::function<void()> idle);

// is_tma selects bulk copies; needs compute capability 9.0.
std::unique_ptr<LlBackend> make_cuda_backend(int device_idx, bool is_tma, Payload payload, const RegionShape& shape);

} // namespace mscclpp_dispatcher
