# Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
"""The frozen configuration of a dispatcher; it checks itself when it is made."""

from __future__ import annotations

import dataclasses
import enum
import math

import torch

from mscclpp_dispatcher.errors import ConfigError

NO_EXPERT = -1
"""The expert id on input that means "no expert": nothing is sent and nothing is added."""

MAX_RANKS = 64
MAX_TOPK = 32
MAX_EXPERTS = 4096
MAX_BLOCKS = 128
ROW_ALIGNMENT_BYTES = 16


class DispatchMode(enum.Enum):
    """The algorithm family: LOW_LATENCY is for decode, inside CUDA graphs, with fixed shapes."""

    LOW_LATENCY = "low_latency"


class DispatchLayout(enum.Enum):
    """Where dispatched rows lie.

    EXPERT_MAJOR: ``[num_local_experts, num_ranks * active_tokens_per_rank, hidden]``; the rows of
    an expert are packed from 0, by source rank, then by token.
    RANK_MAJOR: ``[num_ranks * active_tokens_per_rank, hidden]``; token t of rank s is always row
    ``s * active_tokens_per_rank + t``, and it travels once to each rank that owns one of its experts.
    """

    EXPERT_MAJOR = "expert_major"
    RANK_MAJOR = "rank_major"


class CombineMode(enum.Enum):
    """How expert rows come back.

    LOCAL_REDUCE: the experts' rank sums its rows of a token first, one row per (token, rank) travels.
    DIRECT_SEND: one row per (token, expert) travels, and the token's rank sums in top-k order.
    """

    LOCAL_REDUCE = "local_reduce"
    DIRECT_SEND = "direct_send"


class WeightMode(enum.Enum):
    """Who multiplies by the router's weights: ``combine``, or the expert runner before it."""

    IN_COMBINE = "in_combine"
    IN_RUNNER = "in_runner"


class ExpertIdSpace(enum.Enum):
    """Numbering of ``recv_topk_ids``: LOCAL counts this rank's experts from 0, GLOBAL keeps the ids."""

    LOCAL = "local"
    GLOBAL = "global"


class Payload(enum.Enum):
    """Element type of the rows, both ways.

    Attributes:
        dtype: the torch dtype.
    """

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"

    def __init__(self, text: str) -> None:
        self.dtype: torch.dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[text]


class CopyPath(enum.Enum):
    """How a CUDA dispatch moves rows: AUTO takes TMA (bulk copies) on sm_90 and newer."""

    AUTO = "auto"
    TMA = "tma"
    PLAIN = "plain"


