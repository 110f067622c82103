# Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
"""The table of cases that every engine must pass, and the data that they run on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch

from mscclpp_dispatcher import (
    NO_EXPERT,
    CombineMode,
    DispatcherConfig,
    DispatchLayout,
    ExpertIdSpace,
    Payload,
    WeightMode,
)
from mscclpp_dispatcher.reference import TokenBatch

EXPERT_MAJOR, RANK_MAJOR = DispatchLayout.EXPERT_MAJOR, DispatchLayout.RANK_MAJOR
LOCAL_REDUCE, DIRECT_SEND = CombineMode.LOCAL_REDUCE, CombineMode.DIRECT_SEND
IN_COMBINE, IN_RUNNER = WeightMode.IN_COMBINE, WeightMode.IN_RUNNER

# ---------------------------------------------------------------------- data


def exact_rows(rank: int, num_tokens: int, hidden: int, round_idx: int, device: str | torch.device = "cpu"):
    """Profile X: ``((5r + 3t + h + 7*round) mod 9) - 4``, float32 ``[T, hidden]``.

    With exact_weights and up to 16 experts that multiply by 1 or 2, every partial sum is a multiple of
    1/2 of size at most 128: exact in every payload, in any order and under any rounding between.
    """
    token = torch.arange(num_tokens, device=device)[:, None]
    column = torch.arange(hidden, device=device)[None, :]
    return ((5 * rank + 3 * token + column + 7 * round_idx) % 9 - 4).float()


def exact_weights(num_tokens: int, num_topk: int, device: str | torch.device = "cpu") -> torch.Tensor:
    """Profile X: 1 where token + k is even, else 0.5."""
    token = torch.arange(num_tokens, device=device)[:, None]
    k = torch.arange(num_topk, device=device)[None, :]
    return torch.where((token + k) % 2 == 0, 1.0, 0.5)


def random_exact_rows(num_tokens: int, hidden: int, generator: torch.Generator) -> torch.Tensor:
    """As exact as profile X, but no two rows are alike: random integers -4..4."""
    return torch.randint(-4, 5, (num_tokens, hidden), generator=generator).float()


def tag_rows(x: torch.Tensor, rank: int, round_idx: int) -> torch.Tensor:
    """Profile ID: the first columns become rank, token and round in base 256 (exact in bfloat16)."""
    token = torch.arange(x.shape[0], device=x.device)
    tags = [torch.full_like(token, rank), token // 256, token % 256, torch.full_like(token, round_idx % 256)]
    x[:, :4] = torch.stack(tags, dim=1).to(x.dtype)
    return x


# ---------------------------------------------------------------------- routes


def make_ids(
    routing: str, rank: int, num_tokens: int, config: DispatcherConfig, num_ranks: int, generator: torch.Generator
) -> torch.Tensor:
    """int64 ``[T, K]`` by a named rule."""
    shape = (num_tokens, config.num_topk)
    num_experts = config.num_experts
    random_order = torch.rand((num_tokens, num_experts), generator=generator).argsort(dim=1)
    if routing == "distinct":
        return random_order[:, : config.num_topk]
    if routing == "masked":  # distinct, three in ten without expert; some tokens without any
        ids = random_order[:, : config.num_topk].clone()
        ids[torch.rand(shape, generator=generator) < 0.3] = NO_EXPERT
        ids[torch.rand(num_tokens, generator=generator) < 0.1] = NO_EXPERT
        return ids
    if routing == "repeated":  # from -1 and few experts, so that most tokens repeat one
        few = torch.randperm(num_experts, generator=generator)[: min(4, num_experts)]
        few = torch.cat([few, torch.tensor([NO_EXPERT])])
        return few[torch.randint(len(few), shape, generator=generator)]
    if routing.startswith("all_to_"):  # all tokens, all picks
        return torch.full(shape, int(routing.removeprefix("all_to_")))
    if routing == "same_set":  # heavy skew: ten tokens are random, the rest alike
        ids = torch.arange(config.num_topk).expand(shape).clone()
        ids[:10] = random_order[:10, : config.num_topk]
        return ids
    if routing == "own_rank":
        local = torch.tensor(config.local_experts(rank, num_ranks))
        return local[torch.randint(len(local), shape, generator=generator)]
    if routing == "not_last_rank":  # the last rank receives nothing
        num_used = sum(owner < num_ranks - 1 for owner in config.owners(num_ranks))
        order = torch.rand((num_tokens, num_used), generator=generator).argsort(dim=1)
        return order[:, : config.num_topk]
    if routing == "none":
        return torch.full(shape, NO_EXPERT)
    raise ValueError(f"routing is {routing!r}")


# ---------------------------------------------------------------------- cases


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One line of the table. Fields without a comment are settings of DispatcherConfig.

    Attributes:
        num_tokens: of each rank in the first round; their number is the number of ranks.
        capacity: max_tokens_per_rank; None takes the largest of num_tokens, at least 1.
        active: active_tokens_per_rank of the calls.
        routing: see make_ids. Ignored with ids.
        ids: explicit topk_ids of each rank, every round.
        data: ``exact`` (profile X), ``random_exact``, ``tagged`` (ID) or ``normal`` (N).
        x_form: ``contiguous``, or a way in which x is not: ``row_stride``, ``column_slice``,
            ``transposed``, ``unaligned``.
        is_split: uses the four halves instead of dispatch and combine.
        is_in_place: experts write to expert_output_buffer.
        num_in_flight: dispatches before the first combine.
        rotates: round i gives rank r the tokens of rank r + i.
        num_rounds: round trips, each on new data.
        limit_s: of the whole case on CPU.
    """

    name: str
    num_tokens: tuple[int, ...]
    capacity: int | None = None
    active: int | None = None
    hidden: int = 64
    num_topk: int = 4
    num_experts: int = 16
    layout: DispatchLayout = EXPERT_MAJOR
    combine_mode: CombineMode = LOCAL_REDUCE
    weight_mode: WeightMode | None = None
    payload: Payload = Payload.BF16
    expert_to_rank: tuple[int, ...] | None = None
    padding_expert_id: int = NO_EXPERT
    recv_id_space: ExpertIdSpace = ExpertIdSpace.LOCAL
    first_epoch: int = 0
    id_dtype: torch.dtype = torch.int32
    has_weights: bool = True
    routing: str = "distinct"
    ids: tuple[tuple[tuple[int, ...], ...], ...] | None = None
    data: str = "random_exact"
    x_form: str = "contiguous"
    is_split: bool = False
    is_in_place: bool = False
    num_in_flight: int = 1
    rotates: bool = True
    num_rounds: int = 3
    limit_s: float = 20.0

    @property
    def num_ranks(self) -> int:
        return len(self.num_tokens)

    def config(self) -> DispatcherConfig:
        return DispatcherConfig(
            num_experts=self.num_experts,
            num_topk=self.num_topk,
            hidden=self.hidden,
            max_tokens_per_rank=max(*self.num_tokens, 1) if self.capacity is None else self.capacity,
            layout=self.layout,
            combine_mode=self.combine_mode,
            weight_mode=self.weight_mode,
            payload=self.payload,
            expert_to_rank=self.expert_to_rank,
            padding_expert_id=self.padding_expert_id,
            recv_id_space=self.recv_id_space,
            num_slots=self.num_in_flight,
            first_epoch=self.first_epoch,
        )

    def batches(self, round_idx: int) -> list[TokenBatch]:
        """All ranks' tokens of a round, contiguous and on the CPU; equal in every process."""
        return [self._batch(rank, round_idx) for rank in range(self.num_ranks)]

    def _batch(self, rank: int, round_idx: int) -> TokenBatch:
        config = self.config()
        generator = torch.Generator().manual_seed(1000 + rank + 100 * round_idx)
        shift = round_idx if self.rotates else 0
        num_tokens = self.num_tokens[(rank + shift) % self.num_ranks]
        if self.ids is None:
            ids = make_ids(self.routing, rank, num_tokens, config, self.num_ranks, generator)
        else:
            ids = torch.tensor(self.ids[(rank + shift) % self.num_ranks], dtype=torch.int64)
            ids = ids.reshape(num_tokens, self.num_topk)
        weights = exact_weights(num_tokens, self.num_topk)
        if self.data == "normal":
            x = torch.randn((num_tokens, self.hidden), generator=generator)
            weights = torch.randn((num_tokens, self.num_topk), generator=generator).softmax(dim=1)
        elif self.data == "exact":
            x = exact_rows(rank, num_tokens, self.hidden, round_idx)
        else:
            x = random_exact_rows(num_tokens, self.hidden, generator)
        x = x.to(self.payload.dtype)
        if self.data == "tagged":
            x = tag_rows(x, rank, round_idx)
        return TokenBatch(x, ids.to(self.id_dtype), weights if self.has_weights else None)


