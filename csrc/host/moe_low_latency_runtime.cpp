// Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
#include "host/moe_low_latency_runtime.hpp"

#include <algorithm>
#include <utility>

#include "common/check.hpp"

namespace mscclpp_dispatcher {

RegionShape MoELowLatencyRuntime::shape_of(const RuntimeConfig& config) {
  std::vector<int32_t> owned(config.num_ranks, 0);
  for (const int32_t rank : config.expert_rank) {
    check_argument(rank >= 0 && rank < config.num_ranks, "expert_rank holds ", rank, "; allowed: 0..",
                   config.num_ranks - 1);
    ++owned[rank];
  }
  return {config.num_ranks,  config.num_experts, *std::max_element(owned.begin(), owned.end()),
          config.num_topk,   config.row_bytes,   config.max_tokens_per_rank,
          config.num_slots,  config.layout,      config.combine_mode,
          config.weight_mode};
}

namespace {

const RuntimeConfig& checked(const RuntimeConfig& config) {
  check_argument(config.num_ranks >= 1 && config.num_ranks <= kMaxRanks, "num_ranks is ", config.num_ranks,
                 "; allowed: 1..", kMaxRanks);
  check_argument(config.rank >= 0 && config.rank < config.num_ranks, "rank is ", config.rank, "; allowed: 0..",
                 config.num_ranks - 1);
  check_argument(config.num_experts >= 1 && config.num_experts <= kMaxExperts, "num_experts is ", config.num_experts,
                 "; allowed: 1..", kMaxExperts);
  check_argument(config.num_topk >= 1 && config.num_topk <= kMaxTopk, "num_topk is ", config.num_topk, "; allowed: 1..",
                 kMaxTopk);
  check_argument(config.row_bytes >= 16 && config.row_bytes % 16 == 0, "row_bytes is ", config.row_bytes,
                 "; allowed: multiples of 16");
  check_argument(config.max_tokens_per_rank >= 1, "max_tokens_per_rank is ", config.max_tokens_per_rank,
                 "; allowed: at least 1");
  check_argument(config.num_slots >= 1, "num_slots is ", config.num_slots, "; allowed: at least 1");
  check_argument(config.num_blocks >= 1 && config.num_blocks <= kMaxBlocks, "num_blocks is ", config.num_blocks,
                 "; allowed: 1..", kMaxBlocks);
  check_argument(static_cast<int32_t>(config.expert_rank.size()) == config.num_experts, "expert_rank has ",
                 config.expert_rank.size(), " entries; needed: num_experts = ", config.num_experts);
  return config;
}

} // namespace

MoELowLatencyRuntime::MoELowLatencyRuntime(RuntimeConfig config, std::unique_ptr<LlBackend> backend)
    : config_(std::move(config)), backend_(std::move(backend)),
      layout_(make_region_layout(shape_of(checked(config_)))) {
  // Row numbers are int32 on the device.
  check_argument(layout_.recv_rows < (1ull << 31) && layout_.expert_output_rows < (1ull << 31),
                 "the buffers would hold ", std::max(layout_.recv_rows, layout_.expert_output_rows),
                 " rows; allowed: fewer than 2^31; lower max_tokens_per_rank");
  num_local_experts_ =
      static_cast<int32_t>(std::count(config_.expert_rank.begin(), config_.expert_rank.end(), config_.rank));
}

void MoELowLatencyRuntime::connect(const std::vector<uint64_t>& peer_base,
                                   const std::vector<int32_t>& peer_num_blocks) {
  check_argument(static_cast<int32_t>(peer_base.size()) == config_.num_ranks &&
                     static_cast<int32_t>(peer_num_blocks.size()) == config_.num_ranks,
                 "connect got ", peer_base.size(), " regions and ", peer_num_blocks.size(),
                 " block counts; needed: num_ranks = ", config_.num_ranks, " of each");
  for (int rank = 0; rank < config_.num_ranks; ++rank) {
    check_argument(peer_base[rank] != 0 && peer_base[rank] % kSectionAlignment == 0, "region of rank ", rank, " is at ",
                   peer_base[rank], "; it must be a multiple of ", kSectionAlignment);
    check_argument(peer_num_blocks[rank] >= 1 && peer_num_blocks[rank] <= kMaxBlocks, "rank ", rank, " has ",
                   peer_num_blocks[rank], " blocks; allowed: 1..", kMaxBlocks);
    context_.peer_base[rank] = reinterpret_cast<uint8_t*>(peer_base[rank]);
    context_.peer_num_blocks[rank] = peer_num_blocks[rank];
  }
  context_.rank = config_.rank;
  context_.num_ranks = config_.num_ranks;
  context_.num_blocks = config_.num_blocks;
  context_.timeout_ns = config_.timeout_ns;
  context_.stress_delay_ns = config_.stress_delay_ns;
  context_.faults = backend_->fault_words();
  is_connected_ = true;
  reset();
}

void MoELowLatencyRuntime::reset() {
  check_argument(is_connected_, "reset before connect");
  uint8_t* base = context_.peer_base[config_.rank];
  std::vector<int32_t> local(config_.num_experts);
  std::vector<int32_t> owned(config_.num_ranks, 0);
  for (int expert = 0; expert < config_.num_experts; ++expert) {
    local[expert] = owned[config_.expert_rank[expert]]++;
  }
  backend_->write(base + layout_.expert_rank, config_.expert_rank.data(), 4ull * config_.num_experts);
  backend_->write(base + layout_.expert_local, local.data(), 4ull * config_.num_experts);

  // Flags, headers and counts start at first_epoch; see epoch.hpp.
  const std::vector<uint64_t> control((layout_.progress - layout_.dispatch_flags) / 8,
                                      make_packet(config_.first_epoch, 0));
  const uint64_t idle = make_packet(config_.first_epoch, static_cast<uint32_t>(Phase::kIdle));
  const uint32_t zero = 0;
  for (int slot = 0; slot < config_.num_slots; ++slot) {
    auto at = [&](uint64_t field) { return slot_field<uint8_t>(base, layout_, slot, field); };
    backend_->write(at(layout_.dispatch_flags), control.data(), control.size() * 8);
    backend_->write(at(layout_.progress), &idle, 8);
    backend_->write(at(layout_.epoch_base), &config_.first_epoch, 4);
    backend_->write(at(layout_.ticket), &zero, 4);
  }
  backend_->write(base + layout_.abort, &zero, 4);
  *context_.faults = FaultWords{};
}

Workload MoELowLatencyRuntime::make_workload(uint32_t halves, int32_t slot, int32_t num_tokens,
                                             int32_t active_tokens_per_rank) const {
  Workload workload{};
  workload.epoch_delta = 1;
  workload.halves = halves;
  workload.slot = slot;
  workload.num_tokens = num_tokens;
  workload.hidden = config_.hidden;
  workload.row_bytes = config_.row_bytes;
  workload.num_topk = config_.num_topk;
  workload.num_experts = config_.num_experts;
  workload.num_local_experts = num_local_experts_;
  workload.padding_expert_id = config_.padding_expert_id;
  workload.max_tokens_per_rank = config_.max_tokens_per_rank;
  workload.active_tokens_per_rank = active_tokens_per_rank;
  workload.layout = config_.layout;
  workload.combine_mode = config_.combine_mode;
  workload.weight_mode = config_.weight_mode;
  workload.payload = config_.payload;
  workload.is_global_id_space = config_.is_global_id_space;
  return workload;
}

void MoELowLatencyRuntime::check_slot(int32_t slot) const {
  check_argument(is_connected_, "launch before connect");
  check_argument(slot >= 0 && slot < config_.num_slots, "slot is ", slot, "; allowed: 0..", config_.num_slots - 1);
}

void MoELowLatencyRuntime::dispatch(uint32_t halves, int32_t slot, int32_t num_tokens, int32_t active_tokens_per_rank,
                                    const Buffers& buffers, uint64_t stream) {
  check_slot(slot);
  check_argument(active_tokens_per_rank >= 1 && active_tokens_per_rank <= config_.max_tokens_per_rank,
                 "active_tokens_per_rank is ", active_tokens_per_rank, "; allowed: 1..", config_.max_tokens_per_rank);
  check_argument(num_tokens >= 0 && num_tokens <= active_tokens_per_rank, "num_tokens is ", num_tokens,
                 "; allowed: 0..", active_tokens_per_rank);
  check_argument(!(halves & kSend) || num_tokens == 0 || (buffers.x != nullptr && buffers.topk_ids != nullptr),
                 "x or topk_ids is null with ", num_tokens, " tokens");
  check_argument(reinterpret_cast<uint64_t>(buffers.x) % 16 == 0 && buffers.x_row_stride_bytes % 16 == 0,
                 "x rows must be 16-byte aligned; stride is ", buffers.x_row_stride_bytes, " bytes");
  backend_->dispatch(make_workload(halves, slot, num_tokens, active_tokens_per_rank), context_, layout_, buffers,
                     stream);
}

void MoELowLatencyRuntime::combine(uint32_t halves, int32_t slot, int32_t num_tokens, int32_t active_tokens_per_rank,
                                   bool is_expert_output_in_place, const Buffers& buffers, uint64_t stream) {
  check_slot(slot);
  check_argument(num_tokens >= 0 && num_tokens <= config_.max_tokens_per_rank, "num_tokens is ", num_tokens,
                 "; allowed: 0..", config_.max_tokens_per_rank);
  check_argument(reinterpret_cast<uint64_t>(buffers.expert_output) % 16 == 0 &&
                     reinterpret_cast<uint64_t>(buffers.out) % 16 == 0,
                 "expert_output and out must be 16-byte aligned");
  Workload workload = make_workload(halves, slot, num_tokens, active_tokens_per_rank);
  workload.is_expert_output_in_place = is_expert_output_in_place;
  backend_->combine(workload, context_, layout_, buffers, stream);
}

void MoELowLatencyRuntime::abandon(int32_t slot, int32_t active_tokens_per_rank, uint64_t stream) {
  check_slot(slot);
  Workload workload = make_workload(kSend | kRecv, slot, 0, active_tokens_per_rank);
  workload.num_topk = 0; // no route, so nothing is summed and nothing is read
  workload.is_expert_output_in_place = true;
  backend_->combine(workload, context_, layout_, Buffers{}, stream);
}

bool MoELowLatencyRuntime::has_faults() const {
  const volatile FaultWords* faults = context_.faults;
  return faults != nullptr && (faults->timeout | faults->bad_id | faults->active_mismatch) != 0;
}

FaultReport MoELowLatencyRuntime::take_faults() {
  FaultReport report;
  if (!is_connected_) {
    return report;
  }
  volatile FaultWords* faults = context_.faults;
  if (const uint64_t word = faults->bad_id) {
    const auto route = static_cast<int32_t>((word & ~kFaultBit) >> 32);
    report.has_bad_id = true;
    report.bad_id = static_cast<int32_t>(word);
    report.bad_id_token = route / config_.num_topk;
    report.bad_id_k = route % config_.num_topk;
    faults->bad_id = 0;
  }
  if (const uint64_t word = faults->active_mismatch) {
    report.has_active_mismatch = true;
    report.mismatch_rank = static_cast<int32_t>((word & ~kFaultBit) >> 32);
    report.mismatch_active = static_cast<int32_t>(word);
    faults->active_mismatch = 0;
  }
  report.has_timeout = faults->timeout != 0;
  return report;
}

uint32_t MoELowLatencyRuntime::seen_epoch(int32_t of_rank, int32_t slot, Phase phase, int32_t src) {
  const uint64_t field = phase == Phase::kDispatch ? layout_.dispatch_flags : layout_.combine_flags;
  uint64_t flags[kMaxBlocks];
  const int num_blocks = context_.peer_num_blocks[src];
  backend_->read(flags,
                 slot_field<uint8_t>(context_.peer_base[of_rank], layout_, slot, field) + 8ull * kMaxBlocks * src,
                 8ull * num_blocks);
  uint32_t oldest = packet_epoch(flags[0]);
  for (int block = 1; block < num_blocks; ++block) {
    oldest = is_not_older(packet_epoch(flags[block]), oldest) ? oldest : packet_epoch(flags[block]);
  }
  return oldest;
}

std::vector<int32_t> MoELowLatencyRuntime::late_ranks(int32_t of_rank, int32_t slot, Phase phase, uint32_t epoch) {
  std::vector<int32_t> late;
  for (int src = 0; src < config_.num_ranks; ++src) {
    if (!is_not_older(seen_epoch(of_rank, slot, phase, src), epoch)) {
      late.push_back(src);
    }
  }
  return late;
}

// Follows "X waits for Y" from this rank. A rank that waits for others, in a round that is not over, only passes the
// delay on; the ranks that nobody holds up are the culprits.
TimeoutReport MoELowLatencyRuntime::explain_timeout() {
  const uint64_t word = context_.faults->timeout;
  check_argument(word != 0, "explain_timeout without a time-out");
  TimeoutReport report;
  report.slot = static_cast<int32_t>(word >> 40 & 0xff);
  report.phase = static_cast<Phase>(word >> 32 & 0xff);
  report.epoch = static_cast<uint32_t>(word);
  report.missing = late_ranks(config_.rank, report.slot, report.phase, report.epoch);
  std::erase(report.missing, config_.rank);

  std::vector<uint8_t> is_visited(config_.num_ranks, 0);
  is_visited[config_.rank] = 1;
  std::vector<int32_t> to_visit = report.missing;
  while (!to_visit.empty()) {
    const int32_t rank = to_visit.back();
    to_visit.pop_back();
    if (std::exchange(is_visited[rank], uint8_t{1})) {
      continue;
    }
    uint64_t progress = 0;
    backend_->read(&progress, slot_field<uint8_t>(context_.peer_base[rank], layout_, report.slot, layout_.progress), 8);
    const auto phase = static_cast<Phase>(packet_value(progress));
    std::vector<int32_t> blockers;
    if (phase != Phase::kIdle) {
      blockers = late_ranks(rank, report.slot, phase, packet_epoch(progress));
      std::erase(blockers, rank);
      std::erase(blockers, config_.rank);
    }
    if (blockers.empty()) {
      report.culprits.push_back(rank);
    }
    to_visit.insert(to_visit.end(), blockers.begin(), blockers.end());
  }
  if (report.culprits.empty()) { // the missing ranks wait for each other: none can be singled out
    report.culprits = report.missing;
  }
  std::sort(report.culprits.begin(), report.culprits.end());
  report.seen_epoch =
      report.culprits.empty() ? 0 : seen_epoch(config_.rank, report.slot, report.phase, report.culprits.front());
  return report;
}

uint32_t MoELowLatencyRuntime::epoch(int32_t slot) {
  check_slot(slot);
  uint32_t value = 0;
  backend_->read(&value, slot_field<uint8_t>(context_.peer_base[config_.rank], layout_, slot, layout_.epoch_base), 4);
  return value;
}

} // namespace mscclpp_dispatcher
