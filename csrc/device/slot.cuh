// Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
// What the LL kernels share: typed fields of a slot, the bounded wait, the report of a fault.
#pragma once

#include "common/layout.hpp"
#include "device/ptx.cuh"

namespace mscclpp_dispatcher {

// The kernel's arguments and the addresses they lead to.
struct SlotView {
  const Workload& workload;
  const DeviceContext& context;
  const RegionLayout& layout;

  template <typename T> __device__ __forceinline__ T* of_rank(int rank, uint64_t field) const {
    return slot_field<T>(context.peer_base[rank], layout, workload.slot, field);
  }
  template <typename T> __device__ __forceinline__ T* own(uint64_t field) const {
    return of_rank<T>(context.rank, field);
  }
  template <typename T> __device__ __forceinline__ const T* table(uint64_t field) const {
    return table_field<T>(context.peer_base[context.rank], field);
  }
  __device__ __forceinline__ volatile uint32_t* abort_word() const {
    return table_field<uint32_t>(context.peer_base[context.rank], layout.abort);
  }
  // Row number of a token of this rank at its destinations.
  __device__ __forceinline__ int64_t source_row(int token) const {
    return static_cast<int64_t>(context.rank) * workload.active_tokens_per_rank + token;
  }
};

// Reads the launch's epoch; false if an earlier wait of this rank gave up, the same for all threads of a block (a block
// that sends part of its rows must not publish its flag). After the barrier all of them have read the base, which the
// last block may move from then on (epoch.hpp).
__device__ __forceinline__ bool begin_launch(const SlotView& slot, uint32_t* epoch) {
  *epoch = *slot.own<volatile uint32_t>(slot.layout.epoch_base) + slot.workload.epoch_delta;
  return !__syncthreads_or(*slot.abort_word());
}

__device__ __forceinline__ void report_timeout(const SlotView& slot, Phase phase, uint32_t epoch) {
  *slot.abort_word() = 1;
  volatile uint64_t* word = &slot.context.faults->timeout;
  *word = kFaultBit | static_cast<uint64_t>(slot.workload.slot) << 40 | static_cast<uint64_t>(phase) << 32 | epoch;
  __threadfence_system();
}

// Waits until *word carries an epoch that is not older and stores the packet. False when the limit has passed or
// another wait of this rank gave up.
template <bool kIsAcquire>
__device__ __forceinline__ bool wait_packet(const SlotView& slot, const uint64_t* word, uint32_t epoch, Phase phase,
                                            uint64_t* packet) {
  constexpr uint32_t kSpinsPerCheck = 256; // about 0.2 ms at most between looks at the clock
  uint64_t start = 0;
  for (uint32_t spin = 1;; ++spin) {
    *packet = kIsAcquire ? ptx::load_acquire_sys(word) : ptx::load_relaxed_sys(word);
    if (is_not_older(packet_epoch(*packet), epoch)) {
      return true;
    }
    if (spin % kSpinsPerCheck == 0) {
      if (*slot.abort_word()) {
        return false;
      }
      const uint64_t now = ptx::global_time_ns();
      start = start == 0 ? now : start;
      if (slot.context.timeout_ns != 0 && now - start > slot.context.timeout_ns) {
        report_timeout(slot, phase, epoch);
        return false;
      }
    }
  }
}

// Tells peers (and explain_timeout) what this rank waits for.
__device__ __forceinline__ void begin_wait(const SlotView& slot, uint32_t epoch, Phase phase) {
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    ptx::store_relaxed_sys(slot.own<uint64_t>(slot.layout.progress), make_packet(epoch, static_cast<uint32_t>(phase)));
  }
}

// Writes this block's flag word on every rank. All threads call it after the block's rows are complete at their
// writers; the barrier and the release order those rows before the flags.
__device__ __forceinline__ void publish_flags(const SlotView& slot, uint64_t field, uint32_t epoch) {
  __syncthreads();
  for (int dst = threadIdx.x; dst < slot.context.num_ranks; dst += blockDim.x) {
    uint64_t* flags = slot.of_rank<uint64_t>(dst, field) + slot.context.rank * kMaxBlocks;
    ptx::store_release_sys(&flags[blockIdx.x], make_packet(epoch, 0));
  }
}

// Waits for flag words number first, first + stride, ... of all (source rank, block). Every thread of the block
// returns the same answer; what the sources wrote before the flags is then visible to all of them.
__device__ __forceinline__ bool wait_flags(const SlotView& slot, uint64_t field, uint32_t epoch, Phase phase, int first,
                                           int stride) {
  bool has_failed = false;
  const uint64_t* flags = slot.own<uint64_t>(field);
  for (int i = first; i < slot.context.num_ranks * kMaxBlocks; i += stride) {
    uint64_t packet;
    if (i % kMaxBlocks < slot.context.peer_num_blocks[i / kMaxBlocks]) {
      has_failed = has_failed || !wait_packet<true>(slot, &flags[i], epoch, phase, &packet);
    }
  }
  return !__syncthreads_or(has_failed);
}

// Holds some blocks back for a random time, so that stress runs meet rare orders.
__device__ __forceinline__ void stress_delay(const DeviceContext& context) {
  if (context.stress_delay_ns != 0) {
    uint64_t random = (ptx::global_time_ns() ^ blockIdx.x * 0x9e3779b97f4a7c15ull) * 0xbf58476d1ce4e5b9ull;
    random = (random ^ random >> 31) * 0x94d049bb133111ebull;
    const uint64_t end = ptx::global_time_ns() + ((random >> 62) == 0 ? (random >> 8) % context.stress_delay_ns : 0);
    while (ptx::global_time_ns() < end) {
    }
    __syncthreads();
  }
}

} // namespace mscclpp_dispatcher
