# Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
"""From the router to the experts and back, for one mixture-of-experts layer.

``DispatcherExchange`` is what an inference engine does on each rank: dispatch, experts, combine.
``ReferenceExchange`` holds all ranks in one process and moves rows with the package's reference.
``EmptyExchange`` moves nothing. All run ``run_experts`` on tensors of the same shapes, so their
arithmetic is equal bit for bit.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Protocol

import torch

from mscclpp_dispatcher import reference
from mscclpp_dispatcher.api import Dispatcher
from mscclpp_dispatcher.config import CombineMode, DispatcherConfig, DispatchLayout
from mscclpp_dispatcher.demo.model import Experts, MoeTransformer
from mscclpp_dispatcher.types import DispatchOutput

PHASES = ("dispatch", "experts", "combine")

Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Rows (bfloat16 ``[T, H]``), expert ids (int64 ``[T, K]``) and weights (float32 ``[T, K]``) of a rank."""


class Exchange(Protocol):
    """Takes the routed rows of each rank in this process and returns their sums, bfloat16 ``[T, H]`` each."""

    def __call__(self, layer_idx: int, routed: list[Routed]) -> list[torch.Tensor]: ...


def run_experts(
    experts: Experts, config: DispatcherConfig, recv: DispatchOutput, out: torch.Tensor | None = None
) -> torch.Tensor:
    """All of a rank's experts on what it received, in the shape that ``combine`` takes.

    Args:
        out: buffer of that shape to write to; None allocates.
    """
    if config.layout is DispatchLayout.EXPERT_MAJOR:
        return experts(recv.recv_x, out=out)
    # RANK_MAJOR: every expert runs on every row, and the routes pick theirs. A production runner sorts rows instead.
    num_experts, hidden = experts.w_in.shape[:2]
    rows = experts(recv.recv_x.expand(num_experts, -1, -1)).transpose(0, 1)  # [R*A, L, H]
    is_route = recv.recv_topk_ids >= 0
    index = recv.recv_topk_ids.clamp(min=0).long()[:, :, None].expand(-1, -1, hidden)
    if config.combine_mode is CombineMode.DIRECT_SEND:
        return torch.gather(rows, 1, index, out=out)
    routes = torch.gather(rows, 1, index).float() * recv.recv_topk_weights[:, :, None]
    routes = torch.where(is_route[:, :, None], routes, 0.0)
    total = routes[:, 0]
    for route_idx in range(1, routes.shape[1]):
        total = total + routes[:, route_idx]
    return total.to(recv.recv_x.dtype) if out is None else out.copy_(total)


class PhaseTimer:
    """Durations by phase, in seconds: host clock on the CPU, CUDA events on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._seconds: dict[str, list[float]] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        if self._is_cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
            self._events.append((phase, begin, end))
        else:
            start = time.perf_counter()
            yield
            self._seconds.setdefault(phase, []).append(time.perf_counter() - start)

    def seconds(self) -> dict[str, list[float]]:
        """All durations so far; waits for the GPU."""
        if self._events:
            torch.cuda.synchronize()
            for phase, begin, end in self._events:
                self._seconds.setdefault(phase, []).append(begin.elapsed_time(end) * 1e-3)
            self._events.clear()
        return self._seconds


class DispatcherExchange:
    """This rank's part, through one dispatcher that all layers share.

    Attributes:
        timer: set to measure the phases of each call; None while a CUDA graph is captured.
    """

    def __init__(self, dispatcher: Dispatcher, model: MoeTransformer) -> None:
        self._dispatcher = dispatcher
        self._experts = [block.experts for block in model.blocks]
        self.timer: PhaseTimer | None = None

    def __call__(self, layer_idx: int, routed: list[Routed]) -> list[torch.Tensor]:
        config = self._dispatcher.config
        phase = self.timer or (lambda _: contextlib.nullcontext())
        (x, topk_ids, topk_weights) = routed[0]
        with phase("dispatch"):
            recv, handle = self._dispatcher.dispatch(x, topk_ids, topk_weights)
        with phase("experts"):
            # With DIRECT_SEND the peers read this buffer: experts that write there save combine a copy.
            is_direct = config.combine_mode is CombineMode.DIRECT_SEND
            out = self._dispatcher.expert_output_buffer(handle) if is_direct else None
            expert_output = run_experts(self._experts[layer_idx], config, recv, out)
        with phase("combine"):
            return [self._dispatcher.combine(expert_output, handle)]


class EmptyExchange:
    """This rank's experts on what it would receive if no rank had tokens; nothing is exchanged."""

    def __init__(self, dispatcher: Dispatcher, model: MoeTransformer) -> None:
        self._config, self._rank, self._num_ranks = dispatcher.config, dispatcher.rank, dispatcher.num_ranks
        self._experts = [block.experts for block in model.blocks]

    def __call__(self, layer_idx: int, routed: list[Routed]) -> list[torch.Tensor]:
        no_tokens = reference.TokenBatch(*(tensor[:0] for tensor in routed[0]))
        recv = reference.dispatch_to_rank(self._config, [no_tokens] * self._num_ranks, self._rank)
        run_experts(self._experts[layer_idx], self._config, recv)
        return [torch.zeros_like(routed[0][0])]


class ReferenceExchange:
    """All ranks in one process, with the package's definition of dispatch and combine between them."""

    def __init__(self, config: DispatcherConfig, models: list[MoeTransformer]) -> None:
        self._config = config
        self._models = models

    def __call__(self, layer_idx: int, routed: list[Routed]) -> list[torch.Tensor]:
        batches = [reference.TokenBatch(*rank_routed) for rank_routed in routed]
        received = reference.dispatch(self._config, batches)
        expert_outputs = [
            run_experts(model.blocks[layer_idx].experts, self._config, recv)
            for model, recv in zip(self._models, received, strict=True)
        ]
        return reference.combine(self._config, batches, expert_outputs)
