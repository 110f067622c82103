// Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
// The launch functions of the LL kernels, each at the end of its kernel's file.
#pragma once

#include <cuda_runtime_api.h>

#include "common/layout.hpp"

namespace mscclpp_dispatcher {

// Shared memory of a dispatch block; fixed per dispatcher.
struct DispatchTiling {
  bool is_tma;
  int32_t piece_bytes;  // a row travels in equal pieces of at most this size (the last may be smaller)
  int32_t num_pieces;   // per row
  int32_t num_stages;   // bulk copies in flight per block (TMA)
  int32_t shared_bytes; // dynamic
};

DispatchTiling make_dispatch_tiling(bool is_tma, const RegionShape& shape, int max_shared_bytes);

// Set the kernels' shared-memory limits; before the first launch, on the current device.
cudaError_t prepare_ll_dispatch(const DispatchTiling& tiling);
// depth: addends that a lane has in flight, as the shared memory allows; for launch_ll_combine.
cudaError_t prepare_ll_combine(Payload payload, int max_shared_bytes, int* depth);

cudaError_t launch_ll_dispatch(const Workload& workload, const DeviceContext& context, const RegionLayout& layout,
                               const Buffers& buffers, const DispatchTiling& tiling, cudaStream_t stream);
cudaError_t launch_ll_combine(const Workload& workload, const DeviceContext& context, const RegionLayout& layout,
                              const Buffers& buffers, int depth, cudaStream_t stream);

} // namespace mscclpp_dispatcher