VARIANTS: dict[str, dict[str, object]] = {
    "expert_reduce": {"layout": EXPERT_MAJOR, "combine_mode": LOCAL_REDUCE, "weight_mode": IN_COMBINE},
    "expert_reduce_runner": {"layout": EXPERT_MAJOR, "combine_mode": LOCAL_REDUCE, "weight_mode": IN_RUNNER},
    "expert_direct": {"layout": EXPERT_MAJOR, "combine_mode": DIRECT_SEND, "weight_mode": IN_COMBINE},
    "expert_direct_runner": {"layout": EXPERT_MAJOR, "combine_mode": DIRECT_SEND, "weight_mode": IN_RUNNER},
    "rank_reduce_runner": {"layout": RANK_MAJOR, "combine_mode": LOCAL_REDUCE, "weight_mode": IN_RUNNER},
    "rank_direct": {"layout": RANK_MAJOR, "combine_mode": DIRECT_SEND, "weight_mode": IN_COMBINE},
    "rank_direct_runner": {"layout": RANK_MAJOR, "combine_mode": DIRECT_SEND, "weight_mode": IN_RUNNER},
}
"""Every legal (layout, combine mode, weight mode)."""

PATHS = ("expert_reduce", "expert_direct", "rank_reduce_runner", "rank_direct")
"""One variant of each (layout, combine mode)."""


