// Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
// The send half of LL dispatch: a block's routes get their rows, and its tokens' rows go there. Included by
// dispatch.cu.
#pragma once

#include <climits>

#include "device/ll/launch.hpp"
#include "device/slot.cuh"

namespace mscclpp_dispatcher {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kMaxStages = 16;    // 16 rows of 14 KiB fill the shared memory of an SM
constexpr int kTileRoutes = 1024; // routes prepared at a time; one per thread
constexpr int kPlainVectors = 4;  // 16-byte loads in flight per lane on the plain path
constexpr int kPlainPieceBytes = 32 * 16 * kPlainVectors;
constexpr int kMaxTmaPieceBytes = 16384;

// Routes of the tile in work. "First" is the first route of a token to the same destination row.
struct Tile {
  int32_t expert[kTileRoutes];   // kNoExpert for none
  int32_t owner[kTileRoutes];    // rank of the expert, kNoExpert for none
  int32_t local[kTileRoutes];    // the expert's index there
  int32_t row[kTileRoutes];      // row at the destination; EXPERT_MAJOR: of the first route of the same expert
  int32_t dst_rank[kTileRoutes]; // where to send the token's row, kNoExpert if an earlier route sends it
  float weight[kTileRoutes];
  uint16_t first_k[kTileRoutes]; // k of the token's first route with the same expert
  int32_t num_tokens_per_rank[kMaxRanks];
  uint64_t barriers[kMaxStages];
};

__device__ __forceinline__ int64_t load_id(const Buffers& buffers, int64_t route) {
  return buffers.topk_id_bytes == 8 ? static_cast<const int64_t*>(buffers.topk_ids)[route]
                                    : static_cast<const int32_t*>(buffers.topk_ids)[route];
}

// The route's expert, or kNoExpert.
__device__ __forceinline__ int32_t load_expert(const Workload& w, const Buffers& buffers, int64_t route) {
  const int64_t id = load_id(buffers, route);
  return id >= 0 && id < w.num_experts ? static_cast<int32_t>(id) : kNoExpert;
}

__device__ __forceinline__ void report_bad_id(const SlotView& slot, int64_t route, int64_t id) {
  const int64_t saturated = min(max(id, static_cast<int64_t>(INT32_MIN)), static_cast<int64_t>(INT32_MAX));
  volatile uint64_t* word = &slot.context.faults->bad_id;
  *word = kFaultBit | static_cast<uint64_t>(route) << 32 | static_cast<uint32_t>(saturated);
}

// Whether no earlier route of the token names the same expert.
__device__ __forceinline__ bool is_first_route(const Workload& w, const Buffers& buffers, int64_t route,
                                               int32_t expert) {
  for (int64_t j = route - route % w.num_topk; j < route; ++j) {
    if (load_expert(w, buffers, j) == expert) {
      return false;
    }
  }
  return true;
}

// Adds the tokens of [0, num_tokens) to the histogram of experts.
__device__ void count_routes(const Workload& w, const Buffers& buffers, int num_tokens, int32_t* histogram) {
  for (int64_t route = threadIdx.x; route < static_cast<int64_t>(num_tokens) * w.num_topk; route += kThreads) {
    const int32_t expert = load_expert(w, buffers, route);
    if (expert != kNoExpert && is_first_route(w, buffers, route, expert)) {
      atomicAdd(&histogram[expert], 1);
    }
  }
}

class Sender {
public:
  __device__ Sender(const SlotView& slot, const Buffers& buffers, const DispatchTiling& tiling, Tile& tile,
                    uint8_t* dynamic, uint32_t epoch)
      : slot_(slot), w_(slot.workload), buffers_(buffers), tiling_(tiling), tile_(tile), epoch_(epoch),
        histogram_(reinterpret_cast<int32_t*>(dynamic)),
        stages_(dynamic + align_up(sizeof(int32_t) * w_.num_experts, 128)) {
    const int64_t num_blocks = gridDim.x;
    begin_ = static_cast<int>(w_.num_tokens * static_cast<int64_t>(blockIdx.x) / num_blocks);
    end_ = static_cast<int>(w_.num_tokens * (static_cast<int64_t>(blockIdx.x) + 1) / num_blocks);
    expert_rank_ = slot.table<int32_t>(slot.layout.expert_rank);
    expert_local_ = slot.table<int32_t>(slot.layout.expert_local);
  }

