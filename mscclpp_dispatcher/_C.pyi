# Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
"""Types of the extension; pointers and CUDA streams cross as integers. Sources: csrc/bindings/module.cpp."""

import enum

has_cuda: bool
SEND: int
RECV: int
MAX_EXPERTS: int

class DispatchLayout(enum.Enum):
    EXPERT_MAJOR: int
    RANK_MAJOR: int

class CombineMode(enum.Enum):
    LOCAL_REDUCE: int
    DIRECT_SEND: int

class WeightMode(enum.Enum):
    IN_COMBINE: int
    IN_RUNNER: int

class Payload(enum.Enum):
    BF16: int
    FP16: int
    FP32: int

class Phase(enum.Enum):
    IDLE: int
    DISPATCH: int
    COMBINE: int

class RuntimeConfig:
    rank: int
    num_ranks: int
    num_experts: int
    num_topk: int
    hidden: int
    row_bytes: int
    max_tokens_per_rank: int
    num_slots: int
    num_blocks: int
    padding_expert_id: int
    layout: DispatchLayout
    combine_mode: CombineMode
    weight_mode: WeightMode
    payload: Payload
    is_global_id_space: bool
    first_epoch: int
    timeout_ns: int
    stress_delay_ns: int
    expert_rank: list[int]
    def __init__(self) -> None: ...

class FaultReport:
    has_bad_id: bool
    bad_id: int
    bad_id_token: int
    bad_id_k: int
    has_active_mismatch: bool
    mismatch_rank: int
    mismatch_active: int
    has_timeout: bool

class TimeoutReport:
    slot: int
    phase: Phase
    epoch: int
    seen_epoch: int
    missing: list[int]
    culprits: list[int]

class MoELowLatencyRuntime:
    @staticmethod
    def on_cpu(config: RuntimeConfig) -> MoELowLatencyRuntime: ...
    @staticmethod
    def on_cuda(config: RuntimeConfig, device_idx: int, is_tma: bool) -> MoELowLatencyRuntime: ...
    @property
    def layout(self) -> dict[str, int]: ...
    @property
    def num_local_experts(self) -> int: ...
    def connect(self, peer_base: list[int], peer_num_blocks: list[int]) -> None: ...
    def reset(self) -> None: ...
    def dispatch(
        self,
        halves: int,
        slot: int,
        num_tokens: int,
        active_tokens_per_rank: int,
        x: int,
        x_row_stride_bytes: int,
        topk_ids: int,
        topk_id_bytes: int,
        topk_weights: int,
        stream: int,
    ) -> None: ...
    def combine(
        self,
        halves: int,
        slot: int,
        num_tokens: int,
        active_tokens_per_rank: int,
        is_expert_output_in_place: bool,
        expert_output: int,
        out: int,
        stream: int,
    ) -> None: ...
    def abandon(self, slot: int, active_tokens_per_rank: int, stream: int) -> None: ...
    @property
    def has_faults(self) -> bool: ...
    def take_faults(self) -> FaultReport: ...
    def explain_timeout(self) -> TimeoutReport: ...
    def epoch(self, slot: int) -> int: ...

class SharedSegment:
    @staticmethod
    def create(name: str, num_bytes: int) -> SharedSegment: ...
    @staticmethod
    def open(name: str, num_bytes: int) -> SharedSegment: ...
    @staticmethod
    def unlink(name: str) -> None: ...
    @property
    def address(self) -> int: ...

def cuda_device_traits(device_idx: int) -> dict[str, object]: ...
