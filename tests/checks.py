# Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
"""Round trips whose every output is compared with reference.py; these run on the ranks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from cases import EXPERT_MAJOR, Case
from launcher import Rank

from mscclpp_dispatcher import (
    CombineMode,
    Dispatcher,
    DispatcherConfig,
    DispatchHandle,
    DispatchOutput,
    WeightMode,
    reference,
)
from mscclpp_dispatcher.reference import ScalingExperts, TokenBatch

_CANARY = 0xA5
_GUARD_BYTES = 256


class Guarded:
    """A contiguous tensor with canary bytes on both sides.

    Attributes:
        tensor: filled with the canary, too, until written.
    """

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._name = name
        num_bytes = math.prod(shape) * dtype.itemsize
        self._memory = torch.full((num_bytes + 2 * _GUARD_BYTES,), _CANARY, dtype=torch.uint8, device=device)
        self.tensor = self._memory[_GUARD_BYTES : _GUARD_BYTES + num_bytes].view(dtype).view(shape)

    @classmethod
    def copy_of(cls, name: str, values: torch.Tensor, device: torch.device) -> Guarded:
        guarded = cls(name, tuple(values.shape), values.dtype, device)
        guarded.tensor.copy_(values)
        return guarded

    def check(self) -> None:
        """The bytes around the tensor are as they were."""
        sides = torch.cat([self._memory[:_GUARD_BYTES], self._memory[-_GUARD_BYTES:]])
        assert bool((sides == _CANARY).all()), f"{self._name}: bytes outside the tensor were written"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as integers on the CPU, so that NaN equals itself and -0 is not 0."""
    if tensor.dtype.is_floating_point:
        tensor = tensor.contiguous().view(torch.int16 if tensor.dtype.itemsize == 2 else torch.int32)
    return tensor.cpu()