def each_variant(name: str, variants: Iterable[str] = tuple(VARIANTS), **fields: object) -> list[Case]:
    """The case ``name`` with each variant."""
    return [Case(name=f"{name}-{variant}", **{**VARIANTS[variant], **fields}) for variant in variants]


def _ranks_cases() -> list[Case]:
    """Numbers of ranks, with an uneven share of experts, idle ranks and repeated ids."""
    tokens = {1: (5,), 2: (8, 3), 3: (4, 0, 7), 4: (3, 0, 8, 1), 8: (2, 0, 5, 1, 0, 4, 3, 6)}
    cases = []
    for num_ranks, num_tokens in tokens.items():
        for routing in ("masked", "repeated"):
            cases += each_variant(
                f"ranks{num_ranks}-{routing}", num_tokens=num_tokens, num_experts=2 * num_ranks + 3, routing=routing
            )
    return cases


def _hidden_cases() -> list[Case]:
    cases = []
    for hidden in (8, 2048, 2880, 5120, 6144, 7168, 7392):
        cases += each_variant(f"hidden{hidden}", PATHS, num_tokens=(5, 8), hidden=hidden, num_rounds=2)
    return cases


def _topk_cases() -> list[Case]:
    cases = []
    for num_topk in (1, 2, 8, 9, 11, 16, 22, 32):
        data = "random_exact" if num_topk <= 16 else "normal"
        cases += each_variant(
            f"topk{num_topk}", PATHS, num_tokens=(7, 4), num_topk=num_topk, num_experts=64, data=data, num_rounds=2
        )
    return cases


def _type_cases() -> list[Case]:
    cases = []
    for payload in Payload:
        cases += each_variant(f"normal-{payload.value}", num_tokens=(9, 0, 4, 16), payload=payload, data="normal")
        if payload is not Payload.BF16:
            cases += each_variant(f"exact-{payload.value}", PATHS, num_tokens=(8, 5), payload=payload)
    cases += each_variant("normal-repeated", num_tokens=(9, 12), data="normal", routing="repeated")
    cases += each_variant("tagged", PATHS, num_tokens=(300, 40), capacity=300, num_topk=2, data="tagged")
    cases += each_variant("int64", PATHS, num_tokens=(5, 8), id_dtype=torch.int64, routing="masked")
    cases += each_variant("no_weights", num_tokens=(5, 8), has_weights=False, routing="repeated")
    return cases


