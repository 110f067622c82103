# Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
"""The definition of right: dispatch and combine of all ranks, in one process and plain torch.

Nothing here knows an engine. Results are exact: the order of rows, every padded entry, and the bits
of each sum (float32, product and sum rounded apart, in the order that the functions state). Tests
compare engines with it; benchmarks check themselves and count bytes with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from mscclpp_dispatcher.config import (
    NO_EXPERT,
    CombineMode,
    DispatcherConfig,
    DispatchLayout,
    ExpertIdSpace,
    WeightMode,
)
from mscclpp_dispatcher.types import DispatchOutput


@dataclasses.dataclass(frozen=True)
class TokenBatch:
    """What one rank gives to one dispatch; all on one device, of any strides.

    Attributes:
        x: ``[T, hidden]``, payload dtype.
        topk_ids: ``[T, num_topk]``, int32 or int64; NO_EXPERT where a token has none.
        topk_weights: ``[T, num_topk]`` float32, or None for ones.
    """

    x: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return self.x.shape[0]

    @property
    def weights(self) -> torch.Tensor:
        """``topk_weights``, or the ones that None stands for."""
        if self.topk_weights is not None:
            return self.topk_weights
        return torch.ones(self.topk_ids.shape, dtype=torch.float32, device=self.x.device)


# ---------------------------------------------------------------------- dispatch


def dispatch(
    config: DispatcherConfig, batches: Sequence[TokenBatch], *, active_tokens_per_rank: int | None = None
) -> list[DispatchOutput]:
    """What every rank receives.

    Args:
        config: of the dispatcher.
        batches: one per rank, in rank order; their number is the number of ranks.
        active_tokens_per_rank: row stride between source ranks, in tokens; None takes
            max_tokens_per_rank.

    Returns:
        One DispatchOutput per rank. Rows and (EXPERT_MAJOR) weights that no token fills are zero here;
        engines leave old data there.
    """
    return [
        dispatch_to_rank(config, batches, rank, active_tokens_per_rank=active_tokens_per_rank)
        for rank in range(len(batches))
    ]


def dispatch_to_rank(
    config: DispatcherConfig, batches: Sequence[TokenBatch], rank: int, *, active_tokens_per_rank: int | None = None
) -> DispatchOutput:
    """What ``rank`` receives; see ``dispatch``."""
    active = config.resolve_active_tokens(active_tokens_per_rank)
    if config.layout is DispatchLayout.EXPERT_MAJOR:
        return _dispatch_expert_major(config, batches, rank, active)
    return _dispatch_rank_major(config, batches, rank, active)


def _dispatch_expert_major(
    config: DispatcherConfig, batches: Sequence[TokenBatch], rank: int, active: int
) -> DispatchOutput:
    device = batches[0].x.device
    num_ranks = len(batches)
    local_experts = config.local_experts(rank, num_ranks)
    shape = (len(local_experts), num_ranks * active)
    recv_x = torch.zeros((*shape, config.hidden), dtype=config.payload.dtype, device=device)
    recv_weights = None
    if config.weight_mode is WeightMode.IN_RUNNER:
        recv_weights = torch.zeros(shape, dtype=torch.float32, device=device)
    src_offsets = torch.zeros((len(local_experts), num_ranks + 1), dtype=torch.int32, device=device)
    for local_idx, expert_idx in enumerate(local_experts):
        row = 0
        for src_rank, batch in enumerate(batches):
            tokens = (batch.topk_ids == expert_idx).any(dim=1).nonzero()[:, 0]  # ascending
            rows = slice(row, row + len(tokens))
            recv_x[local_idx, rows] = batch.x[tokens]
            if recv_weights is not None:
                recv_weights[local_idx, rows] = _weight_of_expert(batch, expert_idx)[tokens]
            row += len(tokens)
            src_offsets[local_idx, src_rank + 1] = row
    return DispatchOutput(
        layout=config.layout,
        recv_x=recv_x,
        num_tokens_per_rank=_num_tokens_per_rank(batches),
        num_recv_tokens_per_expert=src_offsets[:, -1].clone(),
        src_offsets=src_offsets,
        recv_topk_weights=recv_weights,
    )


def _dispatch_rank_major(
    config: DispatcherConfig, batches: Sequence[TokenBatch], rank: int, active: int
) -> DispatchOutput:
    device = batches[0].x.device
    num_ranks = len(batches)
    recv_x = torch.zeros((num_ranks * active, config.hidden), dtype=config.payload.dtype, device=device)
    shape = (num_ranks * active, config.num_topk)
    recv_ids = torch.full(shape, config.padding_expert_id, dtype=torch.int32, device=device)
    recv_weights = torch.zeros(shape, dtype=torch.float32, device=device)
    local_of = _local_idx_of_experts(config, num_ranks, device)
    for src_rank, batch in enumerate(batches):
        rows = slice(src_rank * active, src_rank * active + batch.num_tokens)
        is_here = _owner_of_routes(config, num_ranks, batch) == rank
        ids = batch.topk_ids.to(torch.int32)
        if config.recv_id_space is ExpertIdSpace.LOCAL:
            ids = local_of[ids.clamp(min=0).long()]
        recv_ids[rows] = torch.where(is_here, ids, config.padding_expert_id)
        recv_weights[rows] = torch.where(is_here, batch.weights, 0.0)
        recv_x[rows] = torch.where(is_here.any(dim=1, keepdim=True), batch.x, 0.0)
    return DispatchOutput(
        layout=config.layout,
        recv_x=recv_x,
        num_tokens_per_rank=_num_tokens_per_rank(batches),
        recv_topk_ids=recv_ids,
        recv_topk_weights=recv_weights,
    )


# ---------------------------------------------------------------------- combine


def combine(
    config: DispatcherConfig,
    batches: Sequence[TokenBatch],
    expert_outputs: Sequence[torch.Tensor],
    *,
    active_tokens_per_rank: int | None = None,
) -> list[torch.Tensor]:
    """What every rank gets back for its tokens.

    Args:
        config, batches, active_tokens_per_rank: as given to ``dispatch``.
        expert_outputs: one per rank, payload dtype, in the shape that ``Dispatcher.combine`` takes.

    Returns:
        One ``[T, hidden]`` tensor per rank, payload dtype.
    """
    active = config.resolve_active_tokens(active_tokens_per_rank)
    is_partial = config.layout is DispatchLayout.RANK_MAJOR and config.combine_mode is CombineMode.LOCAL_REDUCE
    outs = []
    for src_rank, batch in enumerate(batches):
        owners = _owner_of_routes(config, len(batches), batch)
        if is_partial:
            rows = slice(src_rank * active, src_rank * active + batch.num_tokens)
            partials = torch.stack([expert_output[rows] for expert_output in expert_outputs])
            outs.append(_sum_partials(config, owners, partials))
        else:
            routes = _expert_rows(config, batches, src_rank, expert_outputs, active)
            outs.append(combine_routes(config, len(batches), batch, routes))
    return outs


def combine_routes(
    config: DispatcherConfig, num_ranks: int, batch: TokenBatch, expert_rows: torch.Tensor
) -> torch.Tensor:
    """Sums one rank's expert rows; the arithmetic of ``combine`` without its layouts.

    DIRECT_SEND: ``out[t] = sum over k, ascending, of weight[t, k] * row[t, k]``. LOCAL_REDUCE: the
    same for each owning rank apart, rounded to the payload dtype; then the sum of these partial rows,
    in the order in which the ranks first appear along k. All in float32, rounded once at the end. The
    weights are topk_weights with IN_COMBINE and 1 with IN_RUNNER. An expert that a token repeats counts
    each time, except with EXPERT_MAJOR and IN_RUNNER, where its one row carries all its weights.

    Args:
        num_ranks: of the group.
        batch: the rank's tokens.
        expert_rows: ``[T, num_topk, hidden]``, payload dtype: what the expert of each route returned;
            entries of NO_EXPERT are not read.

    Returns:
        ``[T, hidden]``, payload dtype; zeros for a token without expert.
    """
    owners = _owner_of_routes(config, num_ranks, batch)
    is_counted = owners >= 0
    weights = batch.weights
    if config.weight_mode is WeightMode.IN_RUNNER:
        weights = torch.ones_like(weights)
        if config.layout is DispatchLayout.EXPERT_MAJOR:
            is_counted &= _is_first_occurrence(batch.topk_ids)
    if config.combine_mode is CombineMode.DIRECT_SEND:
        return _weighted_sum(expert_rows, weights, is_counted)
    partials = torch.stack(
        [_weighted_sum(expert_rows, weights, is_counted & (owners == rank)) for rank in range(num_ranks)]
    )
    return _sum_partials(config, owners, partials)


def _weighted_sum(rows: torch.Tensor, weights: torch.Tensor, is_counted: torch.Tensor) -> torch.Tensor:
    """``[T, K, H]`` to ``[T, H]``: in float32, ascending k, rounded to the dtype of ``rows``."""
    total = torch.zeros((rows.shape[0], rows.shape[2]), dtype=torch.float32, device=rows.device)
    for k in range(rows.shape[1]):
        product = weights[:, k, None] * rows[:, k].float()
        total = torch.where(is_counted[:, k, None], total + product, total)
    return total.to(rows.dtype)


def _sum_partials(config: DispatcherConfig, owners: torch.Tensor, partials: torch.Tensor) -> torch.Tensor:
    """``[R, T, H]`` to ``[T, H]``: each token's owning ranks, in the order of their first route."""
    tokens = torch.arange(owners.shape[0], device=owners.device)
    total = torch.zeros(partials.shape[1:], dtype=torch.float32, device=partials.device)
    is_counted = (owners >= 0) & _is_first_occurrence(owners)
    for k in range(config.num_topk):
        partial = partials[owners[:, k].clamp(min=0), tokens].float()
        total = torch.where(is_counted[:, k, None], total + partial, total)
    return total.to(config.payload.dtype)


