# Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
"""The low-latency engine: hands tensors to the C++ MoELowLatencyRuntime, on CPU or CUDA memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Protocol

import torch

from mscclpp_dispatcher import _C, env
from mscclpp_dispatcher.bootstrap import Bootstrap, ProcessIdentity
from mscclpp_dispatcher.config import (
    CombineMode,
    CopyPath,
    DispatcherConfig,
    DispatchLayout,
    ExpertIdSpace,
    WeightMode,
)
from mscclpp_dispatcher.engine import Capabilities
from mscclpp_dispatcher.engines.placement import GpuPlace, choose_num_blocks, ranks_on_gpu
from mscclpp_dispatcher.engines.shm_regions import ShmRegions
from mscclpp_dispatcher.engines.symmetric_regions import SymmetricRegions
from mscclpp_dispatcher.errors import ConfigError, InputError, PeerTimeoutError
from mscclpp_dispatcher.types import DispatchHandle, DispatchOutput
from mscclpp_dispatcher.validation import bad_id_message, expert_output_shape

_TMA_CAPABILITY = (9, 0)


class Regions(Protocol):
    """The ranks' memory: what ShmRegions and SymmetricRegions give."""

    local: torch.Tensor
    addresses: list[int]

    def close(self) -> None:
        """Drops the mappings."""


def _default_regions(bootstrap: Bootstrap, num_bytes: int, device: torch.device) -> Regions:
    return SymmetricRegions(bootstrap, num_bytes, device) if device.type == "cuda" else ShmRegions(bootstrap, num_bytes)


