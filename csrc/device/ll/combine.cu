// Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
// LL combine: every rank offers its experts' rows in its region, then pulls and sums the rows of its own tokens.
//
// Send half: EXPERT_MAJOR with LOCAL_REDUCE sums the local rows of each source token into the region; otherwise rows
// that were not written in place are copied there. Each block then releases its flag word on every rank. Receive half:
// every block waits for the flags of all blocks of all ranks (also of those it pulls nothing from: that is what lets
// the next dispatch overwrite their rows) and pulls by the routes that dispatch wrote. The last block to start this
// half moves the slot's epoch base.
#include <algorithm>
#include <iterator>

#include "device/elements.cuh"
#include "device/ll/launch.hpp"
#include "device/slot.cuh"

namespace mscclpp_dispatcher {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kTileTerms = 1024; // addends prepared at a time
constexpr int kVectors = 2;      // 16-byte vectors of a row per lane
// Addends in flight per lane. They wait in shared memory, where 192 KiB per SM fit, because registers hold too few to
// cover the memory's latency when a row has only one or two addends.
constexpr int kDepths[] = {6, 4, 2}; // the first whose ring fits
constexpr int kStageBytes = kVectors * kThreads * static_cast<int>(sizeof(uint4));

// The rows in work: for each, its addends packed in order. A row to write that has none gets one null addend.
struct Tile {
  const uint8_t* address[kTileTerms];
  float weight[kTileTerms];
  int32_t num_terms[kTileTerms];
  int32_t active[kTileTerms]; // rows to write
  int32_t num_active;
};

// Addends on their way, in shared memory.
struct Ring {
  uint4* vectors; // [depth, kVectors, kThreads]
  int depth;
};

struct Term {
  const uint8_t* address; // null for none
  float weight;
};

// This rank's tokens, pulled from the experts' ranks.
struct PulledRows {
  static constexpr bool kWritesEmptyRows = true;
  const SlotView& slot;
  uint8_t* out;

  __device__ int64_t num_rows() const { return slot.workload.num_tokens; }
  __device__ int num_terms() const { return slot.workload.num_topk; }
  __device__ uint8_t* target(int64_t row) const { return out + row * slot.workload.row_bytes; }
  __device__ Term term(int64_t row, int k) const {
    const int64_t route = row * slot.workload.num_topk + k;
    // All three loads go out before the first is needed.
    const int rank = slot.own<int32_t>(slot.layout.route_rank)[route];
    const int64_t src_row = slot.own<int32_t>(slot.layout.route_row)[route];
    const float weight = slot.own<float>(slot.layout.route_weight)[route];
    if (rank == kNoExpert) {
      return {nullptr, 0.0f};
    }
    return {slot.of_rank<uint8_t>(rank, slot.layout.expert_output) + src_row * slot.workload.row_bytes, weight};
  }
};

// Source tokens summed over this rank's experts (EXPERT_MAJOR, LOCAL_REDUCE).
struct LocalSums {
  static constexpr bool kWritesEmptyRows = false;
  const SlotView& slot;
  const uint8_t* expert_output;

  __device__ int64_t num_rows() const {
    return static_cast<int64_t>(slot.context.num_ranks) * slot.workload.active_tokens_per_rank;
  }
  __device__ int num_terms() const { return slot.workload.num_topk; }
  __device__ uint8_t* target(int64_t row) const {
    return slot.own<uint8_t>(slot.layout.expert_output) + row * slot.workload.row_bytes;
  }
  __device__ Term term(int64_t row, int k) const {
    const Workload& w = slot.workload;
    const int active = w.active_tokens_per_rank;
    if (row % active >= slot.own<int32_t>(slot.layout.num_tokens_per_rank)[row / active]) {
      return {nullptr, 0.0f};
    }
    const int64_t entry = row * w.num_topk + k;
    const int64_t src_row = slot.own<int32_t>(slot.layout.recv_topk_ids)[entry];
    if (src_row < 0) {
      return {nullptr, 0.0f};
    }
    const float weight =
        w.weight_mode == WeightMode::kInRunner ? 1.0f : slot.own<float>(slot.layout.recv_topk_weights)[entry];
    return {expert_output + src_row * w.row_bytes, weight};
  }
};

// Valid rows of expert_output, copied to where peers read them.
struct CopiedRows {
  static constexpr bool kWritesEmptyRows = false;
  const SlotView& slot;
  const uint8_t* expert_output;