def _expert_rows(
    config: DispatcherConfig,
    batches: Sequence[TokenBatch],
    src_rank: int,
    expert_outputs: Sequence[torch.Tensor],
    active: int,
) -> torch.Tensor:
    """``[T, K, H]``: the expert_output row of each route of ``src_rank``; zeros for NO_EXPERT."""
    batch = batches[src_rank]
    rows = torch.zeros((*batch.topk_ids.shape, config.hidden), dtype=config.payload.dtype, device=batch.x.device)
    owners = _owner_of_routes(config, len(batches), batch)
    if config.layout is DispatchLayout.RANK_MAJOR:
        for rank, expert_output in enumerate(expert_outputs):
            token, k = (owners == rank).nonzero(as_tuple=True)
            rows[token, k] = expert_output[src_rank * active + token, k]
        return rows
    local_of = _local_idx_of_experts(config, len(batches), batch.x.device)
    for expert_idx, rank in enumerate(config.owners(len(batches))):
        names_expert = [(other.topk_ids == expert_idx).any(dim=1) for other in batches[: src_rank + 1]]
        first_row = sum(int(names.sum()) for names in names_expert[:-1])  # the rows of lower ranks come first
        row_of_token = first_row + names_expert[-1].cumsum(0) - 1
        token, k = (batch.topk_ids == expert_idx).nonzero(as_tuple=True)
        rows[token, k] = expert_outputs[rank][local_of[expert_idx], row_of_token[token]]
    return rows