def _input_cases() -> list[Case]:
    cases = []
    for x_form in ("row_stride", "column_slice", "transposed", "unaligned"):
        cases += each_variant(f"x_{x_form}", ("expert_reduce", "rank_direct"), num_tokens=(6, 9), x_form=x_form)
    cases += each_variant("all_idle", num_tokens=(0, 0, 0), capacity=4)
    cases += each_variant("one_busy", PATHS, num_tokens=(0, 0, 0, 7), num_rounds=5)
    cases += each_variant("no_routes", PATHS, num_tokens=(4, 6), routing="none")
    cases += each_variant("capacity1", PATHS, num_tokens=(1, 0, 1), num_rounds=6)
    cases += each_variant("one_expert", PATHS, num_tokens=(16, 16, 3), routing="all_to_5", num_topk=1)
    cases += each_variant("repeated_one_expert", num_tokens=(6, 5), routing="all_to_5")
    cases += each_variant("own_rank", PATHS, num_tokens=(6, 5, 7), routing="own_rank")
    return cases


def _expert_map_cases() -> list[Case]:
    # 12 logical experts on 4 ranks; the last four physical experts are replicas that lie elsewhere.
    redundant = (0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 3, 2, 1, 0)
    interleaved = tuple(expert_idx % 4 for expert_idx in range(16))
    skewed = (2,) * 13 + (0, 1, 0)  # rank 3 owns none
    cases = each_variant("experts_redundant", num_tokens=(8, 3, 0, 5), expert_to_rank=redundant, routing="masked")
    cases += each_variant("experts_interleaved", PATHS, num_tokens=(8, 3, 0, 5), expert_to_rank=interleaved)
    cases += each_variant("experts_skewed", PATHS, num_tokens=(8, 3, 0, 5), expert_to_rank=skewed, routing="masked")
    cases += each_variant("fewer_experts_than_ranks", PATHS, num_tokens=(3, 3, 3, 3), num_experts=2, num_topk=2)
    return cases


def _setting_cases() -> list[Case]:
    cases = []
    for padding in (-7, 16, 2**31 - 1):
        for id_space in ExpertIdSpace:
            cases += each_variant(
                f"padding{padding}-{id_space.value}",
                ("rank_reduce_runner", "rank_direct"),
                num_tokens=(6, 2, 0),
                routing="masked",
                padding_expert_id=padding,
                recv_id_space=id_space,
            )
    cases += each_variant("active_below_capacity", num_tokens=(3, 5, 0), capacity=32, active=5, routing="masked")
    cases += each_variant("capacity_above_tokens", PATHS, num_tokens=(3, 5, 0), capacity=32)
    cases += each_variant("split", num_tokens=(7, 0, 4), is_split=True, routing="repeated")
    cases += each_variant("in_place", num_tokens=(7, 0, 4), is_in_place=True, routing="masked")
    cases += each_variant("two_in_flight", PATHS, num_tokens=(7, 0, 4), num_in_flight=2, num_rounds=6)
    cases += each_variant(
        "three_in_flight_split",
        PATHS,
        num_tokens=(7, 3),
        num_in_flight=3,
        is_split=True,
        is_in_place=True,
        num_rounds=9,
    )
    for first_epoch in (2**31 - 2, 2**32 - 2):
        cases += each_variant(
            f"epoch{first_epoch}", PATHS, num_tokens=(7, 0, 4), first_epoch=first_epoch, num_in_flight=2, num_rounds=10
        )
    return cases


def _size_cases() -> list[Case]:
    return [
        *each_variant(
            "decode_ranks8", PATHS, num_tokens=(16,) * 8, num_topk=8, num_experts=64, hidden=512, num_rounds=2
        ),
        *each_variant(
            "decode128", PATHS, num_tokens=(128,) * 4, num_topk=8, num_experts=32, hidden=256, num_rounds=2, limit_s=40
        ),
        *each_variant(
            "same_set",
            PATHS,
            num_tokens=(144,) * 4,
            num_topk=8,
            num_experts=64,
            hidden=64,
            routing="same_set",
            num_rounds=2,
        ),
    ]


CASES: tuple[Case, ...] = (
    *_ranks_cases(),
    *_hidden_cases(),
    *_topk_cases(),
    *_type_cases(),
    *_input_cases(),
    *_expert_map_cases(),
    *_setting_cases(),
    *_size_cases(),
)
