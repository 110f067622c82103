// Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
// Dispatch on the CPU engine: the rows of device/ll/dispatch.cu by the same words, one block per rank.
#include "cpu/ll_dispatch.hpp"

#include <cstring>
#include <vector>

#include "cpu/slot.hpp"

namespace mscclpp_dispatcher::cpu {
namespace {

// The routes of this rank's tokens, read once; ids outside 0..num_experts-1 become kNoExpert.
struct Routes {
  std::vector<int32_t> expert;   // [num_tokens, num_topk]
  std::vector<float> weight;     // beside expert
  std::vector<uint8_t> is_first; // no earlier k of the token names the same expert

  Routes(const Workload& w, const Buffers& buffers)
      : expert(static_cast<size_t>(w.num_tokens) * w.num_topk), weight(expert.size()), is_first(expert.size()) {
    for (size_t i = 0; i < expert.size(); ++i) {
      const int64_t id = buffers.topk_id_bytes == 8 ? static_cast<const int64_t*>(buffers.topk_ids)[i]
                                                    : static_cast<const int32_t*>(buffers.topk_ids)[i];
      expert[i] = id >= 0 && id < w.num_experts ? static_cast<int32_t>(id) : kNoExpert;
      weight[i] = buffers.topk_weights ? buffers.topk_weights[i] : 1.0f;
      is_first[i] = expert[i] != kNoExpert;
      for (size_t j = i - i % w.num_topk; j < i; ++j) {
        is_first[i] = is_first[i] && expert[j] != expert[i];
      }
    }
  }
};

class Dispatch {
public:
  Dispatch(const Workload& workload, const DeviceContext& context, const RegionLayout& layout, const Buffers& buffers,
           const std::function<void()>& idle)
      : w_(workload), context_(context), layout_(layout), buffers_(buffers), waiter_(context.timeout_ns, idle),
        self_(slot_of(context.rank)), epoch_(*self_.epoch_base() + workload.epoch_delta) {
    uint8_t* base = context.peer_base[context.rank];
    expert_rank_ = table_field<int32_t>(base, layout.expert_rank);
    expert_local_ = table_field<int32_t>(base, layout.expert_local);
  }

  bool send() {
    const Routes routes(w_, buffers_);
    for (int dst = 0; dst < context_.num_ranks; ++dst) {
      uint64_t* header = slot_of(dst).dispatch_header(context_.rank);
      store_release(&header[0], make_packet(epoch_, w_.num_tokens));
      store_release(&header[1], make_packet(epoch_, w_.active_tokens_per_rank));
    }
    if (w_.layout == DispatchLayout::kExpertMajor) {
      if (!send_expert_major(routes)) {
        return false;
      }
    } else {
      send_rank_major(routes);
    }
    for (int dst = 0; dst < context_.num_ranks; ++dst) {
      store_release(&slot_of(dst).dispatch_flags(context_.rank)[0], make_packet(epoch_, 0));
    }
    return true;
  }

  bool recv() {
    begin_wait();
    uint64_t packet = 0;
    for (int src = 0; src < context_.num_ranks; ++src) {
      for (int block = 0; block < context_.peer_num_blocks[src]; ++block) {
        if (!waiter_.wait(&self_.dispatch_flags(src)[block], epoch_, &packet)) {
          return fail();
        }
      }
      // The header precedes the flags at its writer, so it is there.
      self_.num_tokens_per_rank()[src] = packet_value(load_acquire(&self_.dispatch_header(src)[0]));
      const uint32_t active = packet_value(load_acquire(&self_.dispatch_header(src)[1]));
      if (active != static_cast<uint32_t>(w_.active_tokens_per_rank)) {
        context_.faults->active_mismatch = kFaultBit | static_cast<uint64_t>(src) << 32 | active;
      }
    }
    w_.layout == DispatchLayout::kExpertMajor ? count_experts() : pad_rows();
    return true;
  }

private:
  Slot slot_of(int rank) const { return Slot(context_, layout_, w_.slot, rank); }
  void begin_wait() const {
    store_release(self_.progress(), make_packet(epoch_, static_cast<uint32_t>(Phase::kDispatch)));
  }
  bool fail() const {
    report_timeout(w_, context_, Phase::kDispatch, epoch_);
    return false;
  }
  const uint8_t* input_row(int token) const { return buffers_.x + token * buffers_.x_row_stride_bytes; }
  int64_t source_row(int token) const {
    return static_cast<int64_t>(context_.rank) * w_.active_tokens_per_rank + token;
  }
  void set_route(size_t route, int rank, int64_t row, float weight) const {
    self_.route_rank()[route] = rank;
    self_.route_row()[route] = static_cast<int32_t>(row);
    self_.route_weight()[route] = weight;
  }
  // Whether an earlier route of the same token goes to the same rank.
  bool is_first_to_rank(const Routes& routes, size_t route) const {
    for (size_t j = route - route % w_.num_topk; j < route; ++j) {
      if (routes.expert[j] != kNoExpert && expert_rank_[routes.expert[j]] == expert_rank_[routes.expert[route]]) {
        return false;
      }
    }
    return true;
  }