  __device__ int64_t source_rows() const {
    return static_cast<int64_t>(slot.context.num_ranks) * slot.workload.active_tokens_per_rank;
  }
  __device__ int64_t num_rows() const {
    if (slot.workload.layout == DispatchLayout::kExpertMajor) {
      return slot.workload.num_local_experts * source_rows();
    }
    return slot.workload.combine_mode == CombineMode::kDirectSend ? source_rows() * slot.workload.num_topk
                                                                  : source_rows();
  }
  __device__ int num_terms() const { return 1; }
  __device__ uint8_t* target(int64_t row) const {
    return slot.own<uint8_t>(slot.layout.expert_output) + row * slot.workload.row_bytes;
  }
  __device__ bool is_valid(int64_t row) const {
    const Workload& w = slot.workload;
    if (w.layout == DispatchLayout::kExpertMajor) {
      return row % source_rows() < slot.own<int32_t>(slot.layout.num_recv_tokens_per_expert)[row / source_rows()];
    }
    const int32_t* ids = slot.own<int32_t>(slot.layout.recv_topk_ids);
    if (w.combine_mode == CombineMode::kDirectSend) {
      return ids[row] != w.padding_expert_id;
    }
    bool has_expert = false;
    for (int k = 0; k < w.num_topk; ++k) {
      has_expert = has_expert || ids[row * w.num_topk + k] != w.padding_expert_id;
    }
    return has_expert;
  }
  __device__ Term term(int64_t row, int) const {
    return {is_valid(row) ? expert_output + row * slot.workload.row_bytes : nullptr, 1.0f};
  }
};

// Row number index of this block: blocks take rows in turn.
__device__ __forceinline__ int64_t block_row(int64_t index) { return blockIdx.x + index * gridDim.x; }

// A warp's walk over its share of the tile: for each (row, piece of columns), its addends in order.
class Walk {
public:
  __device__ Walk(const Tile& tile, int tile_terms, int num_pieces)
      : tile_(tile), tile_terms_(tile_terms), num_pieces_(num_pieces), item_(threadIdx.x / 32) {
    enter_item();
  }
  __device__ bool is_done() const { return item_ >= tile_.num_active * num_pieces_; }
  __device__ const uint8_t* address() const { return tile_.address[first_term_ + term_]; }
  __device__ float weight() const { return tile_.weight[first_term_ + term_]; }
  __device__ bool is_last_term() const { return term_ + 1 == num_terms_; }
  __device__ int row() const { return row_; }
  // The lane's first vector; the others follow 32 apart.
  __device__ int column() const { return column_; }
  __device__ void advance() {
    if (++term_ == num_terms_) {
      item_ += kWarps;
      enter_item();
    }
  }

private:
  __device__ void enter_item() {
    term_ = 0;
    if (!is_done()) {
      row_ = tile_.active[item_ / num_pieces_];
      column_ = item_ % num_pieces_ * 32 * kVectors + threadIdx.x % 32;
      first_term_ = row_ * tile_terms_;
      num_terms_ = tile_.num_terms[row_];
    }
  }