# ---------------------------------------------------------------------- experts


def expert_scale(expert_idx: int) -> int:
    """The factor of the model expert: ``1 + expert_idx mod 2``, which every payload multiplies exactly."""
    return 1 + expert_idx % 2


class ScalingExperts:
    """A rank's model experts, ``row -> expert_scale(e) * row``, on what dispatch returned.

    They apply the router's weights where the config leaves that to the runner (IN_RUNNER), and sum a
    token's experts where combine expects it (RANK_MAJOR with LOCAL_REDUCE: float32, ascending k).

    Capturable: everything that needs the host is made here.

    Args:
        config: of the dispatcher.
        local_experts: global ids of the rank's experts, ascending.
        device: of the dispatcher.
    """

    def __init__(self, config: DispatcherConfig, local_experts: Sequence[int], device: torch.device | str) -> None:
        self._config = config
        is_global = config.recv_id_space is ExpertIdSpace.GLOBAL and config.layout is DispatchLayout.RANK_MAJOR
        experts = range(config.num_experts) if is_global else local_experts
        # One entry more, so that a rank without experts has something to index.
        scales = [expert_scale(expert_idx) for expert_idx in experts] + [0]
        self._scales = torch.tensor(scales, dtype=torch.float32, device=device)

    def __call__(self, output: DispatchOutput, out: torch.Tensor | None = None) -> torch.Tensor:
        """All rows of ``output``; rows without an expert hold no meaning.

        Args:
            output: of this rank's dispatch.
            out: of the shape of the result, to write to; None allocates.

        Returns:
            ``expert_output`` as ``Dispatcher.combine`` takes it, payload dtype.
        """
        if output.layout is DispatchLayout.EXPERT_MAJOR:
            rows = output.recv_x.float() * self._scales[:-1, None, None]
            if self._config.weight_mode is WeightMode.IN_RUNNER:
                rows = rows * output.recv_topk_weights[:, :, None]
            return _store(rows, output, out)
        is_route = output.recv_topk_ids != self._config.padding_expert_id
        scales = self._scales[torch.where(is_route, output.recv_topk_ids, 0).long()]
        weights = scales
        if self._config.weight_mode is WeightMode.IN_RUNNER:
            weights = scales * output.recv_topk_weights
        if self._config.combine_mode is CombineMode.DIRECT_SEND:
            return _store(output.recv_x.float()[:, None] * weights[:, :, None], output, out)
        total = torch.zeros_like(output.recv_x, dtype=torch.float32)
        for k in range(self._config.num_topk):
            product = output.recv_x.float() * weights[:, k, None]
            total = torch.where(is_route[:, k, None], total + product, total)
        return _store(total, output, out)


