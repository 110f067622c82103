// Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
// LL dispatch: rows of x go straight to their final places on the experts' ranks.
//
// Each block owns a contiguous share of the tokens. Send half: block 0 publishes headers and (EXPERT_MAJOR) this rank's
// counts to all ranks as packets; every block finds its routes' rows (EXPERT_MAJOR: rows of lower source ranks, read
// from their count packets, then rows of earlier tokens here), moves the rows, writes the routes, and then releases its
// flag word on every rank. Receive half: the blocks share the wait for all (source, block) flags, pad unused routes
// (RANK_MAJOR) and sum up the counts (EXPERT_MAJOR). Every flag is written in every launch, also without tokens.
#include <algorithm>

#include "device/ll/dispatch_send.cuh"
#include "device/ll/launch.hpp"
#include "device/slot.cuh"

namespace mscclpp_dispatcher {
namespace {

__device__ bool recv_headers(const SlotView& slot, uint32_t epoch, int32_t* num_tokens_per_rank) {
  bool has_failed = false;
  for (int src = threadIdx.x; src < slot.context.num_ranks; src += kThreads) {
    const uint64_t* header = slot.own<uint64_t>(slot.layout.dispatch_header) + 2 * src;
    uint64_t num_tokens = 0, active = 0;
    has_failed = !wait_packet<false>(slot, &header[0], epoch, Phase::kDispatch, &num_tokens) ||
                 !wait_packet<false>(slot, &header[1], epoch, Phase::kDispatch, &active) || has_failed;
    num_tokens_per_rank[src] = min(static_cast<int>(packet_value(num_tokens)), slot.workload.active_tokens_per_rank);
    if (blockIdx.x == 0) {
      slot.own<int32_t>(slot.layout.num_tokens_per_rank)[src] = num_tokens_per_rank[src];
      if (!has_failed && static_cast<int>(packet_value(active)) != slot.workload.active_tokens_per_rank) {
        volatile uint64_t* word = &slot.context.faults->active_mismatch;
        *word = kFaultBit | static_cast<uint64_t>(src) << 32 | packet_value(active);
      }
    }
  }
  return !__syncthreads_or(has_failed);
}

// Sources write the routes of their tokens; the receiver fills the rest of each source's stride.
__device__ void pad_routes(const SlotView& slot, const int32_t* num_tokens_per_rank) {
  const Workload& w = slot.workload;
  int32_t* ids = slot.own<int32_t>(slot.layout.recv_topk_ids);
  float* weights = slot.own<float>(slot.layout.recv_topk_weights);
  for (int src = 0; src < slot.context.num_ranks; ++src) {
    const int64_t end = (src + 1ll) * w.active_tokens_per_rank * w.num_topk;
    int64_t entry = (static_cast<int64_t>(src) * w.active_tokens_per_rank + num_tokens_per_rank[src]) * w.num_topk;
    for (entry += blockIdx.x * kThreads + threadIdx.x; entry < end; entry += gridDim.x * kThreads) {
      ids[entry] = w.padding_expert_id;
      weights[entry] = 0.0f;
    }
  }
}

// A warp per local expert, a lane per source rank.
__device__ bool count_experts(const SlotView& slot, uint32_t epoch) {
  const Workload& w = slot.workload;
  const int num_ranks = slot.context.num_ranks;
  const int lane = threadIdx.x % 32;
  const int32_t* expert_rank = slot.table<int32_t>(slot.layout.expert_rank);
  const int32_t* expert_local = slot.table<int32_t>(slot.layout.expert_local);
  const uint64_t* counts = slot.own<uint64_t>(slot.layout.expert_counts);
  bool has_failed = false;
  for (int expert = blockIdx.x * kWarps + threadIdx.x / 32; expert < w.num_experts; expert += gridDim.x * kWarps) {
    if (expert_rank[expert] != slot.context.rank) {
      continue;
    }
    int32_t* offsets =
        slot.own<int32_t>(slot.layout.src_offsets) + static_cast<int64_t>(expert_local[expert]) * (num_ranks + 1);
    int32_t before = 0;
    for (int start = 0; start < num_ranks; start += 32) {
      uint64_t packet = 0;
      if (start + lane < num_ranks) {
        const int64_t entry = static_cast<int64_t>(start + lane) * w.num_experts + expert;
        has_failed = has_failed || !wait_packet<false>(slot, &counts[entry], epoch, Phase::kDispatch, &packet);
      }
      int32_t sum = static_cast<int32_t>(packet_value(packet));
      for (int distance = 1; distance < 32; distance *= 2) {
        const int32_t lower = __shfl_up_sync(0xffffffffu, sum, distance);
        sum += lane >= distance ? lower : 0;
      }
      if (start + lane < num_ranks) {
        offsets[start + lane + 1] = before + sum;
      }
      before += __shfl_sync(0xffffffffu, sum, 31);
    }
    if (lane == 0) {
      offsets[0] = 0;
      slot.own<int32_t>(slot.layout.num_recv_tokens_per_expert)[expert_local[expert]] = before;
    }
  }
  return !__syncthreads_or(has_failed);
}

template <bool kIsTma, bool kIsExpertMajor>
__global__ __launch_bounds__(kThreads, 1) void ll_dispatch_kernel(const __grid_constant__ Workload workload,
                                                                  const __grid_constant__ DeviceContext context,
                                                                  const __grid_constant__ RegionLayout layout,
                                                                  const __grid_constant__ Buffers buffers,
                                                                  const __grid_constant__ DispatchTiling tiling) {
  extern __shared__ __align__(128) uint8_t dynamic[];
  __shared__ Tile tile;
  const SlotView slot{workload, context, layout};
  uint32_t epoch;
  if (!begin_launch(slot, &epoch)) {
    return;
  }
  stress_delay(context);
  if (workload.halves & kSend) {
    Sender sender(slot, buffers, tiling, tile, dynamic, epoch);
    if (!sender.send<kIsTma, kIsExpertMajor>()) {
      return;
    }
    stress_delay(context);
    publish_flags(slot, layout.dispatch_flags, epoch);
  }
  if (workload.halves & kRecv) {
    begin_wait(slot, epoch, Phase::kDispatch);
    if (!recv_headers(slot, epoch, tile.num_tokens_per_rank)) {
      return;
    }
    if (!kIsExpertMajor) {
      pad_routes(slot, tile.num_tokens_per_rank);
    } else if (!count_experts(slot, epoch)) {
      return;
    }
    wait_flags(slot, layout.dispatch_flags, epoch, Phase::kDispatch, blockIdx.x + gridDim.x * threadIdx.x,
               gridDim.x * kThreads);
  }
}

using DispatchKernel = decltype(&ll_dispatch_kernel<true, true>);

DispatchKernel select_kernel(bool is_tma, DispatchLayout layout) {
  if (layout == DispatchLayout::kExpertMajor) {
    return is_tma ? ll_dispatch_kernel<true, true> : ll_dispatch_kernel<false, true>;
  }
  return is_tma ? ll_dispatch_kernel<true, false> : ll_dispatch_kernel<false, false>;
}

} // namespace

DispatchTiling make_dispatch_tiling(bool is_tma, const RegionShape& shape, int max_shared_bytes) {
  DispatchTiling tiling{};
  tiling.is_tma = is_tma;
  const int max_piece_bytes = is_tma ? kMaxTmaPieceBytes : kPlainPieceBytes;
  tiling.num_pieces = (shape.row_bytes + max_piece_bytes - 1) / max_piece_bytes;
  const int equal_bytes = (shape.row_bytes + tiling.num_pieces - 1) / tiling.num_pieces;
  // Stages start on 128-byte lines; plain pieces fill whole warps.
  tiling.piece_bytes = is_tma ? static_cast<int>(align_up(equal_bytes, 128)) : kPlainPieceBytes;
  const int histogram_bytes = static_cast<int>(align_up(sizeof(int32_t) * shape.num_experts, 128));
  const int stage_budget = max_shared_bytes - static_cast<int>(sizeof(Tile)) - 1024 - histogram_bytes;
  tiling.num_stages = is_tma ? std::min(kMaxStages, stage_budget / tiling.piece_bytes) : 0;
  tiling.shared_bytes = histogram_bytes + tiling.num_stages * tiling.piece_bytes;
  return tiling;
}

cudaError_t prepare_ll_dispatch(const DispatchTiling& tiling) {
  for (const DispatchLayout layout : {DispatchLayout::kExpertMajor, DispatchLayout::kRankMajor}) {
    const cudaError_t error = cudaFuncSetAttribute(select_kernel(tiling.is_tma, layout),
                                                   cudaFuncAttributeMaxDynamicSharedMemorySize, tiling.shared_bytes);
    if (error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}

cudaError_t launch_ll_dispatch(const Workload& workload, const DeviceContext& context, const RegionLayout& layout,
                               const Buffers& buffers, const DispatchTiling& tiling, cudaStream_t stream) {
  select_kernel(tiling.is_tma, workload.layout)<<<context.num_blocks, kThreads, tiling.shared_bytes, stream>>>(
      workload, context, layout, buffers, tiling);
  return cudaGetLastError();
}

} // namespace mscclpp_dispatcher