  const Tile& tile_;
  const int tile_terms_, num_pieces_;
  int item_;
  int term_ = 0, row_ = 0, column_ = 0, first_term_ = 0, num_terms_ = 1;
};

// Waits for the oldest of `depth` groups; the instruction takes a constant.
__device__ __forceinline__ void wait_oldest(int depth) {
  switch (depth) {
  case 6:
    return ptx::copy_async_wait<5>();
  case 4:
    return ptx::copy_async_wait<3>();
  default:
    return ptx::copy_async_wait<1>();
  }
}

// Sums the rows of the tile: each lane copies its own vectors `depth` addends ahead and adds them up in float, in
// order. Product and sum round separately, so that every engine gives the same bits. No lane reads another's vectors,
// so no barrier is needed.
template <typename Element, typename Rows>
__device__ void sum_tile(const Rows& rows, const Tile& tile, const Ring& ring, int64_t first, int num_terms,
                         int num_vectors) {
  const int num_pieces = (num_vectors + 32 * kVectors - 1) / (32 * kVectors);
  uint4* own = ring.vectors + threadIdx.x;
  Walk ahead(tile, num_terms, num_pieces);
  auto fetch = [&](int stage) {
    if (!ahead.is_done()) {
      const auto* row = reinterpret_cast<const uint4*>(ahead.address());
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (row != nullptr && ahead.column() + 32 * v < num_vectors) {
          ptx::copy_async(&own[(stage * kVectors + v) * kThreads], &row[ahead.column() + 32 * v]);
        }
      }
      ahead.advance();
    }
    ptx::copy_async_commit(); // also when empty: the wait below counts groups
  };
  for (int stage = 0; stage < ring.depth; ++stage) {
    fetch(stage);
  }
  float sums[kVectors][Element::kPerVector] = {};
  int stage = 0;
  for (Walk walk(tile, num_terms, num_pieces); !walk.is_done(); walk.advance()) {
    wait_oldest(ring.depth);
    const float weight = walk.weight();
    if (walk.address() != nullptr) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (walk.column() + 32 * v < num_vectors) {
          float values[Element::kPerVector];
          Element::load(own[(stage * kVectors + v) * kThreads], values);
#pragma unroll
          for (int e = 0; e < Element::kPerVector; ++e) {
            sums[v][e] = __fadd_rn(sums[v][e], __fmul_rn(weight, values[e]));
          }
        }
      }
    }
    if (walk.is_last_term()) {
      auto* target = reinterpret_cast<uint4*>(rows.target(block_row(first + walk.row())));
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (walk.column() + 32 * v < num_vectors) {
          target[walk.column() + 32 * v] = Element::store(sums[v]);
        }
#pragma unroll
        for (int e = 0; e < Element::kPerVector; ++e) {
          sums[v][e] = 0.0f;
        }
      }
    }
    fetch(stage);
    stage = stage + 1 == ring.depth ? 0 : stage + 1;
  }
}

// Collects the addends of num_rows rows from index first of this block's.
template <typename Rows> __device__ void fill_tile(const Rows& rows, Tile& tile, int64_t first, int num_rows) {
  const int num_terms = max(rows.num_terms(), 1);
  if (threadIdx.x == 0) {
    tile.num_active = 0;
  }
  for (int i = threadIdx.x; i < num_rows * num_terms; i += kThreads) {
    const Term term =
        rows.num_terms() == 0 ? Term{nullptr, 0.0f} : rows.term(block_row(first + i / num_terms), i % num_terms);
    tile.address[i] = term.address;
    tile.weight[i] = term.weight;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < num_rows; i += kThreads) {
    int num_kept = 0;
    for (int k = i * num_terms; k < (i + 1) * num_terms; ++k) {
      if (tile.address[k] != nullptr) {
        tile.address[i * num_terms + num_kept] = tile.address[k];
        tile.weight[i * num_terms + num_kept] = tile.weight[k];
        ++num_kept;
      }
    }
    if (num_kept > 0 || Rows::kWritesEmptyRows) {
      tile.num_terms[i] = max(num_kept, 1); // of none, the first address is null
      tile.active[atomicAdd(&tile.num_active, 1)] = i;
    }
  }
  __syncthreads();
}

// Sums every row of the source. The addends of the first tile are collected before is_ready() waits for the rows
// themselves; false if it gave up.
template <typename Element, typename Rows, typename Ready>
__device__ bool sum_rows(const Rows& rows, const Workload& w, Tile& tile, const Ring& ring, Ready is_ready) {
  const int num_terms = max(rows.num_terms(), 1);
  const int tile_rows = kTileTerms / num_terms;
  const int64_t num_rows = (rows.num_rows() - blockIdx.x + gridDim.x - 1) / gridDim.x;
  for (int64_t first = 0; first == 0 || first < num_rows; first += tile_rows) {
    fill_tile(rows, tile, first, static_cast<int>(min(static_cast<int64_t>(tile_rows), num_rows - first)));
    if (first == 0 && !is_ready()) {
      return false;
    }
    sum_tile<Element>(rows, tile, ring, first, num_terms, w.row_bytes / 16);
    __syncthreads(); // the tile is free again
  }
  return true;
}

