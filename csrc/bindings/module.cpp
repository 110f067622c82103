// Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
// Python bindings. Pointers, sizes and streams cross as integers: no torch headers, so one build serves any torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "host/moe_low_latency_runtime.hpp"
#include "host/shared_segment.hpp"

#if defined(MSCCLPP_DISPATCHER_WITH_CUDA)
#include "device/cuda_device.hpp"
#endif

namespace py = pybind11;
using namespace mscclpp_dispatcher;

namespace {

#if defined(MSCCLPP_DISPATCHER_WITH_CUDA)
constexpr bool kHasCuda = true;
#else
constexpr bool kHasCuda = false;
#endif

// Lets Ctrl-C end a wait of the CPU engine.
void raise_on_signal() {
  py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) {
    throw py::error_already_set();
  }
}

template <typename T> T* pointer(uint64_t address) { return reinterpret_cast<T*>(address); }

std::unique_ptr<MoELowLatencyRuntime> make_cpu_runtime(const RuntimeConfig& config) {
  return std::make_unique<MoELowLatencyRuntime>(config, make_cpu_backend(raise_on_signal));
}

std::unique_ptr<MoELowLatencyRuntime> make_cuda_runtime(const RuntimeConfig& config, int device_idx, bool is_tma) {
#if defined(MSCCLPP_DISPATCHER_WITH_CUDA)
  return std::make_unique<MoELowLatencyRuntime>(
      config, make_cuda_backend(device_idx, is_tma, config.payload, MoELowLatencyRuntime::shape_of(config)));
#else
  (void)config, (void)device_idx, (void)is_tma;
  throw std::runtime_error("this build has no CUDA engine: nvcc was not found when it was built");
#endif
}

