// Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
// The CUDA backend: launches the kernels on the caller's stream and moves control words to and from the host.
#include <stdexcept>
#include <string>

#include "common/check.hpp"
#include "device/cuda_device.hpp"
#include "device/ll/launch.hpp"
#include "host/ll_backend.hpp"

namespace mscclpp_dispatcher {
namespace {

void check_cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    throw std::runtime_error(concat(what, ": ", cudaGetErrorName(error), " (", cudaGetErrorString(error), ")"));
  }
}

// Makes the device current for a scope; frameworks with one device per process pay one query.
class DeviceScope {
public:
  explicit DeviceScope(int device_idx) {
    check_cuda(cudaGetDevice(&previous_), "reading the current device");
    is_changed_ = previous_ != device_idx;
    if (is_changed_) {
      check_cuda(cudaSetDevice(device_idx), "selecting the dispatcher's device");
    }
  }
  ~DeviceScope() {
    if (is_changed_) {
      (void)cudaSetDevice(previous_);
    }
  }

private:
  int previous_ = 0;
  bool is_changed_ = false;
};

// Lets this thread use a stream of its own while it captures another.
class RelaxedCapture {
public:
  RelaxedCapture() { check_cuda(cudaThreadExchangeStreamCaptureMode(&mode_), "relaxing the capture mode"); }
  ~RelaxedCapture() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }

private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

class CudaBackend final : public LlBackend {
public:
  CudaBackend(int device_idx, bool is_tma, Payload payload, const RegionShape& shape) : device_idx_(device_idx) {
    const DeviceScope scope(device_idx_);
    int max_shared_bytes = 0;
    check_cuda(cudaDeviceGetAttribute(&max_shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device_idx_),
               "reading the shared-memory limit");
    tiling_ = make_dispatch_tiling(is_tma, shape, max_shared_bytes);
    check_cuda(prepare_ll_dispatch(tiling_), "preparing the dispatch kernels");
    check_cuda(prepare_ll_combine(payload, max_shared_bytes, &combine_depth_), "preparing the combine kernel");
    check_cuda(cudaHostAlloc(reinterpret_cast<void**>(&faults_), sizeof(FaultWords),
                             cudaHostAllocMapped | cudaHostAllocPortable),
               "allocating the fault words");
    *faults_ = FaultWords{};
    check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "making the control stream");
  }
  // Errors here mean that the context is gone already; there is nothing left to release.
  ~CudaBackend() override {
    (void)cudaStreamDestroy(stream_);
    (void)cudaFreeHost(faults_);
  }

  void dispatch(const Workload& workload, const DeviceContext& context, const RegionLayout& layout,
                const Buffers& buffers, uint64_t stream) override {
    const DeviceScope scope(device_idx_);
    check_cuda(launch_ll_dispatch(workload, context, layout, buffers, tiling_, reinterpret_cast<cudaStream_t>(stream)),
               "launching dispatch");
  }
  void combine(const Workload& workload, const DeviceContext& context, const RegionLayout& layout,
               const Buffers& buffers, uint64_t stream) override {
    const DeviceScope scope(device_idx_);
    check_cuda(
        launch_ll_combine(workload, context, layout, buffers, combine_depth_, reinterpret_cast<cudaStream_t>(stream)),
        "launching combine");
  }
  void write(uint8_t* region, const void* host, size_t bytes) override { copy(region, host, bytes); }
  void read(void* host, const uint8_t* region, size_t bytes) override { copy(host, region, bytes); }
  FaultWords* fault_words() override { return faults_; }

private:
  // A time-out may have to be explained while the caller captures a graph: that capture must not see these copies.
  void copy(void* to, const void* from, size_t bytes) {
    const DeviceScope scope(device_idx_);
    const RelaxedCapture relaxed;
    check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_), "copying control words");
    check_cuda(cudaStreamSynchronize(stream_), "copying control words");
  }

  int device_idx_;
  DispatchTiling tiling_{};
  int combine_depth_ = 0;
  FaultWords* faults_ = nullptr;
  cudaStream_t stream_ = nullptr;
};

} // namespace

std::unique_ptr<LlBackend> make_cuda_backend(int device_idx, bool is_tma, Payload payload, const RegionShape& shape) {
  return std::make_unique<CudaBackend>(device_idx, is_tma, payload, shape);
}

CudaDeviceTraits cuda_device_traits(int device_idx) {
  CudaDeviceTraits traits{};
  check_cuda(cudaDeviceGetAttribute(&traits.major, cudaDevAttrComputeCapabilityMajor, device_idx),
             "reading the compute capability");
  check_cuda(cudaDeviceGetAttribute(&traits.minor, cudaDevAttrComputeCapabilityMinor, device_idx),
             "reading the compute capability");
  check_cuda(cudaDeviceGetAttribute(&traits.num_sms, cudaDevAttrMultiProcessorCount, device_idx),
             "reading the number of SMs");
  return traits;
}

} // namespace mscclpp_dispatcher
