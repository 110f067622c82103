# Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
"""What dispatch returns: the received rows and the handle that combine takes back."""

from __future__ import annotations

import dataclasses
import enum

import torch

from mscclpp_dispatcher.config import DispatchLayout


@dataclasses.dataclass(frozen=True)
class DispatchOutput:
    """Rows and routes that arrived at this rank.

    All tensors are views of buffers that the dispatcher owns; they are valid from ``dispatch`` (or
    ``dispatch_recv``) until this handle's ``combine`` (or ``combine_send``) and are on the
    dispatcher's device. R = num_ranks, A = active_tokens_per_rank of the call, K = num_topk,
    L = this rank's experts, H = hidden.

    Attributes:
        layout: EXPERT_MAJOR or RANK_MAJOR.
        recv_x: payload dtype. EXPERT_MAJOR ``[L, R*A, H]``, of which rows
            ``[i, :num_recv_tokens_per_expert[i]]`` are valid; RANK_MAJOR ``[R*A, H]``, of which rows
            with any id other than padding_expert_id are valid. Other rows hold old data.
        num_tokens_per_rank: int32 ``[R]``: tokens that each source rank gave to this dispatch.
        num_recv_tokens_per_expert: int32 ``[L]``, EXPERT_MAJOR only: valid rows of each expert. A
            token that names an expert more than once is one row there.
        src_offsets: int32 ``[L, R+1]``, EXPERT_MAJOR only: rows
            ``src_offsets[i, s] : src_offsets[i, s+1]`` of expert i came from rank s (exclusive
            prefix sums), in ascending token order.
        recv_topk_ids: int32 ``[R*A, K]``, RANK_MAJOR only: the experts of this rank, in the id space
            of the config; padding_expert_id elsewhere.
        recv_topk_weights: float32. RANK_MAJOR ``[R*A, K]``: weights, 0 where recv_topk_ids is
            padding. EXPERT_MAJOR with weight_mode IN_RUNNER ``[L, R*A]``: weight of each valid row
            (the sum, in top-k order, of the weights of a repeated expert). Otherwise None.
    """

    layout: DispatchLayout
    recv_x: torch.Tensor
    num_tokens_per_rank: torch.Tensor
    num_recv_tokens_per_expert: torch.Tensor | None = None
    src_offsets: torch.Tensor | None = None
    recv_topk_ids: torch.Tensor | None = None
    recv_topk_weights: torch.Tensor | None = None


class HandleState(enum.Enum):
    """Steps of a handle's life, in order."""

    DISPATCH_SENT = "dispatch_sent"
    DISPATCHED = "dispatched"
    COMBINE_SENT = "combine_sent"
    CONSUMED = "consumed"


@dataclasses.dataclass(eq=False)
class DispatchHandle:
    """Names one dispatch until its combine; opaque to the user.

    The routing lives in the dispatcher's buffers, so the tensors given to dispatch may be freed.

    Attributes:
        owner_id: identity of the dispatcher that made it.
        slot: buffer set that it occupies, ``0 .. num_slots - 1``.
        epoch: the host's number for this operation (counts the calls to dispatch, not replays).
        num_tokens: tokens of this rank.
        active_tokens_per_rank: row stride between source ranks.
        state: where the handle is in its life.
    """

    owner_id: int
    slot: int
    epoch: int
    num_tokens: int
    active_tokens_per_rank: int
    state: HandleState = HandleState.DISPATCH_SENT
    out: torch.Tensor | None = None