def _store(rows: torch.Tensor, output: DispatchOutput, out: torch.Tensor | None) -> torch.Tensor:
    return rows.to(output.recv_x.dtype) if out is None else out.copy_(rows)


def round_trip(config: DispatcherConfig, num_ranks: int, batch: TokenBatch) -> torch.Tensor:
    """Dispatch, ScalingExperts and combine of one rank's tokens, without the layouts between.

    Equals ``combine`` of the experts' rows of ``dispatch``, bit for bit, and needs this rank's batch
    alone: no rank's tokens change another's result.

    Returns:
        ``[T, hidden]``, payload dtype.
    """
    ids = batch.topk_ids.clamp(min=0)
    rows = batch.x.float()[:, None] * (1 + ids % 2)[:, :, None]
    is_runner_sum = config.layout is DispatchLayout.RANK_MAJOR and config.combine_mode is CombineMode.LOCAL_REDUCE
    if is_runner_sum:  # the runner's float32 products are not rounded before its sum: as with IN_COMBINE
        in_combine = dataclasses.replace(config, layout=DispatchLayout.EXPERT_MAJOR, weight_mode=WeightMode.IN_COMBINE)
        return combine_routes(in_combine, num_ranks, batch, rows.to(config.payload.dtype))
    if config.weight_mode is WeightMode.IN_RUNNER:
        weights = batch.weights
        if config.layout is DispatchLayout.EXPERT_MAJOR:
            weights = torch.zeros_like(batch.weights)
            for k in range(config.num_topk):
                is_same = batch.topk_ids == batch.topk_ids[:, k, None]
                weights = torch.where(is_same, weights + batch.weights[:, k, None], weights)
        rows = rows * weights[:, :, None]
    return combine_routes(config, num_ranks, batch, rows.to(config.payload.dtype))


