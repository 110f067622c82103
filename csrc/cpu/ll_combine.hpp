// Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
#pragma once

#include <functional>

#include "cpu/wait.hpp"

namespace mscclpp_dispatcher {
struct RegionLayout;
namespace cpu {

// Runs the halves that the workload names; a wait that times out is reported in context.faults.
void ll_combine(const Workload& workload, const DeviceContext& context, const RegionLayout& layout,
                const Buffers& buffers, const std::function<void()>& idle);

} // namespace cpu
} // namespace mscclpp_dispatcher
