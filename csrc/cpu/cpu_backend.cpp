// Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
#include <cstring>
#include <utility>

#include "cpu/ll_combine.hpp"
#include "cpu/ll_dispatch.hpp"
#include "host/ll_backend.hpp"

namespace mscclpp_dispatcher {
namespace {

class CpuBackend final : public LlBackend {
public:
  explicit CpuBackend(std::function<void()> idle) : idle_(std::move(idle)) {}

  void dispatch(const Workload& workload, const DeviceContext& context, const RegionLayout& layout,
                const Buffers& buffers, uint64_t) override {
    cpu::ll_dispatch(workload, context, layout, buffers, idle_);
  }
  void combine(const Workload& workload, const DeviceContext& context, const RegionLayout& layout,
               const Buffers& buffers, uint64_t) override {
    cpu::ll_combine(workload, context, layout, buffers, idle_);
  }
  void write(uint8_t* region, const void* host, size_t bytes) override { std::memcpy(region, host, bytes); }
  void read(void* host, const uint8_t* region, size_t bytes) override { std::memcpy(host, region, bytes); }
  FaultWords* fault_words() override { return &faults_; }

private:
  std::function<void()> idle_;
  FaultWords faults_{};
};

} // namespace

std::unique_ptr<LlBackend> make_cpu_backend(std::function<void()> idle) {
  return std::make_unique<CpuBackend>(std::move(idle));
}

} // namespace mscclpp_dispatcher