def round_trip_float64(batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """The round trip in float64, whatever the config, and the sum of the magnitudes of its addends.

    Returns:
        Two float64 ``[T, hidden]`` tensors; the second scales the rounding error that is allowed.
    """
    is_route = batch.topk_ids != NO_EXPERT
    factors = torch.where(is_route, batch.weights.double() * (1 + batch.topk_ids.clamp(min=0) % 2), 0.0)
    addends = factors[:, :, None] * batch.x.double()[:, None]
    return addends.sum(dim=1), addends.abs().sum(dim=1)


# ---------------------------------------------------------------------- bytes


@dataclasses.dataclass(frozen=True)
class BytesMoved:
    """Row bytes of one round over all ranks, rows that stay on their rank included.

    Attributes:
        dispatch: EXPERT_MAJOR: distinct (token, expert) pairs; RANK_MAJOR: distinct (token, rank)
            pairs; times the bytes of a row.
        combine: LOCAL_REDUCE: distinct (token, rank) pairs; DIRECT_SEND: routes that are summed (a
            repeated expert each time, but once with EXPERT_MAJOR and IN_RUNNER); times the bytes of
            a row. Rows that the experts' rank reads to form partial sums are not counted: they do not
            travel.
    """

    dispatch: int
    combine: int


def bytes_moved(config: DispatcherConfig, batches: Sequence[TokenBatch]) -> BytesMoved:
    """Bytes of rows that one dispatch and its combine move; ids, weights, counts and flags excluded.

    Args:
        config: of the dispatcher.
        batches: one per rank.
    """
    num_expert_pairs = num_rank_pairs = num_routes = 0
    for batch in batches:
        owners = _owner_of_routes(config, len(batches), batch)
        is_route = owners >= 0
        num_routes += int(is_route.sum())
        num_expert_pairs += int((is_route & _is_first_occurrence(batch.topk_ids)).sum())
        num_rank_pairs += int((is_route & _is_first_occurrence(owners)).sum())
    is_expert_major = config.layout is DispatchLayout.EXPERT_MAJOR
    num_sent = num_expert_pairs if is_expert_major else num_rank_pairs
    num_returned = num_routes
    if config.combine_mode is CombineMode.LOCAL_REDUCE:
        num_returned = num_rank_pairs
    elif is_expert_major and config.weight_mode is WeightMode.IN_RUNNER:
        num_returned = num_expert_pairs
    return BytesMoved(dispatch=num_sent * config.row_bytes, combine=num_returned * config.row_bytes)


# ---------------------------------------------------------------------- routes


def _owner_of_routes(config: DispatcherConfig, num_ranks: int, batch: TokenBatch) -> torch.Tensor:
    """int64 ``[T, K]``: the rank of each route's expert; -1 for NO_EXPERT."""
    owners = torch.tensor(config.owners(num_ranks), dtype=torch.int64, device=batch.x.device)
    return torch.where(batch.topk_ids == NO_EXPERT, -1, owners[batch.topk_ids.clamp(min=0).long()])


def _local_idx_of_experts(config: DispatcherConfig, num_ranks: int, device: torch.device) -> torch.Tensor:
    """int32 ``[num_experts]``: position of each expert among its rank's."""
    local_of = torch.zeros(config.num_experts, dtype=torch.int32, device=device)
    for rank in range(num_ranks):
        for local_idx, expert_idx in enumerate(config.local_experts(rank, num_ranks)):
            local_of[expert_idx] = local_idx
    return local_of


def _is_first_occurrence(values: torch.Tensor) -> torch.Tensor:
    """bool ``[T, K]``: no lower k of the token holds the same value."""
    is_first = torch.ones(values.shape, dtype=torch.bool, device=values.device)
    for k in range(1, values.shape[1]):
        is_first[:, k] = (values[:, :k] != values[:, k, None]).all(dim=1)
    return is_first


def _weight_of_expert(batch: TokenBatch, expert_idx: int) -> torch.Tensor:
    """float32 ``[T]``: sum of the weights of the routes to the expert, ascending k."""
    total = torch.zeros(batch.num_tokens, dtype=torch.float32, device=batch.x.device)
    for k in range(batch.topk_ids.shape[1]):
        total = torch.where(batch.topk_ids[:, k] == expert_idx, total + batch.weights[:, k], total)
    return total


def _num_tokens_per_rank(batches: Sequence[TokenBatch]) -> torch.Tensor:
    counts = [batch.num_tokens for batch in batches]
    return torch.tensor(counts, dtype=torch.int32, device=batches[0].x.device)