  bool send_expert_major(const Routes& routes) {
    std::vector<int32_t> next_row(w_.num_experts, 0);
    for (size_t i = 0; i < routes.expert.size(); ++i) {
      next_row[std::max(routes.expert[i], 0)] += routes.is_first[i];
    }
    for (int dst = 0; dst < context_.num_ranks; ++dst) {
      uint64_t* counts = slot_of(dst).expert_counts(context_.rank, w_.num_experts);
      for (int expert = 0; expert < w_.num_experts; ++expert) {
        store_release(&counts[expert], make_packet(epoch_, next_row[expert]));
      }
    }
    // An expert's rows begin with those of lower ranks.
    begin_wait();
    std::fill(next_row.begin(), next_row.end(), 0);
    for (int src = 0; src < context_.rank; ++src) {
      uint64_t* counts = self_.expert_counts(src, w_.num_experts);
      for (int expert = 0; expert < w_.num_experts; ++expert) {
        uint64_t packet = 0;
        if (!waiter_.wait(&counts[expert], epoch_, &packet)) {
          return fail();
        }
        next_row[expert] += packet_value(packet);
      }
    }
    for (int token = 0; token < w_.num_tokens; ++token) {
      send_token_expert_major(routes, token, next_row);
    }
    return true;
  }

  void send_token_expert_major(const Routes& routes, int token, std::vector<int32_t>& next_row) {
    const bool is_local_reduce = w_.combine_mode == CombineMode::kLocalReduce;
    const bool is_in_runner = w_.weight_mode == WeightMode::kInRunner;
    const int64_t expert_stride = static_cast<int64_t>(context_.num_ranks) * w_.active_tokens_per_rank;
    const size_t first_route = static_cast<size_t>(token) * w_.num_topk;
    int64_t rows[kMaxTopk];
    for (int k = 0; k < w_.num_topk; ++k) {
      const size_t route = first_route + k;
      const int expert = routes.expert[route];
      set_route(route, kNoExpert, 0, 0.0f);
      rows[k] = -1;
      if (expert == kNoExpert) {
        continue;
      }
      const int owner = expert_rank_[expert];
      const Slot dst = slot_of(owner);
      if (routes.is_first[route]) {
        rows[k] = expert_local_[expert] * expert_stride + next_row[expert]++;
        std::memcpy(dst.recv_x() + rows[k] * w_.row_bytes, input_row(token), w_.row_bytes);
        if (is_in_runner) {
          float sum = 0.0f;
          for (int j = k; j < w_.num_topk; ++j) {
            sum += routes.expert[first_route + j] == expert ? routes.weight[first_route + j] : 0.0f;
          }
          dst.recv_topk_weights()[rows[k]] = sum;
        }
      } else if (!is_in_runner) { // the runner's row already carries a repeated expert's weights
        for (int j = 0; j < k; ++j) {
          rows[k] = routes.expert[first_route + j] == expert ? rows[j] : rows[k];
        }
      }
      if (is_local_reduce) {
        if (is_first_to_rank(routes, route)) {
          set_route(route, owner, source_row(token), 1.0f);
        }
      } else if (rows[k] >= 0) {
        set_route(route, owner, rows[k], is_in_runner ? 1.0f : routes.weight[route]);
      }
    }
    if (is_local_reduce) {
      for (int dst = 0; dst < context_.num_ranks; ++dst) {
        for (int k = 0; k < w_.num_topk; ++k) {
          const int64_t entry = source_row(token) * w_.num_topk + k;
          const int expert = routes.expert[first_route + k];
          const bool is_there = rows[k] >= 0 && expert_rank_[expert] == dst;
          slot_of(dst).recv_topk_ids()[entry] = is_there ? static_cast<int32_t>(rows[k]) : -1;
          if (!is_in_runner) {
            slot_of(dst).recv_topk_weights()[entry] = is_there ? routes.weight[first_route + k] : 0.0f;
          }
        }
      }
    }
  }

