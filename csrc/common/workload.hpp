// Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
// What one launch needs, as plain structs that the CPU engine and the CUDA kernels both take by value.
#pragma once

#include <cstdint>

namespace mscclpp_dispatcher {

constexpr int kMaxRanks = 64;
constexpr int kMaxTopk = 32;      // one lane of a warp per route
constexpr int kMaxBlocks = 128;   // flag words per source rank
constexpr int kMaxExperts = 4096; // histograms of all experts fit in shared memory
constexpr int kNoExpert = -1;

enum class DispatchLayout : int32_t { kExpertMajor = 0, kRankMajor = 1 };
enum class CombineMode : int32_t { kLocalReduce = 0, kDirectSend = 1 };
enum class WeightMode : int32_t { kInCombine = 0, kInRunner = 1 };
enum class Payload : int32_t { kBf16 = 0, kFp16 = 1, kFp32 = 2 };

// Halves of an operation; a launch does one or both.
enum Half : uint32_t { kSend = 1, kRecv = 2 };

// Values of a progress word's upper half.
enum class Phase : uint32_t { kIdle = 0, kDispatch = 1, kCombine = 2 };

// One operation. The host makes it, every block of the launch reads the same copy.
struct Workload {
  uint32_t epoch_delta; // host-assigned; effective epoch = slot's epoch base + delta (epoch.hpp)
  uint32_t halves;      // Half bits
  int32_t slot;         // buffer set, 0 .. num_slots-1
  int32_t num_tokens;   // of this rank
  int32_t hidden;       // elements
  int32_t row_bytes;    // of the payload, a multiple of 16
  int32_t num_topk;
  int32_t num_experts;       // over all ranks
  int32_t num_local_experts; // of this rank
  int32_t padding_expert_id;
  int32_t max_tokens_per_rank;
  int32_t active_tokens_per_rank; // row stride between source ranks
  DispatchLayout layout;
  CombineMode combine_mode;
  WeightMode weight_mode;
  Payload payload;
  int32_t is_global_id_space;        // recv_topk_ids keep global ids
  int32_t is_expert_output_in_place; // expert_output is already the buffer that peers read
};

// Where this rank stands among its peers; fixed after connect().
struct DeviceContext {
  uint8_t* peer_base[kMaxRanks];      // every rank's region as mapped here, rank order, self included
  int32_t peer_num_blocks[kMaxRanks]; // flag words that each rank writes per phase
  int32_t rank;
  int32_t num_ranks;
  int32_t num_blocks;        // of this rank's launches, constant
  uint64_t timeout_ns;       // of each wait; 0 waits for ever
  uint64_t stress_delay_ns;  // upper bound of random delays in kernels, for stress tests; 0 in service
  struct FaultWords* faults; // host memory that kernels can write
};

// Faults found by a launch, each one 64-bit store, so that no reader sees half a record. 0 means none.
struct FaultWords {
  uint64_t timeout;         // bit 63 set | slot << 40 | phase << 32 | epoch
  uint64_t bad_id;          // bit 63 set | (token * num_topk + k) << 32 (31 bits) | id as int32 (saturated)
  uint64_t active_mismatch; // bit 63 set | source rank << 32 | its active_tokens_per_rank
};

constexpr uint64_t kFaultBit = 1ull << 63;

// User memory of one call.
struct Buffers {
  const uint8_t* x;           // [num_tokens, hidden], rows x_row_stride_bytes apart
  int64_t x_row_stride_bytes; // multiple of 16
  const void* topk_ids;       // [num_tokens, num_topk] contiguous
  int32_t topk_id_bytes;      // 4 or 8
  const float* topk_weights;  // [num_tokens, num_topk] contiguous, or null for ones
  const uint8_t* expert_output;
  uint8_t* out; // [num_tokens, hidden] contiguous
};

} // namespace mscclpp_dispatcher