class LlEngine:
    """Implements ``engine.Engine``; making it is collective.

    Args:
        config, bootstrap, device: as the Dispatcher's.
        make_regions: gives every rank's memory, mapped here: ``(bootstrap, num_bytes, device)``; the
            seam for other ways to reach peers.
    """

    def __init__(
        self,
        config: DispatcherConfig,
        bootstrap: Bootstrap,
        device: torch.device,
        make_regions: Callable[[Bootstrap, int, torch.device], Regions] = _default_regions,
    ) -> None:
        self.config = config
        self.rank, self.num_ranks, self.device = bootstrap.rank, bootstrap.num_ranks, device
        self._bootstrap = bootstrap
        self._is_cuda = device.type == "cuda"
        self.capabilities = Capabilities(
            name="cuda" if self._is_cuda else "cpu",
            device_type=device.type,
            is_capturable=self._is_cuda,
            checks_ids=config.check_ids or not self._is_cuda,
        )
        num_blocks = self._agree_on_placement()
        self._runtime = self._make_runtime(num_blocks[self.rank])
        self._layout = self._runtime.layout
        self._num_local_experts = self._runtime.num_local_experts
        num_bytes = self._layout["total_bytes"]
        self._regions = make_regions(bootstrap, num_bytes, device)
        self._runtime.connect(self._regions.addresses, num_blocks)
        bootstrap.barrier("connect")
        self._outputs: dict[tuple[int, int], DispatchOutput] = {}
        self._expert_outputs: dict[tuple[int, int], torch.Tensor] = {}

    # ------------------------------------------------------------------ creation

    def _agree_on_placement(self) -> list[int]:
        """Each rank's number of blocks; checks that the ranks' devices go together."""
        identity = ProcessIdentity.of_this_process()
        placement = {"identity": dataclasses.asdict(identity), "engine": self.capabilities.name}
        error = None
        if self._is_cuda:
            if not _C.has_cuda:
                error = "this build has no CUDA engine (nvcc was not found when it was built); pass device='cpu'"
            elif torch.cuda.is_current_stream_capturing():
                error = "a dispatcher cannot be made inside a CUDA graph capture; make it before"
            else:
                placement["device"] = str(torch.cuda.get_device_properties(self.device).uuid)
                placement["num_sms"] = _C.cuda_device_traits(self.device.index)["num_sms"]
        answers = self._bootstrap.agree("placement", placement, error)
        engines = [answer["engine"] for answer in answers]
        if len(set(engines)) > 1:
            raise ConfigError(f"the ranks' devices differ: {dict(enumerate(engines))}; give all the same kind")
        self._peers = [ProcessIdentity(**answer["identity"]) for answer in answers]
        if not self._is_cuda:
            return [1] * self.num_ranks
        places = [GpuPlace(answer["identity"]["host"], answer["device"], answer["num_sms"]) for answer in answers]
        num_blocks = choose_num_blocks(self.config, places)
        if len(ranks_on_gpu(places, self.rank)) > 1:
            env.allow_overlapping_devices()
        return num_blocks

    def _make_runtime(self, num_blocks: int):
        config = self.config
        settings = _C.RuntimeConfig()
        settings.rank, settings.num_ranks = self.rank, self.num_ranks
        settings.num_experts, settings.num_topk = config.num_experts, config.num_topk
        settings.hidden, settings.row_bytes = config.hidden, config.row_bytes
        settings.max_tokens_per_rank, settings.num_slots = config.max_tokens_per_rank, config.num_slots
        settings.num_blocks = num_blocks
        settings.padding_expert_id = config.padding_expert_id
        settings.layout = getattr(_C.DispatchLayout, config.layout.name)
        settings.combine_mode = getattr(_C.CombineMode, config.combine_mode.name)
        settings.weight_mode = getattr(_C.WeightMode, config.weight_mode.name)
        settings.payload = getattr(_C.Payload, config.payload.name)
        settings.is_global_id_space = config.recv_id_space is ExpertIdSpace.GLOBAL
        settings.first_epoch = config.first_epoch
        settings.timeout_ns = round(config.timeout_s * 1e9)
        settings.stress_delay_ns = env.stress_delay_ns()
        settings.expert_rank = list(config.owners(self.num_ranks))
        if not self._is_cuda:
            return _C.MoELowLatencyRuntime.on_cpu(settings)
        capability = _C.cuda_device_traits(self.device.index)["compute_capability"]
        is_tma = config.copy_path is CopyPath.TMA or (
            config.copy_path is CopyPath.AUTO and capability >= _TMA_CAPABILITY
        )
        if is_tma and capability < _TMA_CAPABILITY:
            raise ConfigError(
                f"copy_path is TMA, but GPU {self.device} has compute capability {capability[0]}.{capability[1]}; "
                f"allowed: TMA from {_TMA_CAPABILITY[0]}.{_TMA_CAPABILITY[1]}, else PLAIN or AUTO"
            )
        return _C.MoELowLatencyRuntime.on_cuda(settings, self.device.index, is_tma)

    # ------------------------------------------------------------------ operations

    def dispatch_send(
        self,
        handle: DispatchHandle,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None,
        *,
        and_recv: bool,
    ) -> None:
        self._runtime.dispatch(
            _C.SEND | _C.RECV if and_recv else _C.SEND,
            handle.slot,
            handle.num_tokens,
            handle.active_tokens_per_rank,
            x.data_ptr(),
            x.stride(0) * x.element_size() if handle.num_tokens > 1 else self.config.row_bytes,
            topk_ids.data_ptr(),
            topk_ids.element_size(),
            0 if topk_weights is None else topk_weights.data_ptr(),
            self._stream(),
        )
        self._after_launch(handle, is_dispatched=and_recv)

    def dispatch_recv(self, handle: DispatchHandle) -> None:
        self._runtime.dispatch(
            _C.RECV, handle.slot, handle.num_tokens, handle.active_tokens_per_rank, 0, 0, 0, 8, 0, self._stream()
        )
        self._after_launch(handle, is_dispatched=True)

    def combine_send(
        self, handle: DispatchHandle, expert_output: torch.Tensor, out: torch.Tensor, *, and_recv: bool
    ) -> None:
        self._combine(_C.SEND | _C.RECV if and_recv else _C.SEND, handle, expert_output, out)

    def combine_recv(self, handle: DispatchHandle, out: torch.Tensor) -> None:
        self._combine(_C.RECV, handle, None, out)

    def _combine(self, halves: int, handle: DispatchHandle, expert_output: torch.Tensor | None, out: torch.Tensor):
        address = 0 if expert_output is None else expert_output.data_ptr()
        # With a local reduction of EXPERT_MAJOR rows the peers read the sums, never expert_output itself.
        is_in_place = not self._has_partial_sums and address == self.expert_output_buffer(handle).data_ptr()
        self._runtime.combine(
            halves,
            handle.slot,
            handle.num_tokens,
            handle.active_tokens_per_rank,
            is_in_place,
            address,
            out.data_ptr(),
            self._stream(),
        )
        self._after_launch(handle, is_dispatched=False)

    def _after_launch(self, handle: DispatchHandle, *, is_dispatched: bool) -> None:
        if self._is_cuda:
            return  # faults of launches show at the next call
        if is_dispatched and self._runtime.has_faults:
            report = self._runtime.take_faults()
            if report.has_active_mismatch:
                # All ranks see it: they end the round together, without its rows.
                self._runtime.abandon(handle.slot, handle.active_tokens_per_rank, 0)
                self._raise_mismatch(report, handle.active_tokens_per_rank)
        self.raise_on_fault()

    def abandon(self, handle: DispatchHandle) -> None:
        """Ends a dispatch without its combine. Collective."""
        self._runtime.abandon(handle.slot, handle.active_tokens_per_rank, self._stream())
        self._after_launch(handle, is_dispatched=False)

    def _stream(self) -> int:
        return torch.cuda.current_stream(self.device).cuda_stream if self._is_cuda else 0

    # ------------------------------------------------------------------ views

    @property
    def _has_partial_sums(self) -> bool:
        return (
            self.config.layout is DispatchLayout.EXPERT_MAJOR and self.config.combine_mode is CombineMode.LOCAL_REDUCE
        )

    def _view(self, slot: int, field: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        start = self._layout["slots"] + slot * self._layout["slot_bytes"] + self._layout[field]
        num_bytes = math.prod(shape) * dtype.itemsize
        return self._regions.local[start : start + num_bytes].view(dtype).view(shape)

    def output(self, handle: DispatchHandle) -> DispatchOutput:
        key = (handle.slot, handle.active_tokens_per_rank)
        if key not in self._outputs:
            self._outputs[key] = self._make_output(*key)
        return self._outputs[key]

    def _make_output(self, slot: int, active: int) -> DispatchOutput:
        config, num_experts = self.config, self._num_local_experts
        rows = self.num_ranks * active
        num_tokens_per_rank = self._view(slot, "num_tokens_per_rank", torch.int32, (self.num_ranks,))
        if config.layout is DispatchLayout.RANK_MAJOR:
            return DispatchOutput(
                layout=config.layout,
                recv_x=self._view(slot, "recv_x", config.payload.dtype, (rows, config.hidden)),
                num_tokens_per_rank=num_tokens_per_rank,
                recv_topk_ids=self._view(slot, "recv_topk_ids", torch.int32, (rows, config.num_topk)),
                recv_topk_weights=self._view(slot, "recv_topk_weights", torch.float32, (rows, config.num_topk)),
            )
        weights = None
        if config.weight_mode is WeightMode.IN_RUNNER:
            weights = self._view(slot, "recv_topk_weights", torch.float32, (num_experts, rows))
        return DispatchOutput(
            layout=config.layout,
            recv_x=self._view(slot, "recv_x", config.payload.dtype, (num_experts, rows, config.hidden)),
            num_tokens_per_rank=num_tokens_per_rank,
            num_recv_tokens_per_expert=self._view(slot, "num_recv_tokens_per_expert", torch.int32, (num_experts,)),
            src_offsets=self._view(slot, "src_offsets", torch.int32, (num_experts, self.num_ranks + 1)),
            recv_topk_weights=weights,
        )

    def expert_output_buffer(self, handle: DispatchHandle) -> torch.Tensor:
        key = (handle.slot, handle.active_tokens_per_rank)
        if key not in self._expert_outputs:
            shape = expert_output_shape(self.config, self.num_ranks, self._num_local_experts, key[1])
            # A local reduction of EXPERT_MAJOR rows reads any memory, so a plain tensor serves.
            self._expert_outputs[key] = (
                torch.empty(shape, dtype=self.config.payload.dtype, device=self.device)
                if self._has_partial_sums
                else self._view(key[0], "expert_output", self.config.payload.dtype, shape)
            )
        return self._expert_outputs[key]

    def buffer_sizes(self) -> dict[str, int]:
        layout, config = self._layout, self.config
        per_slot = {
            "recv_x": layout["recv_rows"] * config.row_bytes,
            "recv_topk_ids": layout["recv_ids"] * 4,
            "recv_topk_weights": layout["recv_weights"] * 4,
            "expert_output": layout["expert_output_rows"] * config.row_bytes,
        }
        sizes = {name: num_bytes * config.num_slots for name, num_bytes in per_slot.items()}
        sizes["control"] = layout["total_bytes"] - sum(sizes.values())
        sizes["total"] = layout["total_bytes"]
        return sizes

    # ------------------------------------------------------------------ faults and life cycle

    def raise_on_fault(self) -> None:
        if not self._runtime.has_faults:
            return
        report = self._runtime.take_faults()
        if report.has_timeout:
            self._raise_timeout()
        if report.has_bad_id:
            where = (self.config, self.rank, report.bad_id, report.bad_id_token, report.bad_id_k)
            raise InputError(
                bad_id_message(*where) + "; reported by an earlier dispatch, which dropped the route (check_ids=True "
                "refuses it before sending)"
            )
        if report.has_active_mismatch:
            self._raise_mismatch(report, None)

    def _raise_mismatch(self, report, active: int | None) -> None:
        own = "" if active is None else f"rank {self.rank} {active}, "
        raise InputError(
            f"rank {self.rank}: active_tokens_per_rank differs: {own}rank {report.mismatch_rank} "
            f"{report.mismatch_active}; pass the same value on all ranks"
            + ("" if active is not None else "; reported by an earlier dispatch: call reset() on all ranks")
        )

    def _raise_timeout(self) -> None:
        report = self._runtime.explain_timeout()
        dead = [rank for rank, peer in enumerate(self._peers) if rank != self.rank and peer.is_known_dead()]
        ranks = tuple(dead or report.culprits)
        phase = report.phase.name.lower()
        names = ", ".join(
            f"{rank} (process {self._peers[rank].pid} has ended)" if dead else str(rank) for rank in ranks
        )
        raise PeerTimeoutError(
            f"rank {self.rank}: {phase} of epoch {report.epoch} waited longer than timeout_s = {self.config.timeout_s} "
            f"s for rank {names}; last epoch seen from rank {ranks[0]}: {report.seen_epoch}; flags missing from ranks "
            f"{report.missing}",
            ranks=ranks,
            phase=phase,
            epoch=report.epoch,
            seen_epoch=report.seen_epoch,
        )

    def synchronize(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize(self.device)
        self.raise_on_fault()

    def epoch(self, slot: int) -> int:
        """The slot's last executed round; waits for launched work."""
        if self._is_cuda:
            torch.cuda.synchronize(self.device)
        return self._runtime.epoch(slot)

    def reset(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize(self.device)
        self._bootstrap.barrier("reset: all launches done")
        self._runtime.reset()
        self._bootstrap.barrier("reset: words initialised")

    def destroy(self) -> None:
        if self._regions is None:
            return
        if self._is_cuda:
            torch.cuda.synchronize(self.device)  # bounded: every wait in a kernel is
        self._runtime = None
        self._outputs.clear()
        self._expert_outputs.clear()
        self._regions.close()
        self._regions = None
