// Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
#pragma once

namespace mscclpp_dispatcher {

struct CudaDeviceTraits {
  int major, minor; // compute capability
  int num_sms;
};

CudaDeviceTraits cuda_device_traits(int device_idx);

} // namespace mscclpp_dispatcher
