// Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
// Flag words between processes: release stores, acquire loads, bounded waits.
#pragma once

#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <thread>

#include "common/epoch.hpp"
#include "common/workload.hpp"

namespace mscclpp_dispatcher::cpu {

// Orders every earlier write of this thread (rows, routes, counts) before the word.
inline void store_release(uint64_t* word, uint64_t value) {
  std::atomic_ref<uint64_t>(*word).store(value, std::memory_order_release);
}

// Pairs with store_release: what the writer did before the word is seen after this load.
inline uint64_t load_acquire(uint64_t* word) {
  return std::atomic_ref<uint64_t>(*word).load(std::memory_order_acquire);
}

// One operation's waits: they share the limit's clock settings and the idle callback.
class Waiter {
public:
  Waiter(uint64_t timeout_ns, const std::function<void()>& idle) : timeout_ns_(timeout_ns), idle_(idle) {}

  // True once *word carries an epoch that is not older; false when the limit has passed.
  bool wait(uint64_t* word, uint32_t epoch, uint64_t* packet) const {
    using Clock = std::chrono::steady_clock;
    constexpr int kSpins = 200; // a peer that is running answers within this
    constexpr auto kIdlePeriod = std::chrono::milliseconds(100);
    Clock::time_point start{}, last_idle{};
    for (int spin = 0;; ++spin) {
      *packet = load_acquire(word);
      if (is_not_older(packet_epoch(*packet), epoch)) {
        return true;
      }
      if (spin < kSpins) {
        continue;
      }
      const auto now = Clock::now();
      if (spin == kSpins) {
        start = last_idle = now;
      }
      if (timeout_ns_ != 0 && now - start > std::chrono::nanoseconds(timeout_ns_)) {
        return false;
      }
      if (now - last_idle > kIdlePeriod) {
        last_idle = now;
        idle_();
      }
      // Yield first: with more ranks than cores the peer needs this core. Then sleep, to leave it free.
      if (spin < 10 * kSpins) {
        sched_yield();
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
    }
  }

private:
  uint64_t timeout_ns_;
  const std::function<void()>& idle_;
};

inline void report_timeout(const Workload& workload, const DeviceContext& context, Phase phase, uint32_t epoch) {
  context.faults->timeout =
      kFaultBit | static_cast<uint64_t>(workload.slot) << 40 | static_cast<uint64_t>(phase) << 32 | epoch;
}

} // namespace mscclpp_dispatcher::cpu