  template <bool kIsTma, bool kIsExpertMajor> __device__ bool send() {
    const int tile_tokens = max(1, kTileRoutes / w_.num_topk);
    if (kIsTma) {
      init_stages();
      load_first_pieces(begin_, min(tile_tokens, end_ - begin_)); // in flight while the routes are prepared
    }
    publish_headers();
    if (kIsExpertMajor) {
      publish_counts_and_count_earlier_tokens();
      begin_wait(slot_, epoch_, Phase::kDispatch); // for the counts of lower ranks
    }
    for (int first = begin_; first < end_; first += tile_tokens) {
      const int num_tokens = min(tile_tokens, end_ - first);
      if (kIsTma && first != begin_) {
        load_first_pieces(first, num_tokens);
      }
      load_routes(first, num_tokens);
      const bool is_ok = kIsExpertMajor ? place_expert_major(first, num_tokens) : place_rank_major(first, num_tokens);
      if (!is_ok) {
        drain<kIsTma>(first, num_tokens);
        return false;
      }
      if (kIsTma) {
        send_rows_tma(first, num_tokens);
      } else {
        send_rows_plain(first, num_tokens);
      }
      kIsExpertMajor ? write_routes_expert_major(first, num_tokens) : write_routes_rank_major(first, num_tokens);
      __syncthreads(); // the tile is free again
    }
    if (kIsTma) {
      ptx::bulk_wait_complete(); // each lane for its own rows; publish_flags then has them all
    }
    return true;
  }

private:
  // ------------------------------------------------------------ packets

  __device__ void publish_headers() {
    if (blockIdx.x == 0) {
      for (int dst = threadIdx.x; dst < slot_.context.num_ranks; dst += kThreads) {
        uint64_t* header = slot_.of_rank<uint64_t>(dst, slot_.layout.dispatch_header) + 2 * slot_.context.rank;
        ptx::store_relaxed_sys(&header[0], make_packet(epoch_, w_.num_tokens));
        ptx::store_relaxed_sys(&header[1], make_packet(epoch_, w_.active_tokens_per_rank));
      }
    }
  }

  // Leaves in the histogram the routes of earlier blocks' tokens: the next free index of each expert.
  __device__ void publish_counts_and_count_earlier_tokens() {
    for (int expert = threadIdx.x; expert < w_.num_experts; expert += kThreads) {
      histogram_[expert] = 0;
    }
    __syncthreads();
    count_routes(w_, buffers_, blockIdx.x == 0 ? w_.num_tokens : begin_, histogram_);
    __syncthreads();
    if (blockIdx.x == 0) {
      for (int i = threadIdx.x; i < slot_.context.num_ranks * w_.num_experts; i += kThreads) {
        const int expert = i % w_.num_experts;
        uint64_t* counts = slot_.of_rank<uint64_t>(i / w_.num_experts, slot_.layout.expert_counts);
        ptx::store_relaxed_sys(&counts[static_cast<int64_t>(slot_.context.rank) * w_.num_experts + expert],
                               make_packet(epoch_, histogram_[expert]));
      }
      __syncthreads();
      for (int expert = threadIdx.x; expert < w_.num_experts; expert += kThreads) {
        histogram_[expert] = 0;
      }
    }
    __syncthreads();
  }

  // ------------------------------------------------------------ routes

  // An id that is neither an expert nor kNoExpert is reported and dropped.
  __device__ void load_routes(int first, int num_tokens) {
    for (int i = threadIdx.x; i < num_tokens * w_.num_topk; i += kThreads) {
      const int64_t route = static_cast<int64_t>(first) * w_.num_topk + i;
      const int64_t id = load_id(buffers_, route);
      tile_.weight[i] = buffers_.topk_weights ? buffers_.topk_weights[route] : 1.0f;
      const bool is_expert = id >= 0 && id < w_.num_experts;
      tile_.expert[i] = is_expert ? static_cast<int32_t>(id) : kNoExpert;
      tile_.owner[i] = is_expert ? expert_rank_[id] : kNoExpert;
      tile_.local[i] = is_expert ? expert_local_[id] : 0;
      if (!is_expert && id != kNoExpert) {
        report_bad_id(slot_, route, id);
      }
    }
    __syncthreads();
  }

