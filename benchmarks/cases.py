# Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
"""The table of benchmark cases."""

from __future__ import annotations

import dataclasses

from mscclpp_dispatcher import CombineMode, DispatcherConfig, DispatchLayout, Payload


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchCase:
    """One measured shape; ``num_tokens`` on every rank, uniform routes without repeats."""

    name: str
    layout: DispatchLayout
    combine_mode: CombineMode
    num_tokens: int = 128
    hidden: int = 7168
    num_topk: int = 8
    num_experts: int = 256
    payload: Payload = Payload.BF16

    def config(self, **settings: object) -> DispatcherConfig:
        return DispatcherConfig(
            num_experts=self.num_experts,
            num_topk=self.num_topk,
            hidden=self.hidden,
            max_tokens_per_rank=self.num_tokens,
            layout=self.layout,
            combine_mode=self.combine_mode,
            payload=self.payload,
            **settings,
        )

    def scaled_for_cpu(self) -> BenchCase:
        """The same case small enough for the CPU engine."""
        return dataclasses.replace(self, hidden=512, num_tokens=min(self.num_tokens, 32), num_experts=32)


_EXPERT, _RANK = DispatchLayout.EXPERT_MAJOR, DispatchLayout.RANK_MAJOR
_REDUCE, _DIRECT = CombineMode.LOCAL_REDUCE, CombineMode.DIRECT_SEND

CASES = (
    BenchCase(name="expert_major_reduce", layout=_EXPERT, combine_mode=_REDUCE),
    BenchCase(name="expert_major_direct", layout=_EXPERT, combine_mode=_DIRECT),
    BenchCase(name="rank_major_reduce", layout=_RANK, combine_mode=_REDUCE),
    BenchCase(name="rank_major_direct", layout=_RANK, combine_mode=_DIRECT),
    BenchCase(name="expert_major_reduce_1_token", layout=_EXPERT, combine_mode=_REDUCE, num_tokens=1),
    BenchCase(name="rank_major_reduce_1_token", layout=_RANK, combine_mode=_REDUCE, num_tokens=1),
    BenchCase(
        name="rank_major_reduce_2880", layout=_RANK, combine_mode=_REDUCE, hidden=2880, num_experts=128, num_topk=4
    ),
)