def assert_equal(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Same dtype, shape and bits; a failure names the first unlike element."""
    assert actual.dtype == expected.dtype, f"{name}: {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"{name}: shape {list(actual.shape)}, expected {list(expected.shape)}"
    is_unlike = bits(actual) != bits(expected)
    if bool(is_unlike.any()):
        where = tuple(int(i) for i in is_unlike.nonzero()[0])
        raise AssertionError(
            f"{name}: {int(is_unlike.sum())} of {is_unlike.numel()} elements differ; first at {list(where)}: "
            f"{actual[where].item()!r}, expected {expected[where].item()!r}"
        )


def assert_close_to_float64(name: str, actual: torch.Tensor, config: DispatcherConfig, batch: TokenBatch) -> None:
    """Within the rounding errors of the config's steps: each to the payload dtype, and the float32 arithmetic."""
    expected, magnitude = reference.round_trip_float64(batch)
    is_reduced = config.combine_mode is CombineMode.LOCAL_REDUCE
    has_weighted_rows = config.weight_mode is WeightMode.IN_RUNNER and not (
        config.layout is not EXPERT_MAJOR and is_reduced
    )
    num_roundings = 1 + is_reduced + has_weighted_rows
    allowed = num_roundings * torch.finfo(actual.dtype).eps / 2 + (2 * config.num_topk + 4) * 2**-24
    excess = (actual.cpu().double() - expected).abs() - 1.01 * magnitude * allowed
    assert not bool((excess > 0).any()), f"{name}: {float(excess.max())} beyond the allowed rounding error"
    assert not bool(actual.isnan().any()), f"{name}: NaN"


def is_valid_row(config: DispatcherConfig, output: DispatchOutput) -> torch.Tensor:
    """bool: which rows of recv_x a token fills; ``[L, R*A]`` or ``[R*A]``."""
    if config.layout is EXPERT_MAJOR:
        rows = torch.arange(output.recv_x.shape[1], device=output.recv_x.device)
        return rows < output.num_recv_tokens_per_expert[:, None]
    return (output.recv_topk_ids != config.padding_expert_id).any(dim=1)


def is_read_row(config: DispatcherConfig, output: DispatchOutput) -> torch.Tensor:
    """bool: which rows of expert_output combine reads."""
    if config.layout is not EXPERT_MAJOR and config.combine_mode is CombineMode.DIRECT_SEND:
        return output.recv_topk_ids != config.padding_expert_id
    return is_valid_row(config, output)


def check_dispatch(
    config: DispatcherConfig,
    output: DispatchOutput,
    batches: list[TokenBatch],
    rank: int,
    active: int | None,
    *,
    unused_fill: float | None = None,
) -> None:
    """C1: rows in their exact order, counts, offsets, ids, weights and padding.

    Args:
        unused_fill: the value that rows without a token must still hold; None does not look at them.
    """
    expected = reference.dispatch_to_rank(config, batches, rank, active_tokens_per_rank=active)
    assert output.layout is expected.layout
    for field in ("num_tokens_per_rank", "num_recv_tokens_per_expert", "src_offsets", "recv_topk_ids"):
        values, wanted = getattr(output, field), getattr(expected, field)
        assert (values is None) == (wanted is None), f"{field} is {values}"
        if wanted is not None:
            assert_equal(field, values, wanted)
    is_valid = is_valid_row(config, expected)
    assert_equal("recv_x, valid rows", output.recv_x.cpu()[is_valid], expected.recv_x[is_valid])
    assert output.recv_x.shape == expected.recv_x.shape
    if unused_fill is not None:
        unused = output.recv_x.cpu()[~is_valid]
        assert bool((unused == unused_fill).all()), "recv_x: rows beyond the valid ones were written"
    weights, wanted = output.recv_topk_weights, expected.recv_topk_weights
    assert (weights is None) == (wanted is None)
    if config.layout is EXPERT_MAJOR and weights is not None:
        weights, wanted = weights.cpu()[is_valid], wanted[is_valid]
    if weights is not None:
        assert_equal("recv_topk_weights", weights, wanted)


def place_x(x: torch.Tensor, x_form: str, device: torch.device) -> tuple[torch.Tensor, Guarded]:
    """x on the device in one of the forms of Case.x_form, and the memory it lies in."""
    num_tokens, hidden = x.shape
    if x_form == "contiguous":
        memory = Guarded("x", (num_tokens, hidden), x.dtype, device)
        view = memory.tensor
    elif x_form == "row_stride":
        memory = Guarded("x", (2 * num_tokens, hidden), x.dtype, device)
        view = memory.tensor[::2]
    elif x_form == "column_slice":
        memory = Guarded("x", (num_tokens, 2 * hidden), x.dtype, device)
        view = memory.tensor[:, :hidden]
    elif x_form == "transposed":
        memory = Guarded("x", (hidden, num_tokens), x.dtype, device)
        view = memory.tensor.t()
    elif x_form == "unaligned":  # rows start 2 or 4 bytes after a 16-byte boundary
        memory = Guarded("x", (num_tokens * hidden + 1,), x.dtype, device)
        view = memory.tensor[1:].view(num_tokens, hidden)
    else:
        raise ValueError(f"x_form is {x_form!r}")
    view.copy_(x)
    return view, memory


@dataclasses.dataclass(kw_only=True)
class RoundTrip:
    """One dispatch and its combine on one rank, checked at each step; call the steps in order.

    After each launch the inputs are overwritten, since the dispatcher must not read them later.
    """

    context: Rank
    dispatcher: Dispatcher
    batches: list[TokenBatch]
    active: int | None = None
    x_form: str = "contiguous"
    is_split: bool = False
    is_in_place: bool = False
    unused_fill: float | None = None
    checks_float64: bool = False
    handle: DispatchHandle | None = None
    output: DispatchOutput | None = None

    @property
    def batch(self) -> TokenBatch:
        return self.batches[self.context.rank]

    def dispatch(self) -> None:
        """Sends; unless split, also receives."""
        device = self.dispatcher.device
        x, x_memory = place_x(self.batch.x, self.x_form, device)
        ids = Guarded.copy_of("topk_ids", self.batch.topk_ids, device)
        guards = [x_memory, ids]
        weights = None
        if self.batch.topk_weights is not None:
            guards.append(Guarded.copy_of("topk_weights", self.batch.topk_weights, device))
            weights = guards[-1].tensor
        inputs = (x, ids.tensor, weights)
        if self.is_split:
            self.handle = self.dispatcher.dispatch_send(*inputs, active_tokens_per_rank=self.active)
        else:
            self.output, self.handle = self.dispatcher.dispatch(*inputs, active_tokens_per_rank=self.active)
        assert_equal("x after dispatch", x, self.batch.x)
        assert_equal("topk_ids after dispatch", ids.tensor, self.batch.topk_ids)
        for guard in guards:
            guard.check()
        x.fill_(float("nan"))
        ids.tensor.fill_(0)
        if weights is not None:
            weights.fill_(float("nan"))

    def receive(self) -> None:
        """Receives, if split; checks what arrived."""
        if self.is_split:
            self.output = self.dispatcher.dispatch_recv(self.handle)
        self.dispatcher.synchronize()
        check_dispatch(
            self.dispatcher.config,
            self.output,
            self.batches,
            self.context.rank,
            self.active,
            unused_fill=self.unused_fill,
        )

    def combine(self, experts: ScalingExperts, fill: float | None = None) -> torch.Tensor:
        """Runs the experts, combines and checks the result.

        Args:
            fill: written to all of recv_x before combine, to find stray writes of the next dispatch.
        """
        config, device = self.dispatcher.config, self.dispatcher.device
        rows = experts(self.output)
        # Rows that combine has no business with are NaN, so that reading one shows.
        is_read = is_read_row(config, self.output)
        rows = torch.where(is_read[..., None], rows, float("nan")).to(rows.dtype)
        if self.is_in_place:
            expert_output, guards = self.dispatcher.expert_output_buffer(self.handle), []
            expert_output.copy_(rows)
        else:
            guards = [Guarded.copy_of("expert_output", rows, device)]
            expert_output = guards[0].tensor
        if fill is not None:
            self.output.recv_x.fill_(fill)
        guards.append(Guarded("out", (self.batch.num_tokens, config.hidden), config.payload.dtype, device))
        out = guards[-1].tensor
        if self.is_split:
            self.dispatcher.combine_send(expert_output, self.handle, out)
            if not self.is_in_place:
                expert_output.fill_(float("nan"))
            returned = self.dispatcher.combine_recv(self.handle)
        else:
            returned = self.dispatcher.combine(expert_output, self.handle, out)
        self.dispatcher.synchronize()
        assert returned.data_ptr() == out.data_ptr()
        assert_equal("out", out, reference.round_trip(config, self.context.num_ranks, self.batch))
        if self.checks_float64:
            assert_close_to_float64("out", out, config, self.batch)
        for guard in guards:
            guard.check()
        return out


def run_round(
    context: Rank, dispatcher: Dispatcher, batches: list[TokenBatch], active: int | None = None
) -> torch.Tensor:
    """One whole checked round trip; this rank's result."""
    trip = RoundTrip(context=context, dispatcher=dispatcher, batches=batches, active=active)
    trip.dispatch()
    trip.receive()
    return trip.combine(ScalingExperts(dispatcher.config, dispatcher.local_experts, dispatcher.device))


def run_rounds(
    context: Rank, config: DispatcherConfig, rounds: list[list[TokenBatch]], active: int | None = None
) -> None:
    """Checked round trips on explicit tokens, ``rounds[i][rank]``, on one dispatcher."""
    with context.dispatcher(config) as dispatcher:
        for batches in rounds:
            run_round(context, dispatcher, batches, active)


def run_unsynchronized(
    context: Rank,
    config: DispatcherConfig,
    rounds: list[TokenBatch],
    before_combine: Callable[[int], None] = lambda round_idx: None,
) -> None:
    """This rank's rounds one after another; the host looks at the results only after the last.

    Args:
        rounds: this rank's tokens of each round.
        before_combine: called with the round's number.
    """
    with context.dispatcher(config) as dispatcher:
        experts = ScalingExperts(config, dispatcher.local_experts, dispatcher.device)
        outs = []
        for round_idx, batch in enumerate(rounds):
            output, handle = dispatcher.dispatch(*to_device(batch, dispatcher.device))
            rows = experts(output)
            before_combine(round_idx)
            outs.append(dispatcher.combine(rows, handle))
        dispatcher.synchronize()
        for round_idx, (out, batch) in enumerate(zip(outs, rounds, strict=True)):
            assert_equal(f"out of round {round_idx}", out, reference.round_trip(config, context.num_ranks, batch))


def to_device(batch: TokenBatch, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The arguments of dispatch."""
    weights = None if batch.topk_weights is None else batch.topk_weights.to(device)
    return batch.x.to(device), batch.topk_ids.to(device), weights


def run_case(context: Rank, case: Case) -> None:
    """All rounds of a case on one dispatcher."""
    with context.dispatcher(case.config()) as dispatcher:
        experts = ScalingExperts(dispatcher.config, dispatcher.local_experts, dispatcher.device)
        fill = None
        for first in range(0, case.num_rounds, case.num_in_flight):
            trips = [
                RoundTrip(
                    context=context,
                    dispatcher=dispatcher,
                    batches=case.batches(first + i),
                    active=case.active,
                    x_form=case.x_form,
                    is_split=case.is_split,
                    is_in_place=case.is_in_place,
                    unused_fill=fill,
                    checks_float64=case.data == "normal",
                )
                for i in range(min(case.num_in_flight, case.num_rounds - first))
            ]
            for trip in trips:
                trip.dispatch()
            for trip in trips:
                trip.receive()
            fill = -37.0 - first % 64
            for trip in trips:
                trip.combine(experts, fill)