  // Rows of EXPERT_MAJOR: [local expert, lower ranks | earlier tokens | this one].
  __device__ bool place_expert_major(int first, int num_tokens) {
    const int num_routes = num_tokens * w_.num_topk;
    for (int i = threadIdx.x; i < num_routes; i += kThreads) {
      const int start = i - i % w_.num_topk;
      int first_k = i - start;
      for (int k = first_k - 1; k >= 0; --k) {
        first_k = tile_.expert[start + k] == tile_.expert[i] ? k : first_k;
      }
      tile_.first_k[i] = first_k;
      tile_.row[i] = 0;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
      number_routes(num_routes);
    }
    __syncthreads();
    bool has_failed = false;
    const int num_lower = slot_.context.rank;
    const uint64_t* counts = slot_.own<uint64_t>(slot_.layout.expert_counts);
    for (int i = threadIdx.x; i < num_routes * num_lower; i += kThreads) {
      const int route = i / num_lower;
      const int src = i % num_lower;
      if (is_sent_expert_major(route)) {
        uint64_t packet = 0;
        const int64_t entry = static_cast<int64_t>(src) * w_.num_experts + tile_.expert[route];
        has_failed = has_failed || !wait_packet<false>(slot_, &counts[entry], epoch_, Phase::kDispatch, &packet);
        atomicAdd(&tile_.row[route], static_cast<int32_t>(packet_value(packet)));
      }
    }
    if (__syncthreads_or(has_failed)) {
      return false;
    }
    for (int i = threadIdx.x; i < num_routes; i += kThreads) {
      tile_.dst_rank[i] = is_sent_expert_major(i) ? tile_.owner[i] : kNoExpert;
      tile_.row[i] += tile_.local[i] * slot_.context.num_ranks * w_.active_tokens_per_rank;
    }
    __syncthreads();
    return true;
  }

  __device__ bool is_sent_expert_major(int i) const {
    return tile_.expert[i] != kNoExpert && tile_.first_k[i] == i % w_.num_topk;
  }

  // One warp walks the routes in order, so that rows are the same in every run.
  __device__ void number_routes(int num_routes) {
    const unsigned lane = threadIdx.x;
    for (int start = 0; start < num_routes; start += 32) {
      const int i = start + lane;
      const bool is_sent = i < num_routes && is_sent_expert_major(i);
      const int key = is_sent ? tile_.expert[i] : -1 - static_cast<int>(lane);
      const unsigned same = __match_any_sync(0xffffffffu, key);
      const int index = is_sent ? histogram_[key] + __popc(same & ((1u << lane) - 1)) : 0;
      __syncwarp();
      if (is_sent) {
        tile_.row[i] = index;
        if ((same >> lane) == 1) { // the last of its group
          histogram_[key] = index + 1;
        }
      }
      __syncwarp();
    }
  }

  __device__ bool place_rank_major(int first, int num_tokens) {
    for (int i = threadIdx.x; i < num_tokens * w_.num_topk; i += kThreads) {
      const int start = i - i % w_.num_topk;
      const int owner = tile_.owner[i];
      bool is_sent = owner != kNoExpert;
      for (int j = start; j < i && is_sent; ++j) {
        is_sent = tile_.owner[j] != owner;
      }
      tile_.dst_rank[i] = is_sent ? owner : kNoExpert;
      tile_.row[i] = static_cast<int32_t>(slot_.source_row(first + i / w_.num_topk));
    }
    __syncthreads();
    return true;
  }

  __device__ __forceinline__ void set_route(int64_t route, int rank, int64_t row, float weight) const {
    slot_.own<int32_t>(slot_.layout.route_rank)[route] = rank;
    slot_.own<int32_t>(slot_.layout.route_row)[route] = static_cast<int32_t>(row);
    slot_.own<float>(slot_.layout.route_weight)[route] = weight;
  }

