# Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
"""Round trips on static tensors, to be captured once and replayed on new contents; these run on the ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import checks
import torch
from cases import exact_weights, random_exact_rows
from launcher import Rank

from mscclpp_dispatcher import Dispatcher, DispatcherConfig, DispatchHandle, DispatchOutput, reference
from mscclpp_dispatcher.reference import ScalingExperts, TokenBatch

SLEEP_CYCLES = 2_000_000  # about a millisecond: far more than a round trip takes


def make_batch(config: DispatcherConfig, num_tokens: int, num_live: int, *seeds: int) -> TokenBatch:
    """Exact random tokens, of which those from ``num_live`` on are padding (all -1); on the CPU."""
    seed = 0
    for part in seeds:
        seed = seed * 1009 + part
    generator = torch.Generator().manual_seed(seed)
    x = random_exact_rows(num_tokens, config.hidden, generator).to(config.payload.dtype)
    order = torch.rand((num_tokens, config.num_experts), generator=generator).argsort(dim=1)
    ids = order[:, : config.num_topk].clone()
    ids[torch.rand(ids.shape, generator=generator) < 0.2] = -1
    ids[num_live:] = -1
    weights = exact_weights(num_tokens, config.num_topk)
    return TokenBatch(x, ids, weights[torch.randperm(num_tokens, generator=generator)])


class StaticTrips:
    """Several round trips after one another, each on static tensors of its own.

    Args:
        tokens_per_rank: of all ranks, in every trip.
        num_trips: round trips of one launch.
        active: active_tokens_per_rank; None for the capacity.
        num_in_flight: dispatches before the first combine.
        is_split, is_in_place: see cases.Case.
    """

    def __init__(
        self,
        context: Rank,
        dispatcher: Dispatcher,
        tokens_per_rank: tuple[int, ...],
        num_trips: int,
        *,
        active: int | None = None,
        num_in_flight: int = 1,
        is_split: bool = False,
        is_in_place: bool = False,
    ) -> None:
        self._context, self._dispatcher = context, dispatcher
        self._config, self._device = dispatcher.config, dispatcher.device
        self._tokens_per_rank = tokens_per_rank
        self._num_trips, self._active, self._num_in_flight = num_trips, active, num_in_flight
        self._is_split, self._is_in_place = is_split, is_in_place
        self._experts = ScalingExperts(self._config, dispatcher.local_experts, self._device)
        self._batches: list[list[TokenBatch]] = []
        self._seen: list[DispatchOutput | None] = [None] * num_trips
        num_tokens = tokens_per_rank[context.rank]
        shape = (num_tokens, self._config.num_topk)
        self.inputs = [
            TokenBatch(
                torch.zeros((num_tokens, self._config.hidden), dtype=self._config.payload.dtype, device=self._device),
                torch.zeros(shape, dtype=torch.int64, device=self._device),
                torch.zeros(shape, dtype=torch.float32, device=self._device),
            )
            for _ in range(num_trips)
        ]
        self.outs = [torch.full_like(batch.x, float("nan")) for batch in self.inputs]

    def load(self, *seeds: int, num_live: Callable[[int, int], int] | None = None) -> None:
        """Writes new tokens and routes to the static tensors.

        Args:
            num_live: ``(rank, trip) -> tokens that are not padding``; None draws them from the seeds.
        """
        self._batches = []
        for trip_idx in range(self._num_trips):
            batches = []
            for rank, num_tokens in enumerate(self._tokens_per_rank):
                if num_live is None:
                    live = hash((*seeds, trip_idx, rank)) % (num_tokens + 1)
                else:
                    live = num_live(rank, trip_idx)
                batches.append(make_batch(self._config, num_tokens, live, *seeds, trip_idx, rank))
            self._batches.append(batches)
        for static, batches in zip(self.inputs, self._batches, strict=True):
            self.write(static, batches[self._context.rank])
        for out in self.outs:
            out.fill_(float("nan"))

    def set_batches(self, batches: list[TokenBatch]) -> None:
        """Writes explicit tokens, one batch per rank, to the only trip."""
        self._batches = [batches]
        self.write(self.inputs[0], batches[self._context.rank])
        self.outs[0].fill_(float("nan"))

    @staticmethod
    def write(static: TokenBatch, batch: TokenBatch) -> None:
        static.x.copy_(batch.x)
        static.topk_ids.copy_(batch.topk_ids)
        static.topk_weights.copy_(batch.weights)

    def launch(self) -> None:
        """All trips, eagerly or under capture. Collective."""
        for first in range(0, self._num_trips, self._num_in_flight):
            trips = range(first, min(first + self._num_in_flight, self._num_trips))
            sent = [self._dispatch(self.inputs[trip_idx]) for trip_idx in trips]
            for trip_idx, (output, handle) in zip(trips, sent, strict=True):
                if output is None:
                    output = self._dispatcher.dispatch_recv(handle)
                self._keep(trip_idx, output)
                buffer = self._dispatcher.expert_output_buffer(handle) if self._is_in_place else None
                rows = self._experts(output, out=buffer)
                if self._is_split:
                    self._dispatcher.combine_send(rows, handle, self.outs[trip_idx])
                    self._dispatcher.combine_recv(handle)
                else:
                    self._dispatcher.combine(rows, handle, self.outs[trip_idx])

    def _dispatch(self, batch: TokenBatch) -> tuple[DispatchOutput | None, DispatchHandle]:
        """Sends a trip's tokens; the output is still to be received if split."""
        arguments = (batch.x, batch.topk_ids, batch.topk_weights)
        if self._is_split:
            return None, self._dispatcher.dispatch_send(*arguments, active_tokens_per_rank=self._active)
        return self._dispatcher.dispatch(*arguments, active_tokens_per_rank=self._active)

    def _keep(self, trip_idx: int, output: DispatchOutput) -> None:
        """Copies what arrived to tensors of this trip, since the next dispatch overwrites it."""
        fields = {
            field.name: getattr(output, field.name)
            for field in dataclasses.fields(output)
            if isinstance(getattr(output, field.name), torch.Tensor)
        }
        if self._seen[trip_idx] is None:  # the first launch is eager, so that captures find the tensors
            copies = {name: torch.empty_like(tensor) for name, tensor in fields.items()}
            self._seen[trip_idx] = DispatchOutput(output.layout, **{"recv_topk_ids": None, **copies})
        for name, tensor in fields.items():
            getattr(self._seen[trip_idx], name).copy_(tensor)

    def check(self) -> None:
        """Waits, and compares every trip of the last launch with the reference."""
        self._dispatcher.synchronize()
        for trip_idx, batches in enumerate(self._batches):
            rank = self._context.rank
            checks.check_dispatch(self._config, self._seen[trip_idx], batches, rank, self._active)
            expected = reference.round_trip(self._config, self._context.num_ranks, batches[rank])
            checks.assert_equal(f"out of trip {trip_idx}", self.outs[trip_idx], expected)

    def num_received_rows(self) -> int:
        """Valid rows of the first trip's dispatch."""
        return int(checks.is_valid_row(self._config, self._seen[0]).sum())

    def record(self) -> Callable[[], None]:
        """Launches once (collective), captures the trips and returns the replay."""
        self.load(0)
        self.launch()
        self.check()
        if self._device.type != "cuda":  # nothing to capture: for trying a schedule out without a GPU
            return self.launch
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            self.launch()
        return graph.replay


def delay(context: Rank, turn: int, cycles: int = SLEEP_CYCLES) -> None:
    """Holds up the stream of the rank whose turn it is."""
    if turn % context.num_ranks == context.rank and context.device.type == "cuda":
        torch.cuda._sleep(cycles)