def _check_int(name: str, value: object, low: int, high: int | None) -> None:
    allowed = f"{low}..{high}" if high is not None else f"at least {low}"
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; it must be an int, {allowed}")
    if value < low or (high is not None and value > high):
        raise ConfigError(f"{name} is {value}; allowed: {allowed}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DispatcherConfig:
    """Everything that must be equal on all ranks of a dispatcher.

    Attributes:
        num_experts: physical experts over all ranks; ids are ``0 .. num_experts - 1``.
        num_topk: experts per token, the second dimension of ``topk_ids``; 1..32.
        hidden: elements of a row; ``hidden * element size`` must be a multiple of 16 bytes.
        max_tokens_per_rank: capacity: the most tokens that a rank may give to one dispatch.
        mode, layout, combine_mode, payload: see the enums.
        weight_mode: None takes IN_RUNNER for RANK_MAJOR with LOCAL_REDUCE (where only the runner can
            apply them) and IN_COMBINE otherwise.
        expert_to_rank: owner of each expert. None gives contiguous blocks, the first
            ``num_experts % num_ranks`` ranks owning one more. A rank's local experts are numbered
            in ascending order of their ids.
        padding_expert_id: filler of ``recv_topk_ids`` where a row has no expert of this rank; it
            must lie outside ``0 .. num_experts - 1``.
        recv_id_space: numbering of ``recv_topk_ids``.
        num_slots: dispatches that may be in flight at once; 2 for two-batch overlap. Buffers grow
            in proportion.
        num_blocks: CUDA blocks of each kernel, an SM each. None: as many as max_tokens_per_rank, from
            8 to 64, within the device's SMs (half of them if ranks share it) over its ranks and slots.
            All blocks of all ranks that wait for each other must be resident at once.
        copy_path: see CopyPath (CUDA only).
        timeout_s: limit of each wait for a peer, in seconds; 0 waits for ever.
        init_timeout_s: the same for making the dispatcher and ``reset``.
        first_epoch: the round before the first one; tests start near 2**32 with it.
        check_ids: on CUDA, read the ids back and refuse bad ones before sending (synchronizes).
            Without it, and inside graphs, the kernel drops them and the next call reports them. The
            CPU engine always checks.
        allow_shared_device: permit several ranks on one GPU (testing, under MPS).

    Raises:
        ConfigError: a value is out of range; the message names it and what is allowed.
    """

    num_experts: int
    num_topk: int
    hidden: int
    max_tokens_per_rank: int
    mode: DispatchMode = DispatchMode.LOW_LATENCY
    layout: DispatchLayout = DispatchLayout.EXPERT_MAJOR
    combine_mode: CombineMode = CombineMode.LOCAL_REDUCE
    weight_mode: WeightMode | None = None
    payload: Payload = Payload.BF16
    expert_to_rank: tuple[int, ...] | None = None
    padding_expert_id: int = NO_EXPERT
    recv_id_space: ExpertIdSpace = ExpertIdSpace.LOCAL
    num_slots: int = 1
    num_blocks: int | None = None
    copy_path: CopyPath = CopyPath.AUTO
    timeout_s: float = 100.0
    init_timeout_s: float = 300.0
    first_epoch: int = 0
    check_ids: bool = False
    allow_shared_device: bool = False

    def __post_init__(self) -> None:
        _check_int("num_experts", self.num_experts, 1, MAX_EXPERTS)
        _check_int("num_topk", self.num_topk, 1, MAX_TOPK)
        _check_int("hidden", self.hidden, 1, 1 << 20)
        _check_int("max_tokens_per_rank", self.max_tokens_per_rank, 1, 1 << 20)
        _check_int("num_slots", self.num_slots, 1, 8)
        _check_int("first_epoch", self.first_epoch, 0, (1 << 32) - 1)
        _check_int("padding_expert_id", self.padding_expert_id, -(1 << 31), (1 << 31) - 1)
        if self.num_blocks is not None:
            _check_int("num_blocks", self.num_blocks, 1, MAX_BLOCKS)
        self._check_enums()
        if self.row_bytes % ROW_ALIGNMENT_BYTES:
            raise ConfigError(
                f"hidden is {self.hidden}: a {self.payload.value} row has {self.row_bytes} bytes; allowed: "
                f"multiples of {ROW_ALIGNMENT_BYTES} bytes, so hidden a multiple of "
                f"{ROW_ALIGNMENT_BYTES // self.payload.dtype.itemsize}"
            )
        for name in ("timeout_s", "init_timeout_s"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
                raise ConfigError(f"{name} is {value!r}; allowed: seconds, 0 (for ever) or more")
        if 0 <= self.padding_expert_id < self.num_experts:
            raise ConfigError(
                f"padding_expert_id is {self.padding_expert_id}, which is a real expert; allowed: below 0, or "
                f"num_experts ({self.num_experts}) and above"
            )
        if self.expert_to_rank is not None:
            object.__setattr__(self, "expert_to_rank", tuple(int(r) for r in self.expert_to_rank))
            if len(self.expert_to_rank) != self.num_experts:
                raise ConfigError(
                    f"expert_to_rank has {len(self.expert_to_rank)} entries; it needs num_experts = {self.num_experts}"
                )
        self._resolve_weight_mode()

    def _check_enums(self) -> None:
        for name, kind in (
            ("mode", DispatchMode),
            ("layout", DispatchLayout),
            ("combine_mode", CombineMode),
            ("payload", Payload),
            ("recv_id_space", ExpertIdSpace),
            ("copy_path", CopyPath),
        ):
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise ConfigError(f"{name} is {value!r}; allowed: {', '.join(str(member) for member in kind)}")

    def _resolve_weight_mode(self) -> None:
        only_runner = self.layout is DispatchLayout.RANK_MAJOR and self.combine_mode is CombineMode.LOCAL_REDUCE
        if self.weight_mode is None:
            object.__setattr__(self, "weight_mode", WeightMode.IN_RUNNER if only_runner else WeightMode.IN_COMBINE)
        elif not isinstance(self.weight_mode, WeightMode):
            raise ConfigError(
                f"weight_mode is {self.weight_mode!r}; allowed: None, {', '.join(str(member) for member in WeightMode)}"
            )
        elif only_runner and self.weight_mode is WeightMode.IN_COMBINE:
            raise ConfigError(
                "weight_mode is IN_COMBINE with RANK_MAJOR and LOCAL_REDUCE: the runner has already summed a token's "
                "experts there, so only it can apply the weights; allowed: weight_mode=IN_RUNNER, or "
                "combine_mode=DIRECT_SEND"
            )

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.hidden * self.payload.dtype.itemsize

    def resolve_active_tokens(self, active_tokens_per_rank: int | None) -> int:
        """A call's row stride between source ranks, in tokens: None stands for the capacity."""
        return self.max_tokens_per_rank if active_tokens_per_rank is None else active_tokens_per_rank

    def owners(self, num_ranks: int) -> tuple[int, ...]:
        """Rank of each expert, length num_experts, for a group of num_ranks.

        Raises:
            ConfigError: expert_to_rank names a rank outside the group.
        """
        if self.expert_to_rank is not None:
            for expert_idx, rank in enumerate(self.expert_to_rank):
                if not 0 <= rank < num_ranks:
                    raise ConfigError(
                        f"expert_to_rank[{expert_idx}] is {rank}; allowed: 0..{num_ranks - 1} in a group of {num_ranks}"
                    )
            return self.expert_to_rank
        base, extra = divmod(self.num_experts, num_ranks)
        return tuple(rank for rank in range(num_ranks) for _ in range(base + (rank < extra)))

    def local_experts(self, rank: int, num_ranks: int) -> tuple[int, ...]:
        """Global ids of the experts of ``rank``, ascending: entry i is local expert i."""
        return tuple(expert_idx for expert_idx, owner in enumerate(self.owners(num_ranks)) if owner == rank)

    def to_dict(self) -> dict[str, object]:
        """All settings as JSON types, compared across ranks."""
        fields = dataclasses.asdict(self)
        return {
            name: value.value if isinstance(value, enum.Enum) else list(value) if isinstance(value, tuple) else value
            for name, value in fields.items()
        }
