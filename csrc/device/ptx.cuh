// Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
// The PTX that C++ has no word for: system-scope flags, bulk copies, their barriers, the global clock.
#pragma once

#include <cstdint>

namespace mscclpp_dispatcher::ptx {

// Orders every write that happened before it (this thread's, and the block's after a __syncthreads) before the word,
// for readers on any device.
__device__ __forceinline__ void store_release_sys(uint64_t* word, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

// Pairs with store_release_sys.
__device__ __forceinline__ uint64_t load_acquire_sys(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

// For packets, whose value needs no other write.
__device__ __forceinline__ void store_relaxed_sys(uint64_t* word, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
__device__ __forceinline__ uint64_t load_relaxed_sys(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

// Adds and returns the old value; orders this thread's reads before it and its later writes after it, on this device.
__device__ __forceinline__ uint32_t add_acq_rel_gpu(uint32_t* word, uint32_t value) {
  uint32_t old;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(old) : "l"(word), "r"(value) : "memory");
  return old;
}

__device__ __forceinline__ uint64_t global_time_ns() {
  uint64_t time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

// ---------------------------------------------------------------- copies of 16 bytes to shared memory
// They bypass L1, so what a peer wrote is read from L2 or beyond.
__device__ __forceinline__ void copy_async(uint4* shared, const uint4* global) {
  asm volatile(
      "cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
      "l"(global)
      : "memory");
}
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most kPending of this thread's newest groups are not complete.
template <int kPending> __device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---------------------------------------------------------------- bulk copies
// Instructions of sm_90 and newer. Older code compiles the callers, which the host never launches there.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define MSCCLPP_DISPATCHER_SM90(...) asm volatile(__VA_ARGS__)
#else
#define MSCCLPP_DISPATCHER_SM90(...) __trap()
#endif

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void barrier_init(uint64_t* barrier, uint32_t arrivals) {
  MSCCLPP_DISPATCHER_SM90("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
                          "r"(arrivals) : "memory");
}

// Makes barrier_init visible to the copy engine.
__device__ __forceinline__ void fence_barrier_init() {
  MSCCLPP_DISPATCHER_SM90("fence.mbarrier_init.release.cluster;" :: : "memory");
}

__device__ __forceinline__ void barrier_expect_bytes(uint64_t* barrier, uint32_t bytes) {
  MSCCLPP_DISPATCHER_SM90("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
                          "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
  MSCCLPP_DISPATCHER_SM90("{\n"
                          ".reg .pred done;\n"
                          "again:\n"
                          "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                          "@!done bra again;\n"
                          "}" ::"r"(shared_address(barrier)),
                          "r"(parity) : "memory");
}

// Both addresses and the size are multiples of 16.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
  MSCCLPP_DISPATCHER_SM90(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void bulk_store(void* global, const void* shared, uint32_t bytes) {
  MSCCLPP_DISPATCHER_SM90("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
                          "r"(shared_address(shared)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bulk_commit() { MSCCLPP_DISPATCHER_SM90("cp.async.bulk.commit_group;" :: : "memory"); }
// The sources of this thread's bulk stores may be overwritten.
__device__ __forceinline__ void bulk_wait_sources_read() {
  MSCCLPP_DISPATCHER_SM90("cp.async.bulk.wait_group.read 0;" :: : "memory");
}
// This thread's bulk stores are complete and visible to it, so that a release after this covers them.
__device__ __forceinline__ void bulk_wait_complete() {
  MSCCLPP_DISPATCHER_SM90("cp.async.bulk.wait_group 0;" :: : "memory");
}

#undef MSCCLPP_DISPATCHER_SM90

} // namespace mscclpp_dispatcher::ptx
