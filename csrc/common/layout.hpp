// Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
// Every size and offset of a rank's region, for host and device. A region has the same layout on all ranks, so a
// peer's word is its region's base plus the offset here.
//
//   [tables] [slot 0: control | routes | payload] [slot 1: ...] ...
//
// "peer-written" words are 64-bit and 8-byte aligned, as network atomics need.
#pragma once

#include "common/epoch.hpp"
#include "common/workload.hpp"

namespace mscclpp_dispatcher {

// What decides the layout; equal on all ranks.
struct RegionShape {
  int32_t num_ranks;
  int32_t num_experts;
  int32_t max_local_experts; // most experts that any rank owns
  int32_t num_topk;
  int32_t row_bytes;
  int32_t max_tokens_per_rank;
  int32_t num_slots;
  DispatchLayout layout;
  CombineMode combine_mode;
  WeightMode weight_mode;
};

struct RegionLayout {
  // Tables, written by the host once.
  uint64_t expert_rank;  // int32 [num_experts]: owner
  uint64_t expert_local; // int32 [num_experts]: index among the owner's experts
  uint64_t abort;        // uint32: set by a wait that timed out; later launches do nothing
  uint64_t slots;        // first slot
  uint64_t slot_bytes;

  // Within a slot: control words.
  uint64_t dispatch_flags;  // uint64 [num_ranks, kMaxBlocks], peer-written: "all rows of this block are there"
  uint64_t combine_flags;   // uint64 [num_ranks, kMaxBlocks], peer-written: "all rows of this block may be pulled"
  uint64_t dispatch_header; // uint64 [num_ranks, 2], peer-written packets: num_tokens, active_tokens_per_rank
  uint64_t expert_counts;   // uint64 [num_ranks, num_experts], peer-written packets (EXPERT_MAJOR)
  uint64_t progress;        // uint64, own: packet(epoch, Phase) of the last wait begun; peers read it to find a culprit
  uint64_t epoch_base;      // uint32, own
  uint64_t ticket;          // uint32, own: blocks that finished the combine

  // Routes of this rank's tokens: what combine gathers.
  uint64_t route_rank;   // int32 [max_tokens, num_topk]: rank to pull from, -1 for none
  uint64_t route_row;    // int32 [max_tokens, num_topk]: row in that rank's expert_output
  uint64_t route_weight; // float [max_tokens, num_topk]

  // Results beside the rows.
  uint64_t num_tokens_per_rank;        // int32 [num_ranks]
  uint64_t num_recv_tokens_per_expert; // int32 [max_local_experts] (EXPERT_MAJOR)
  uint64_t src_offsets;                // int32 [max_local_experts, num_ranks + 1] (EXPERT_MAJOR)

  // Payload, peer-written.
  uint64_t recv_x;            // rows
  uint64_t recv_topk_ids;     // int32 [num_ranks * max_tokens, num_topk]: RANK_MAJOR expert ids; EXPERT_MAJOR with
                              // LOCAL_REDUCE the rows of recv_x that hold the token, -1 for none
  uint64_t recv_topk_weights; // float, beside recv_topk_ids, or one per row of recv_x (EXPERT_MAJOR, IN_RUNNER)
  // Payload, own, pulled by peers: the experts' rows, or with EXPERT_MAJOR LOCAL_REDUCE the partial sums.
  uint64_t expert_output;

  // Element counts that the host reports.
  uint64_t recv_rows;
  uint64_t recv_ids;
  uint64_t recv_weights;
  uint64_t expert_output_rows;
  uint64_t total_bytes;
};

MSCCLPP_DISPATCHER_HD constexpr uint64_t align_up(uint64_t value, uint64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

constexpr uint64_t kSectionAlignment = 256; // keeps sections on separate L2 lines, and rows aligned for bulk copies

inline RegionLayout make_region_layout(const RegionShape& shape) {
  const uint64_t num_ranks = shape.num_ranks;
  const uint64_t num_tokens = shape.max_tokens_per_rank;
  const uint64_t num_topk = shape.num_topk;
  const bool is_expert_major = shape.layout == DispatchLayout::kExpertMajor;
  const bool is_local_reduce = shape.combine_mode == CombineMode::kLocalReduce;
  const bool is_in_runner = shape.weight_mode == WeightMode::kInRunner;
  const uint64_t source_rows = num_ranks * num_tokens;
  const uint64_t expert_rows = static_cast<uint64_t>(shape.max_local_experts) * source_rows;

  RegionLayout layout{};
  uint64_t offset = 0;
  auto take = [&offset](uint64_t bytes) {
    const uint64_t start = offset;
    offset = align_up(offset + bytes, kSectionAlignment);
    return start;
  };
  layout.expert_rank = take(4ull * shape.num_experts);
  layout.expert_local = take(4ull * shape.num_experts);
  layout.abort = take(4);
  layout.slots = offset;

  offset = 0;
  layout.dispatch_flags = take(8 * num_ranks * kMaxBlocks);
  layout.combine_flags = take(8 * num_ranks * kMaxBlocks);
  layout.dispatch_header = take(8 * num_ranks * 2);
  layout.expert_counts = take(is_expert_major ? 8 * num_ranks * shape.num_experts : 0);
  layout.progress = take(8);
  layout.epoch_base = take(4);
  layout.ticket = take(4);
  layout.route_rank = take(4 * num_tokens * num_topk);
  layout.route_row = take(4 * num_tokens * num_topk);
  layout.route_weight = take(4 * num_tokens * num_topk);
  layout.num_tokens_per_rank = take(4 * num_ranks);
  layout.num_recv_tokens_per_expert = take(is_expert_major ? 4ull * shape.max_local_experts : 0);
  layout.src_offsets = take(is_expert_major ? 4ull * shape.max_local_experts * (num_ranks + 1) : 0);

  layout.recv_rows = is_expert_major ? expert_rows : source_rows;
  layout.recv_ids = !is_expert_major || is_local_reduce ? source_rows * num_topk : 0;
  layout.recv_weights = is_expert_major && is_in_runner ? expert_rows : layout.recv_ids;
  layout.expert_output_rows = is_local_reduce ? source_rows : is_expert_major ? expert_rows : source_rows * num_topk;
  layout.recv_x = take(layout.recv_rows * shape.row_bytes);
  layout.recv_topk_ids = take(4 * layout.recv_ids);
  layout.recv_topk_weights = take(4 * layout.recv_weights);
  layout.expert_output = take(layout.expert_output_rows * shape.row_bytes);
  layout.slot_bytes = offset;
  layout.total_bytes = layout.slots + layout.slot_bytes * shape.num_slots;
  return layout;
}

// Address of a field of a slot in the region at base.
template <typename T>
MSCCLPP_DISPATCHER_HD T* slot_field(uint8_t* base, const RegionLayout& layout, int32_t slot, uint64_t field) {
  return reinterpret_cast<T*>(base + layout.slots + layout.slot_bytes * slot + field);
}

template <typename T> MSCCLPP_DISPATCHER_HD T* table_field(uint8_t* base, uint64_t field) {
  return reinterpret_cast<T*>(base + field);
}

} // namespace mscclpp_dispatcher
