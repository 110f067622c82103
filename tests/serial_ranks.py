# Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
"""Many ranks in one process and one stream, their halves in turn.

Send halves in rank order wait only for lower ranks, so no two launches need to run at once: any
number of ranks fits on one device, and tools that run one kernel at a time (compute-sanitizer) work.
"""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist

from mscclpp_dispatcher import DispatcherConfig, DispatchOutput, StoreGroup
from mscclpp_dispatcher.bootstrap import Bootstrap
from mscclpp_dispatcher.engines.ll import LlEngine
from mscclpp_dispatcher.types import DispatchHandle


class _PlainRegions:
    """Every rank's region as an ordinary tensor of this process."""

    def __init__(self, tensors: list[torch.Tensor], rank: int) -> None:
        self.local = tensors[rank]
        self.addresses = [tensor.data_ptr() for tensor in tensors]

    def close(self) -> None:
        self.local = None


class SerialRanks:
    """The engines of all ranks; their operations take and give lists in rank order."""

    def __init__(self, config: DispatcherConfig, num_ranks: int, device: str) -> None:
        self.config, self.num_ranks, self.device = config, num_ranks, torch.device(device)
        store = dist.HashStore()
        tensors: list[torch.Tensor | None] = [None] * num_ranks
        engines: list[LlEngine | None] = [None] * num_ranks
        failures: list[BaseException] = []
        all_allocated = threading.Barrier(num_ranks)

        def make(rank: int) -> None:
            def make_regions(_: Bootstrap, num_bytes: int, device: torch.device) -> _PlainRegions:
                # Regions start on 256-byte lines; torch's CPU allocator promises 64.
                memory = torch.zeros(num_bytes + 256, dtype=torch.uint8, device=device)
                start = -memory.data_ptr() % 256
                tensors[rank] = memory[start : start + num_bytes]
                if device.type == "cuda":
                    torch.cuda.synchronize()
                all_allocated.wait(60)
                return _PlainRegions(tensors, rank)

            try:
                bootstrap = Bootstrap(StoreGroup(store, rank, num_ranks), 60)
                engines[rank] = LlEngine(config, bootstrap, self.device, make_regions)
            except BaseException as failure:  # noqa: BLE001 - handed to the caller's thread below
                failures.append(failure)
                all_allocated.abort()

        threads = [threading.Thread(target=make, args=(rank,)) for rank in range(num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        self.engines = engines
        self._epoch = 0

    def dispatch(
        self,
        xs: list[torch.Tensor],
        topk_ids: list[torch.Tensor],
        topk_weights: list[torch.Tensor | None],
        active_tokens_per_rank: int | None = None,
    ) -> tuple[list[DispatchOutput], list[DispatchHandle]]:
        self._epoch += 1
        active = active_tokens_per_rank or self.config.max_tokens_per_rank
        handles = [DispatchHandle(0, 0, self._epoch, x.shape[0], active) for x in xs]
        for engine, handle, x, ids, weights in zip(self.engines, handles, xs, topk_ids, topk_weights, strict=True):
            engine.dispatch_send(handle, x, ids, weights, and_recv=False)
        for engine, handle in zip(self.engines, handles, strict=True):
            engine.dispatch_recv(handle)
        return [engine.output(handle) for engine, handle in zip(self.engines, handles, strict=True)], handles

    def combine(self, expert_outputs: list[torch.Tensor], handles: list[DispatchHandle]) -> list[torch.Tensor]:
        outs = [
            torch.full(
                (handle.num_tokens, self.config.hidden),
                float("nan"),
                dtype=self.config.payload.dtype,
                device=self.device,
            )
            for handle in handles
        ]
        for engine, handle, rows, out in zip(self.engines, handles, expert_outputs, outs, strict=True):
            engine.combine_send(handle, rows, out, and_recv=False)
        for engine, handle, out in zip(self.engines, handles, outs, strict=True):
            engine.combine_recv(handle, out)
        for engine in self.engines:
            engine.synchronize()
        return outs

    def close(self) -> None:
        for engine in self.engines:
            engine.destroy()
