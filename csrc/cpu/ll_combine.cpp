// Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
// Combine on the CPU engine: the steps of device/ll/combine.cu, one block per rank.
#include "cpu/ll_combine.hpp"

#include <cstring>
#include <limits>
#include <vector>

#include "cpu/numeric.hpp"
#include "cpu/slot.hpp"

namespace mscclpp_dispatcher::cpu {
namespace {

// One addend of an output row.
struct Term {
  const uint8_t* row;
  float weight;
};

template <typename Element> class Combine {
public:
  using Storage = typename Element::Storage;

  Combine(const Workload& workload, const DeviceContext& context, const RegionLayout& layout, const Buffers& buffers,
          const std::function<void()>& idle)
      : w_(workload), context_(context), layout_(layout), buffers_(buffers), waiter_(context.timeout_ns, idle),
        self_(slot_of(context.rank)), epoch_(*self_.epoch_base() + workload.epoch_delta), sum_(workload.hidden) {}

  void send() {
    if (w_.layout == DispatchLayout::kExpertMajor && w_.combine_mode == CombineMode::kLocalReduce) {
      reduce_local_rows();
    } else if (!w_.is_expert_output_in_place) {
      copy_expert_output();
    }
    for (int dst = 0; dst < context_.num_ranks; ++dst) {
      store_release(&slot_of(dst).combine_flags(context_.rank)[0], make_packet(epoch_, 0));
    }
  }

  void recv() {
    store_release(self_.progress(), make_packet(epoch_, static_cast<uint32_t>(Phase::kCombine)));
    uint64_t packet = 0;
    for (int src = 0; src < context_.num_ranks; ++src) {
      for (int block = 0; block < context_.peer_num_blocks[src]; ++block) {
        if (!waiter_.wait(&self_.combine_flags(src)[block], epoch_, &packet)) {
          report_timeout(w_, context_, Phase::kCombine, epoch_);
          fill_nan();
          return;
        }
      }
    }
    for (int token = 0; token < w_.num_tokens; ++token) {
      Term terms[kMaxTopk];
      int num_terms = 0;
      for (int k = 0; k < w_.num_topk; ++k) {
        const size_t route = static_cast<size_t>(token) * w_.num_topk + k;
        if (const int rank = self_.route_rank()[route]; rank != kNoExpert) {
          const int64_t row = self_.route_row()[route];
          terms[num_terms++] = {slot_of(rank).expert_output() + row * w_.row_bytes, self_.route_weight()[route]};
        }
      }
      sum_terms(terms, num_terms, buffers_.out + static_cast<int64_t>(token) * w_.row_bytes);
    }
    *self_.epoch_base() = epoch_;
  }

private:
  Slot slot_of(int rank) const { return Slot(context_, layout_, w_.slot, rank); }

  // dst = sum of weight * row, in order, in float; rounded once.
  void sum_terms(const Term* terms, int num_terms, uint8_t* dst) {
    std::fill(sum_.begin(), sum_.end(), 0.0f);
    for (int i = 0; i < num_terms; ++i) {
      const auto* row = reinterpret_cast<const Storage*>(terms[i].row);
      for (int column = 0; column < w_.hidden; ++column) {
        sum_[column] += terms[i].weight * Element::load(row[column]);
      }
    }
    auto* out = reinterpret_cast<Storage*>(dst);
    for (int column = 0; column < w_.hidden; ++column) {
      out[column] = Element::store(sum_[column]);
    }
  }

  void reduce_local_rows() {
    for (int src = 0; src < context_.num_ranks; ++src) {
      for (int token = 0; token < self_.num_tokens_per_rank()[src]; ++token) {
        const int64_t source_row = static_cast<int64_t>(src) * w_.active_tokens_per_rank + token;
        Term terms[kMaxTopk];
        int num_terms = 0;
        for (int k = 0; k < w_.num_topk; ++k) {
          const int64_t entry = source_row * w_.num_topk + k;
          if (const int64_t row = self_.recv_topk_ids()[entry]; row >= 0) {
            const float weight = w_.weight_mode == WeightMode::kInRunner ? 1.0f : self_.recv_topk_weights()[entry];
            terms[num_terms++] = {buffers_.expert_output + row * w_.row_bytes, weight};
          }
        }
        if (num_terms > 0) {
          sum_terms(terms, num_terms, self_.expert_output() + source_row * w_.row_bytes);
        }
      }
    }
  }

  void copy_expert_output() const {
    auto copy_row = [this](int64_t row) {
      std::memcpy(self_.expert_output() + row * w_.row_bytes, buffers_.expert_output + row * w_.row_bytes,
                  w_.row_bytes);
    };
    const int64_t source_rows = static_cast<int64_t>(context_.num_ranks) * w_.active_tokens_per_rank;
    if (w_.layout == DispatchLayout::kExpertMajor) {
      for (int local = 0; local < w_.num_local_experts; ++local) {
        for (int row = 0; row < self_.num_recv_tokens_per_expert()[local]; ++row) {
          copy_row(local * source_rows + row);
        }
      }
      return;
    }
    for (int64_t entry = 0; entry < source_rows * w_.num_topk; ++entry) {
      if (self_.recv_topk_ids()[entry] != w_.padding_expert_id) {
        copy_row(w_.combine_mode == CombineMode::kDirectSend ? entry : entry / w_.num_topk);
      }
    }
  }

  // An interrupted combine must not pass for a result.
  void fill_nan() const {
    auto* out = reinterpret_cast<Storage*>(buffers_.out);
    std::fill_n(out, static_cast<int64_t>(w_.num_tokens) * w_.hidden,
                Element::store(std::numeric_limits<float>::quiet_NaN()));
  }

  const Workload& w_;
  const DeviceContext& context_;
  const RegionLayout& layout_;
  const Buffers& buffers_;
  Waiter waiter_;
  Slot self_;
  uint32_t epoch_;
  std::vector<float> sum_;
};

template <typename Element>
void run(const Workload& workload, const DeviceContext& context, const RegionLayout& layout, const Buffers& buffers,
         const std::function<void()>& idle) {
  Combine<Element> combine(workload, context, layout, buffers, idle);
  if (workload.halves & kSend) {
    combine.send();
  }
  if (workload.halves & kRecv) {
    combine.recv();
  }
}

} // namespace

void ll_combine(const Workload& workload, const DeviceContext& context, const RegionLayout& layout,
                const Buffers& buffers, const std::function<void()>& idle) {
  switch (workload.payload) {
  case Payload::kBf16:
    return run<Bf16>(workload, context, layout, buffers, idle);
  case Payload::kFp16:
    return run<Fp16>(workload, context, layout, buffers, idle);
  case Payload::kFp32:
    return run<Fp32>(workload, context, layout, buffers, idle);
  }
}

} // namespace mscclpp_dispatcher::cpu
