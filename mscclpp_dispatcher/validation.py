# Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
"""Every check of what users pass to a call: each error names the value, what is allowed and the setting."""

from __future__ import annotations

import torch

from mscclpp_dispatcher.config import (
    NO_EXPERT,
    ROW_ALIGNMENT_BYTES,
    CombineMode,
    DispatcherConfig,
    DispatchLayout,
)
from mscclpp_dispatcher.errors import CapacityError, HandleError, InputError
from mscclpp_dispatcher.types import DispatchHandle, HandleState

ID_DTYPES = (torch.int32, torch.int64)


def _check_tensor(
    rank: int, name: str, value: object, dtypes: tuple[torch.dtype, ...], shape: tuple[int | None, ...], device
) -> None:
    """Checks one tensor; None in ``shape`` allows any size there."""
    if not isinstance(value, torch.Tensor):
        raise InputError(f"rank {rank}: {name} is a {type(value).__name__}; it must be a torch.Tensor")
    if value.dtype not in dtypes:
        raise InputError(f"rank {rank}: {name} has dtype {value.dtype}; allowed: {', '.join(map(str, dtypes))}")
    found = tuple(value.shape)
    # The plain comparison first: this runs several times in every call.
    if found != shape and (
        len(found) != len(shape) or any(want not in (None, have) for want, have in zip(shape, found, strict=True))
    ):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise InputError(f"rank {rank}: {name} has shape {list(found)}; allowed: [{wanted}]")
    if value.device != device:
        raise InputError(f"rank {rank}: {name} is on {value.device}; the dispatcher is on {device}")


def check_dispatch(
    config: DispatcherConfig,
    rank: int,
    device: torch.device,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor | None,
    active_tokens_per_rank: int | None,
) -> int:
    """Checks the arguments of a dispatch without reading tensor values.

    Returns:
        The active tokens per rank of the call.

    Raises:
        InputError, CapacityError: see Dispatcher.dispatch.
    """
    _check_tensor(rank, "x", x, (config.payload.dtype,), (None, config.hidden), device)
    num_tokens = x.shape[0]
    _check_tensor(rank, "topk_ids", topk_ids, ID_DTYPES, (num_tokens, config.num_topk), device)
    if topk_weights is not None:
        _check_tensor(rank, "topk_weights", topk_weights, (torch.float32,), (num_tokens, config.num_topk), device)
    active = config.resolve_active_tokens(active_tokens_per_rank)
    if not 1 <= active <= config.max_tokens_per_rank:
        raise CapacityError(
            f"rank {rank}: active_tokens_per_rank is {active}; allowed: 1..{config.max_tokens_per_rank} "
            "(max_tokens_per_rank)"
        )
    if num_tokens > active:
        limit = "max_tokens_per_rank" if active == config.max_tokens_per_rank else "active_tokens_per_rank of the call"
        raise CapacityError(
            f"rank {rank}: x has {num_tokens} tokens; allowed: at most {active} ({limit}); make the dispatcher with a "
            "larger max_tokens_per_rank, or split the batch"
        )
    return active


def check_ids(config: DispatcherConfig, rank: int, topk_ids: torch.Tensor) -> None:
    """Checks the values of the ids (on CUDA this waits for the device).

    Raises:
        InputError: an id is below -1 or not below num_experts; names the first one.
    """
    if topk_ids.numel() == 0:
        return
    is_bad = (topk_ids < NO_EXPERT) | (topk_ids >= config.num_experts)
    if bool(is_bad.any()):
        token, k = (int(i) for i in is_bad.nonzero()[0])
        raise InputError(bad_id_message(config, rank, int(topk_ids[token, k]), token, k))


def bad_id_message(config: DispatcherConfig, rank: int, value: int, token: int, k: int) -> str:
    return (
        f"rank {rank}: topk_ids[{token}, {k}] is {value}; allowed: {NO_EXPERT} (no expert) and "
        f"0..{config.num_experts - 1} (num_experts = {config.num_experts})"
    )


def needs_copy(x: torch.Tensor) -> bool:
    """Whether the rows of x cannot be read where they are (columns not adjacent, or rows not aligned)."""
    if x.numel() == 0:
        return False
    row_stride_bytes = x.stride(0) * x.element_size()
    return (
        (x.shape[1] > 1 and x.stride(1) != 1)
        or x.data_ptr() % ROW_ALIGNMENT_BYTES != 0
        or (x.shape[0] > 1 and row_stride_bytes % ROW_ALIGNMENT_BYTES != 0)
    )


def expert_output_shape(
    config: DispatcherConfig, num_ranks: int, num_local_experts: int, active: int
) -> tuple[int, ...]:
    """Shape of expert_output for a dispatch with ``active`` tokens per rank."""
    rows = num_ranks * active
    if config.layout is DispatchLayout.EXPERT_MAJOR:
        return (num_local_experts, rows, config.hidden)
    if config.combine_mode is CombineMode.DIRECT_SEND:
        return (rows, config.num_topk, config.hidden)
    return (rows, config.hidden)


def check_handle(rank: int, owner_id: int, handle: object, *states: HandleState) -> None:
    """Checks that a handle is this dispatcher's and in one of the states.

    Raises:
        HandleError: it is not.
    """
    if not isinstance(handle, DispatchHandle):
        raise HandleError(f"rank {rank}: handle is {handle!r}; it must be the DispatchHandle that dispatch returned")
    if handle.owner_id != owner_id:
        raise HandleError(f"rank {rank}: the handle of dispatch {handle.epoch} belongs to another dispatcher")
    if handle.state not in states:
        raise HandleError(
            f"rank {rank}: the handle of dispatch {handle.epoch} is {handle.state.value}; this call needs "
            f"{' or '.join(state.value for state in states)}"
        )


def check_combine(
    config: DispatcherConfig,
    rank: int,
    device: torch.device,
    handle: DispatchHandle,
    expert_output: torch.Tensor,
    out: torch.Tensor | None,
    shape: tuple[int, ...],
) -> None:
    """Checks the tensors of a combine.

    Raises:
        InputError: see Dispatcher.combine.
    """
    dtypes = (config.payload.dtype,)
    tensors = [("expert_output", expert_output, shape)]
    if out is not None:
        tensors.append(("out", out, (handle.num_tokens, config.hidden)))
    for name, tensor, wanted in tensors:
        _check_tensor(rank, name, tensor, dtypes, wanted, device)
        if not tensor.is_contiguous() or tensor.data_ptr() % ROW_ALIGNMENT_BYTES != 0:
            raise InputError(
                f"rank {rank}: {name} has strides {list(tensor.stride())} at address {tensor.data_ptr():#x}; it must "
                f"be contiguous and {ROW_ALIGNMENT_BYTES}-byte aligned"
            )
    if out is not None and out.numel() and expert_output.numel():
        begin, end = expert_output.data_ptr(), expert_output.data_ptr() + expert_output.numel() * out.element_size()
        if out.data_ptr() < end and begin < out.data_ptr() + out.numel() * out.element_size():
            raise InputError(f"rank {rank}: out overlaps expert_output; give it memory of its own, or leave it out")