  void send_rank_major(const Routes& routes) {
    for (int token = 0; token < w_.num_tokens; ++token) {
      for (int k = 0; k < w_.num_topk; ++k) {
        const size_t route = static_cast<size_t>(token) * w_.num_topk + k;
        const int expert = routes.expert[route];
        const int owner = expert == kNoExpert ? kNoExpert : expert_rank_[expert];
        set_route(route, kNoExpert, 0, 0.0f);
        if (owner != kNoExpert) {
          const bool is_first = is_first_to_rank(routes, route);
          if (is_first) {
            std::memcpy(slot_of(owner).recv_x() + source_row(token) * w_.row_bytes, input_row(token), w_.row_bytes);
          }
          if (w_.combine_mode == CombineMode::kDirectSend) {
            set_route(route, owner, source_row(token) * w_.num_topk + k,
                      w_.weight_mode == WeightMode::kInRunner ? 1.0f : routes.weight[route]);
          } else if (is_first) {
            set_route(route, owner, source_row(token), 1.0f);
          }
        }
        for (int dst = 0; dst < context_.num_ranks; ++dst) {
          const int64_t entry = source_row(token) * w_.num_topk + k;
          const int32_t id = owner != dst            ? w_.padding_expert_id
                             : w_.is_global_id_space ? expert
                                                     : expert_local_[expert];
          slot_of(dst).recv_topk_ids()[entry] = id;
          slot_of(dst).recv_topk_weights()[entry] = owner == dst ? routes.weight[route] : 0.0f;
        }
      }
    }
  }

  void count_experts() const {
    for (int local = 0, expert = 0; expert < w_.num_experts; ++expert) {
      if (expert_rank_[expert] != context_.rank) {
        continue;
      }
      int32_t* offsets = self_.src_offsets() + static_cast<int64_t>(local) * (context_.num_ranks + 1);
      offsets[0] = 0;
      for (int src = 0; src < context_.num_ranks; ++src) {
        const uint64_t packet = load_acquire(&self_.expert_counts(src, w_.num_experts)[expert]);
        offsets[src + 1] = offsets[src] + packet_value(packet);
      }
      self_.num_recv_tokens_per_expert()[local++] = offsets[context_.num_ranks];
    }
  }

  // Sources write the routes of their tokens; the receiver fills the rest of each source's stride.
  void pad_rows() const {
    for (int src = 0; src < context_.num_ranks; ++src) {
      for (int token = self_.num_tokens_per_rank()[src]; token < w_.active_tokens_per_rank; ++token) {
        const int64_t entry = (static_cast<int64_t>(src) * w_.active_tokens_per_rank + token) * w_.num_topk;
        std::fill_n(self_.recv_topk_ids() + entry, w_.num_topk, w_.padding_expert_id);
        std::fill_n(self_.recv_topk_weights() + entry, w_.num_topk, 0.0f);
      }
    }
  }

  const Workload& w_;
  const DeviceContext& context_;
  const RegionLayout& layout_;
  const Buffers& buffers_;
  Waiter waiter_;
  Slot self_;
  uint32_t epoch_;
  const int32_t* expert_rank_;
  const int32_t* expert_local_;
};

} // namespace

void ll_dispatch(const Workload& workload, const DeviceContext& context, const RegionLayout& layout,
                 const Buffers& buffers, const std::function<void()>& idle) {
  Dispatch dispatch(workload, context, layout, buffers, idle);
  if ((workload.halves & kSend) && !dispatch.send()) {
    return;
  }
  if (workload.halves & kRecv) {
    dispatch.recv();
  }
}

} // namespace mscclpp_dispatcher::cpu