  __device__ void write_routes_expert_major(int first, int num_tokens) {
    const bool is_local_reduce = w_.combine_mode == CombineMode::kLocalReduce;
    const bool is_in_runner = w_.weight_mode == WeightMode::kInRunner;
    const int num_routes = num_tokens * w_.num_topk;
    for (int i = threadIdx.x; i < num_routes; i += kThreads) {
      const int start = i - i % w_.num_topk;
      const int64_t route = static_cast<int64_t>(first) * w_.num_topk + i;
      const int owner = tile_.owner[i];
      const int row = tile_.row[start + tile_.first_k[i]];
      bool is_pulled = owner != kNoExpert;
      if (is_local_reduce) {
        for (int j = start; j < i && is_pulled; ++j) {
          is_pulled = tile_.owner[j] != owner;
        }
        set_route(route, is_pulled ? owner : kNoExpert, slot_.source_row(first + i / w_.num_topk), 1.0f);
      } else {
        // The runner's row already carries the weights of a repeated expert.
        is_pulled = is_pulled && (!is_in_runner || is_sent_expert_major(i));
        set_route(route, is_pulled ? owner : kNoExpert, row, is_in_runner ? 1.0f : tile_.weight[i]);
      }
      if (is_in_runner && is_sent_expert_major(i)) {
        float sum = 0.0f;
        for (int j = i; j < start + w_.num_topk; ++j) {
          sum += tile_.expert[j] == tile_.expert[i] ? tile_.weight[j] : 0.0f;
        }
        slot_.of_rank<float>(owner, slot_.layout.recv_topk_weights)[row] = sum;
      }
    }
    if (!is_local_reduce) {
      return;
    }
    for (int i = threadIdx.x; i < num_routes * slot_.context.num_ranks; i += kThreads) {
      const int dst = i / num_routes;
      const int route = i % num_routes;
      const int start = route - route % w_.num_topk;
      const int64_t entry = slot_.source_row(first) * w_.num_topk + route;
      const bool is_there = tile_.owner[route] == dst && (!is_in_runner || is_sent_expert_major(route));
      slot_.of_rank<int32_t>(dst, slot_.layout.recv_topk_ids)[entry] =
          is_there ? tile_.row[start + tile_.first_k[route]] : -1;
      if (!is_in_runner) {
        slot_.of_rank<float>(dst, slot_.layout.recv_topk_weights)[entry] = is_there ? tile_.weight[route] : 0.0f;
      }
    }
  }

  __device__ void write_routes_rank_major(int first, int num_tokens) {
    const int num_routes = num_tokens * w_.num_topk;
    for (int i = threadIdx.x; i < num_routes; i += kThreads) {
      const int64_t route = static_cast<int64_t>(first) * w_.num_topk + i;
      if (w_.combine_mode == CombineMode::kDirectSend) {
        set_route(route, tile_.owner[i], slot_.source_row(first) * w_.num_topk + i,
                  w_.weight_mode == WeightMode::kInRunner ? 1.0f : tile_.weight[i]);
      } else {
        set_route(route, tile_.dst_rank[i], tile_.row[i], 1.0f);
      }
    }
    for (int i = threadIdx.x; i < num_routes * slot_.context.num_ranks; i += kThreads) {
      const int dst = i / num_routes;
      const int route = i % num_routes;
      const int64_t entry = slot_.source_row(first) * w_.num_topk + route;
      const bool is_there = tile_.owner[route] == dst;
      const int id = !is_there               ? w_.padding_expert_id
                     : w_.is_global_id_space ? tile_.expert[route]
                                             : tile_.local[route];
      slot_.of_rank<int32_t>(dst, slot_.layout.recv_topk_ids)[entry] = id;
      slot_.of_rank<float>(dst, slot_.layout.recv_topk_weights)[entry] = is_there ? tile_.weight[route] : 0.0f;
    }
  }

  // ------------------------------------------------------------ rows

  __device__ __forceinline__ const uint8_t* piece_source(int first, int item) const {
    return buffers_.x + (first + item / tiling_.num_pieces) * buffers_.x_row_stride_bytes +
           static_cast<int64_t>(item % tiling_.num_pieces) * tiling_.piece_bytes;
  }
  __device__ __forceinline__ int piece_bytes(int item) const {
    return min(tiling_.piece_bytes, w_.row_bytes - item % tiling_.num_pieces * tiling_.piece_bytes);
  }
  __device__ __forceinline__ uint8_t* piece_target(int item, int route) const {
    return slot_.of_rank<uint8_t>(tile_.dst_rank[route], slot_.layout.recv_x) +
           static_cast<int64_t>(tile_.row[route]) * w_.row_bytes +
           static_cast<int64_t>(item % tiling_.num_pieces) * tiling_.piece_bytes;
  }