py::dict layout_dict(const MoELowLatencyRuntime& runtime) {
  const RegionLayout& layout = runtime.layout();
  py::dict fields;
#define FIELD(name) fields[#name] = layout.name
  FIELD(slots), FIELD(slot_bytes), FIELD(num_tokens_per_rank), FIELD(num_recv_tokens_per_expert), FIELD(src_offsets),
      FIELD(recv_x), FIELD(recv_topk_ids), FIELD(recv_topk_weights), FIELD(expert_output), FIELD(recv_rows),
      FIELD(recv_ids), FIELD(recv_weights), FIELD(expert_output_rows), FIELD(total_bytes);
#undef FIELD
  return fields;
}

} // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "Engines of mscclpp_dispatcher.";
  module.attr("has_cuda") = kHasCuda;
  module.attr("SEND") = static_cast<uint32_t>(kSend);
  module.attr("RECV") = static_cast<uint32_t>(kRecv);
  module.attr("MAX_EXPERTS") = kMaxExperts;

  py::enum_<DispatchLayout>(module, "DispatchLayout")
      .value("EXPERT_MAJOR", DispatchLayout::kExpertMajor)
      .value("RANK_MAJOR", DispatchLayout::kRankMajor);
  py::enum_<CombineMode>(module, "CombineMode")
      .value("LOCAL_REDUCE", CombineMode::kLocalReduce)
      .value("DIRECT_SEND", CombineMode::kDirectSend);
  py::enum_<WeightMode>(module, "WeightMode")
      .value("IN_COMBINE", WeightMode::kInCombine)
      .value("IN_RUNNER", WeightMode::kInRunner);
  py::enum_<Payload>(module, "Payload")
      .value("BF16", Payload::kBf16)
      .value("FP16", Payload::kFp16)
      .value("FP32", Payload::kFp32);
  py::enum_<Phase>(module, "Phase")
      .value("IDLE", Phase::kIdle)
      .value("DISPATCH", Phase::kDispatch)
      .value("COMBINE", Phase::kCombine);

  py::class_<RuntimeConfig>(module, "RuntimeConfig")
      .def(py::init([] { return RuntimeConfig{}; }))
      .def_readwrite("rank", &RuntimeConfig::rank)
      .def_readwrite("num_ranks", &RuntimeConfig::num_ranks)
      .def_readwrite("num_experts", &RuntimeConfig::num_experts)
      .def_readwrite("num_topk", &RuntimeConfig::num_topk)
      .def_readwrite("hidden", &RuntimeConfig::hidden)
      .def_readwrite("row_bytes", &RuntimeConfig::row_bytes)
      .def_readwrite("max_tokens_per_rank", &RuntimeConfig::max_tokens_per_rank)
      .def_readwrite("num_slots", &RuntimeConfig::num_slots)
      .def_readwrite("num_blocks", &RuntimeConfig::num_blocks)
      .def_readwrite("padding_expert_id", &RuntimeConfig::padding_expert_id)
      .def_readwrite("layout", &RuntimeConfig::layout)
      .def_readwrite("combine_mode", &RuntimeConfig::combine_mode)
      .def_readwrite("weight_mode", &RuntimeConfig::weight_mode)
      .def_readwrite("payload", &RuntimeConfig::payload)
      .def_readwrite("is_global_id_space", &RuntimeConfig::is_global_id_space)
      .def_readwrite("first_epoch", &RuntimeConfig::first_epoch)
      .def_readwrite("timeout_ns", &RuntimeConfig::timeout_ns)
      .def_readwrite("stress_delay_ns", &RuntimeConfig::stress_delay_ns)
      .def_readwrite("expert_rank", &RuntimeConfig::expert_rank);

  py::class_<FaultReport>(module, "FaultReport")
      .def_readonly("has_bad_id", &FaultReport::has_bad_id)
      .def_readonly("bad_id", &FaultReport::bad_id)
      .def_readonly("bad_id_token", &FaultReport::bad_id_token)
      .def_readonly("bad_id_k", &FaultReport::bad_id_k)
      .def_readonly("has_active_mismatch", &FaultReport::has_active_mismatch)
      .def_readonly("mismatch_rank", &FaultReport::mismatch_rank)
      .def_readonly("mismatch_active", &FaultReport::mismatch_active)
      .def_readonly("has_timeout", &FaultReport::has_timeout);

  py::class_<TimeoutReport>(module, "TimeoutReport")
      .def_readonly("slot", &TimeoutReport::slot)
      .def_readonly("phase", &TimeoutReport::phase)
      .def_readonly("epoch", &TimeoutReport::epoch)
      .def_readonly("seen_epoch", &TimeoutReport::seen_epoch)
      .def_readonly("missing", &TimeoutReport::missing)
      .def_readonly("culprits", &TimeoutReport::culprits);

  py::class_<MoELowLatencyRuntime>(module, "MoELowLatencyRuntime")
      .def_static("on_cpu", &make_cpu_runtime, py::arg("config"))
      .def_static("on_cuda", &make_cuda_runtime, py::arg("config"), py::arg("device_idx"), py::arg("is_tma"))
      .def_property_readonly("layout", &layout_dict)
      .def_property_readonly("num_local_experts", &MoELowLatencyRuntime::num_local_experts)
      .def("connect", &MoELowLatencyRuntime::connect, py::arg("peer_base"), py::arg("peer_num_blocks"))
      .def("reset", &MoELowLatencyRuntime::reset)
      .def(
          "dispatch",
          [](MoELowLatencyRuntime& self, uint32_t halves, int32_t slot, int32_t num_tokens, int32_t active, uint64_t x,
             int64_t x_row_stride_bytes, uint64_t topk_ids, int32_t topk_id_bytes, uint64_t topk_weights,
             uint64_t stream) {
            Buffers buffers{};
            buffers.x = pointer<const uint8_t>(x);
            buffers.x_row_stride_bytes = x_row_stride_bytes;
            buffers.topk_ids = pointer<const void>(topk_ids);
            buffers.topk_id_bytes = topk_id_bytes;
            buffers.topk_weights = pointer<const float>(topk_weights);
            self.dispatch(halves, slot, num_tokens, active, buffers, stream);
          },
          py::arg("halves"), py::arg("slot"), py::arg("num_tokens"), py::arg("active_tokens_per_rank"), py::arg("x"),
          py::arg("x_row_stride_bytes"), py::arg("topk_ids"), py::arg("topk_id_bytes"), py::arg("topk_weights"),
          py::arg("stream"), py::call_guard<py::gil_scoped_release>())
      .def(
          "combine",
          [](MoELowLatencyRuntime& self, uint32_t halves, int32_t slot, int32_t num_tokens, int32_t active,
             bool is_expert_output_in_place, uint64_t expert_output, uint64_t out, uint64_t stream) {
            Buffers buffers{};
            buffers.expert_output = pointer<const uint8_t>(expert_output);
            buffers.out = pointer<uint8_t>(out);
            self.combine(halves, slot, num_tokens, active, is_expert_output_in_place, buffers, stream);
          },
          py::arg("halves"), py::arg("slot"), py::arg("num_tokens"), py::arg("active_tokens_per_rank"),
          py::arg("is_expert_output_in_place"), py::arg("expert_output"), py::arg("out"), py::arg("stream"),
          py::call_guard<py::gil_scoped_release>())
      .def("abandon", &MoELowLatencyRuntime::abandon, py::arg("slot"), py::arg("active_tokens_per_rank"),
           py::arg("stream"), py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("has_faults", &MoELowLatencyRuntime::has_faults)
      .def("take_faults", &MoELowLatencyRuntime::take_faults)
      .def("explain_timeout", &MoELowLatencyRuntime::explain_timeout)
      .def("epoch", &MoELowLatencyRuntime::epoch, py::arg("slot"));

  py::class_<SharedSegment>(module, "SharedSegment", py::buffer_protocol())
      .def_static("create", &SharedSegment::create, py::arg("name"), py::arg("num_bytes"))
      .def_static("open", &SharedSegment::open, py::arg("name"), py::arg("num_bytes"))
      .def_static("unlink", &SharedSegment::unlink, py::arg("name"))
      .def_property_readonly("address",
                             [](const SharedSegment& self) { return reinterpret_cast<uint64_t>(self.data()); })
      .def_buffer([](SharedSegment& self) {
        return py::buffer_info(self.data(), 1, py::format_descriptor<uint8_t>::format(),
                               static_cast<py::ssize_t>(self.bytes()));
      });

#if defined(MSCCLPP_DISPATCHER_WITH_CUDA)
  module.def("cuda_device_traits", [](int device_idx) {
    const CudaDeviceTraits traits = cuda_device_traits(device_idx);
    py::dict fields;
    fields["compute_capability"] = py::make_tuple(traits.major, traits.minor);
    fields["num_sms"] = traits.num_sms;
    return fields;
  });
#endif
}
