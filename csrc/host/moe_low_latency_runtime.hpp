// Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
// The low-latency runtime: owns the use of a rank's region, the epoch words and every launch of the LL operations.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "common/layout.hpp"
#include "common/workload.hpp"
#include "host/ll_backend.hpp"

namespace mscclpp_dispatcher {

struct RuntimeConfig {
  int32_t rank;
  int32_t num_ranks;
  int32_t num_experts;
  int32_t num_topk;
  int32_t hidden;
  int32_t row_bytes;
  int32_t max_tokens_per_rank;
  int32_t num_slots;
  int32_t num_blocks; // of this rank's launches
  int32_t padding_expert_id;
  DispatchLayout layout;
  CombineMode combine_mode;
  WeightMode weight_mode;
  Payload payload;
  bool is_global_id_space;
  uint32_t first_epoch;
  uint64_t timeout_ns;
  uint64_t stress_delay_ns;
  std::vector<int32_t> expert_rank; // owner of each expert
};

// A wait that ran out, and who is to blame.
struct TimeoutReport {
  int32_t slot;
  Phase phase;
  uint32_t epoch;
  uint32_t seen_epoch;           // of the first culprit's flags in this rank's region
  std::vector<int32_t> missing;  // ranks whose flags had not arrived
  std::vector<int32_t> culprits; // those that hold up the others
};

// What launches found since the last take_faults().
struct FaultReport {
  bool has_bad_id = false;
  int32_t bad_id = 0, bad_id_token = 0, bad_id_k = 0;
  bool has_active_mismatch = false;
  int32_t mismatch_rank = 0, mismatch_active = 0;
  bool has_timeout = false;
};

class MoELowLatencyRuntime {
public:
  // The config's shape decides the region; no memory is touched yet.
  MoELowLatencyRuntime(RuntimeConfig config, std::unique_ptr<LlBackend> backend);

  const RegionLayout& layout() const { return layout_; }
  static RegionShape shape_of(const RuntimeConfig& config);

  // Takes every rank's region as mapped here (rank order, own included; 256-byte aligned, zeroed or not) and each
  // rank's block count, and initialises this rank's words. Peers may launch once all ranks have returned from it.
  void connect(const std::vector<uint64_t>& peer_base, const std::vector<int32_t>& peer_num_blocks);

  // Initialises this rank's words again. No launch of any rank may be under way.
  void reset();

  // Launches. `tokens` is the active stride for the call; `stream` a CUDA stream, ignored on the CPU.
  void dispatch(uint32_t halves, int32_t slot, int32_t num_tokens, int32_t active_tokens_per_rank,
                const Buffers& buffers, uint64_t stream);
  void combine(uint32_t halves, int32_t slot, int32_t num_tokens, int32_t active_tokens_per_rank,
               bool is_expert_output_in_place, const Buffers& buffers, uint64_t stream);
  // Ends a dispatch without its rows: the handshake of a combine, no payload. Collective.
  void abandon(int32_t slot, int32_t active_tokens_per_rank, uint64_t stream);

  // Whether launches have reported anything since the last take_faults(); cheap enough for every call.
  bool has_faults() const;
  // Faults reported by launches; bad ids and mismatches are cleared, a time-out stays until reset().
  FaultReport take_faults();
  // Reads flags and progress words of the ranks involved. Only after take_faults() told of a time-out.
  TimeoutReport explain_timeout();

  // Number of the slot's last executed round (reads the epoch word; launches must be done).
  uint32_t epoch(int32_t slot);

  int32_t num_local_experts() const { return num_local_experts_; }

private:
  Workload make_workload(uint32_t halves, int32_t slot, int32_t num_tokens, int32_t active_tokens_per_rank) const;
  void check_slot(int32_t slot) const;
  std::vector<int32_t> late_ranks(int32_t of_rank, int32_t slot, Phase phase, uint32_t epoch);
  uint32_t seen_epoch(int32_t of_rank, int32_t slot, Phase phase, int32_t src);

  RuntimeConfig config_;
  std::unique_ptr<LlBackend> backend_;
  RegionLayout layout_;
  DeviceContext context_{};
  int32_t num_local_experts_ = 0;
  bool is_connected_ = false;
};

} // namespace mscclpp_dispatcher