  // Warp w uses stage w; an item is a piece of a token.
  __device__ void init_stages() {
    if (threadIdx.x < tiling_.num_stages) {
      ptx::barrier_init(&tile_.barriers[threadIdx.x], 1);
      ptx::fence_barrier_init();
    }
    __syncthreads();
  }

  __device__ void load_piece(int first, int item) {
    const int stage = threadIdx.x / 32;
    ptx::barrier_expect_bytes(&tile_.barriers[stage], piece_bytes(item));
    ptx::bulk_load(stages_ + static_cast<int64_t>(stage) * tiling_.piece_bytes, piece_source(first, item),
                   piece_bytes(item), &tile_.barriers[stage]);
  }

  __device__ void load_first_pieces(int first, int num_tokens) {
    const int warp = threadIdx.x / 32;
    if (warp < tiling_.num_stages && warp < num_tokens * tiling_.num_pieces) {
      ptx::bulk_wait_sources_read(); // stores of the last tile
      __syncwarp();
      if (threadIdx.x % 32 == 0) {
        load_piece(first, warp);
      }
    }
  }

  // Lane k stores to the destination of route k.
  __device__ void send_rows_tma(int first, int num_tokens) {
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (warp >= tiling_.num_stages) {
      return;
    }
    const uint8_t* stage = stages_ + static_cast<int64_t>(warp) * tiling_.piece_bytes;
    const int num_items = num_tokens * tiling_.num_pieces;
    for (int item = warp; item < num_items; item += tiling_.num_stages) {
      ptx::barrier_wait(&tile_.barriers[warp], parity_);
      parity_ ^= 1;
      const int route = item / tiling_.num_pieces * w_.num_topk + lane;
      if (lane < w_.num_topk && tile_.dst_rank[route] != kNoExpert) {
        ptx::bulk_store(piece_target(item, route), stage, piece_bytes(item));
      }
      ptx::bulk_commit();
      if (item + tiling_.num_stages < num_items) {
        ptx::bulk_wait_sources_read();
        __syncwarp();
        if (lane == 0) {
          load_piece(first, item + tiling_.num_stages);
        }
      }
    }
  }

  // A block must not end while a bulk copy of its shared memory is under way.
  template <bool kIsTma> __device__ void drain(int first, int num_tokens) {
    const int warp = threadIdx.x / 32;
    if (kIsTma && warp < tiling_.num_stages) {
      if (warp < num_tokens * tiling_.num_pieces) {
        ptx::barrier_wait(&tile_.barriers[warp], parity_);
      }
      ptx::bulk_wait_complete();
    }
  }

  // A warp per piece: each vector is read once and written to every destination.
  __device__ void send_rows_plain(int first, int num_tokens) {
    const int lane = threadIdx.x % 32;
    for (int item = threadIdx.x / 32; item < num_tokens * tiling_.num_pieces; item += kWarps) {
      const auto* source = reinterpret_cast<const uint4*>(piece_source(first, item));
      const int num_vectors = piece_bytes(item) / 16;
      uint4 vectors[kPlainVectors];
#pragma unroll
      for (int i = 0; i < kPlainVectors; ++i) {
        if (lane + 32 * i < num_vectors) {
          vectors[i] = __ldg(&source[lane + 32 * i]);
        }
      }
      for (int k = 0; k < w_.num_topk; ++k) {
        const int route = item / tiling_.num_pieces * w_.num_topk + k;
        if (tile_.dst_rank[route] != kNoExpert) {
          auto* target = reinterpret_cast<uint4*>(piece_target(item, route));
#pragma unroll
          for (int i = 0; i < kPlainVectors; ++i) {
            if (lane + 32 * i < num_vectors) {
              target[lane + 32 * i] = vectors[i];
            }
          }
        }
      }
    }
  }

  const SlotView& slot_;
  const Workload& w_;
  const Buffers& buffers_;
  const DispatchTiling& tiling_;
  Tile& tile_;
  const uint32_t epoch_;
  int32_t* histogram_; // [num_experts]
  uint8_t* stages_;    // [num_stages, piece_bytes]
  const int32_t* expert_rank_;
  const int32_t* expert_local_;
  int begin_, end_; // tokens of this block
  uint32_t parity_ = 0;
};

} // namespace
} // namespace mscclpp_dispatcher
