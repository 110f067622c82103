// Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
// Typed views of one slot, of this rank or of a peer.
#pragma once

#include "common/layout.hpp"

namespace mscclpp_dispatcher::cpu {

class Slot {
public:
  Slot(const DeviceContext& context, const RegionLayout& layout, int32_t slot, int32_t rank)
      : base_(context.peer_base[rank]), layout_(layout), slot_(slot) {}

  uint64_t* dispatch_flags(int src) const { return field<uint64_t>(layout_.dispatch_flags) + src * kMaxBlocks; }
  uint64_t* combine_flags(int src) const { return field<uint64_t>(layout_.combine_flags) + src * kMaxBlocks; }
  uint64_t* dispatch_header(int src) const { return field<uint64_t>(layout_.dispatch_header) + src * 2; }
  uint64_t* expert_counts(int src, int num_experts) const {
    return field<uint64_t>(layout_.expert_counts) + static_cast<int64_t>(src) * num_experts;
  }
  uint64_t* progress() const { return field<uint64_t>(layout_.progress); }
  uint32_t* epoch_base() const { return field<uint32_t>(layout_.epoch_base); }
  int32_t* route_rank() const { return field<int32_t>(layout_.route_rank); }
  int32_t* route_row() const { return field<int32_t>(layout_.route_row); }
  float* route_weight() const { return field<float>(layout_.route_weight); }
  int32_t* num_tokens_per_rank() const { return field<int32_t>(layout_.num_tokens_per_rank); }
  int32_t* num_recv_tokens_per_expert() const { return field<int32_t>(layout_.num_recv_tokens_per_expert); }
  int32_t* src_offsets() const { return field<int32_t>(layout_.src_offsets); }
  uint8_t* recv_x() const { return field<uint8_t>(layout_.recv_x); }
  int32_t* recv_topk_ids() const { return field<int32_t>(layout_.recv_topk_ids); }
  float* recv_topk_weights() const { return field<float>(layout_.recv_topk_weights); }
  uint8_t* expert_output() const { return field<uint8_t>(layout_.expert_output); }

private:
  template <typename T> T* field(uint64_t offset) const { return slot_field<T>(base_, layout_, slot_, offset); }

  uint8_t* base_;
  const RegionLayout& layout_;
  int32_t slot_;
};

} // namespace mscclpp_dispatcher::cpu
