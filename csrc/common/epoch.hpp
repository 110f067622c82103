// Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
// The round counter and its rules.
//
// An epoch counts executions, not launches recorded in a graph. The host owns the words: it sets every slot's
// epoch base and all flag words to `first_epoch` (never to zero: near 2^32 a zero would look newer), and assigns
// each operation its delta. A kernel computes
//     epoch = epoch_base[slot] + Workload.epoch_delta
// once, at its start. Dispatch and its combine read the same base, because only the last block to start a
// combine's receive half moves it, after every block of that launch has read it. So a replay, which runs the same
// Workload again, gets a new epoch, and eager calls and replays of several graphs may follow each other freely.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define MSCCLPP_DISPATCHER_HD __host__ __device__ __forceinline__
#else
#define MSCCLPP_DISPATCHER_HD inline
#endif

namespace mscclpp_dispatcher {

// A packet is one 64-bit word: epoch below, value above. It is written with one store, so a reader that sees the
// epoch has the value.
MSCCLPP_DISPATCHER_HD constexpr uint64_t make_packet(uint32_t epoch, uint32_t value) {
  return static_cast<uint64_t>(value) << 32 | epoch;
}
MSCCLPP_DISPATCHER_HD constexpr uint32_t packet_epoch(uint64_t packet) { return static_cast<uint32_t>(packet); }
MSCCLPP_DISPATCHER_HD constexpr uint32_t packet_value(uint64_t packet) { return static_cast<uint32_t>(packet >> 32); }

// Wrap-safe "seen is not older than wanted"; right while the two are less than 2^31 rounds apart.
MSCCLPP_DISPATCHER_HD constexpr bool is_not_older(uint32_t seen, uint32_t wanted) {
  return static_cast<int32_t>(seen - wanted) >= 0;
}

} // namespace mscclpp_dispatcher