// An interrupted combine must not pass for a result.
template <typename Element> __device__ void fill_nan(const Workload& w, uint8_t* out) {
  float values[Element::kPerVector];
  for (float& value : values) {
    value = __int_as_float(0x7fffffff);
  }
  const int64_t num_vectors = static_cast<int64_t>(w.num_tokens) * (w.row_bytes / 16);
  for (int64_t i = blockIdx.x * kThreads + threadIdx.x; i < num_vectors; i += gridDim.x * kThreads) {
    reinterpret_cast<uint4*>(out)[i] = Element::store(values);
  }
}

// All threads of a block have read the epoch base before the block takes a ticket (begin_launch), so the last one may
// move it. Nothing of this launch reads it again, and the next launch of the slot starts after this one.
__device__ void advance_epoch(const SlotView& slot, uint32_t epoch) {
  if (threadIdx.x == kThreads - 1) {
    uint32_t* ticket = slot.own<uint32_t>(slot.layout.ticket);
    if (ptx::add_acq_rel_gpu(ticket, 1) == gridDim.x - 1) {
      *ticket = 0;
      *slot.own<uint32_t>(slot.layout.epoch_base) = epoch;
    }
  }
}

template <typename Element>
__global__ __launch_bounds__(kThreads, 1) void ll_combine_kernel(const __grid_constant__ Workload workload,
                                                                 const __grid_constant__ DeviceContext context,
                                                                 const __grid_constant__ RegionLayout layout,
                                                                 const __grid_constant__ Buffers buffers, int depth) {
  __shared__ Tile tile;
  extern __shared__ uint4 vectors[];
  const Ring ring{vectors, depth};
  const SlotView slot{workload, context, layout};
  uint32_t epoch;
  if (!begin_launch(slot, &epoch)) {
    fill_nan<Element>(workload, buffers.out);
    return;
  }
  stress_delay(context);
  const auto at_once = [] { return true; };
  if (workload.halves & kSend) {
    if (workload.layout == DispatchLayout::kExpertMajor && workload.combine_mode == CombineMode::kLocalReduce) {
      sum_rows<Element>(LocalSums{slot, buffers.expert_output}, workload, tile, ring, at_once);
    } else if (!workload.is_expert_output_in_place) {
      sum_rows<Element>(CopiedRows{slot, buffers.expert_output}, workload, tile, ring, at_once);
    }
    stress_delay(context);
    publish_flags(slot, layout.combine_flags, epoch);
  }
  if (workload.halves & kRecv) {
    begin_wait(slot, epoch, Phase::kCombine);
    advance_epoch(slot, epoch);
    const auto have_peers_published = [&] {
      const bool is_ok = wait_flags(slot, layout.combine_flags, epoch, Phase::kCombine, threadIdx.x, kThreads);
      stress_delay(context);
      return is_ok;
    };
    if (!sum_rows<Element>(PulledRows{slot, buffers.out}, workload, tile, ring, have_peers_published)) {
      fill_nan<Element>(workload, buffers.out);
    }
  }
}

using CombineKernel = decltype(&ll_combine_kernel<Bf16>);

CombineKernel select_kernel(Payload payload) {
  switch (payload) {
  case Payload::kFp16:
    return ll_combine_kernel<Fp16>;
  case Payload::kFp32:
    return ll_combine_kernel<Fp32>;
  default:
    return ll_combine_kernel<Bf16>;
  }
}

} // namespace

cudaError_t prepare_ll_combine(Payload payload, int max_shared_bytes, int* depth) {
  const int budget = max_shared_bytes - static_cast<int>(sizeof(Tile)) - 1024;
  *depth = *std::find_if(std::begin(kDepths), std::end(kDepths) - 1,
                         [budget](int candidate) { return candidate * kStageBytes <= budget; });
  return cudaFuncSetAttribute(select_kernel(payload), cudaFuncAttributeMaxDynamicSharedMemorySize,
                              *depth * kStageBytes);
}

cudaError_t launch_ll_combine(const Workload& workload, const DeviceContext& context, const RegionLayout& layout,
                              const Buffers& buffers, int depth, cudaStream_t stream) {
  select_kernel(workload.payload)<<<context.num_blocks, kThreads, depth * kStageBytes, stream>>>(
      workload, context, layout, buffers, depth);
  return cudaGetLastError();
}

} // namespace mscclpp_dispatcher
