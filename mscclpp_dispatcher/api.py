# Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
"""The object users hold: dispatches tokens to the ranks of their experts and combines the results."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist

from mscclpp_dispatcher import validation
from mscclpp_dispatcher.bootstrap import Bootstrap, StoreGroup
from mscclpp_dispatcher.config import MAX_RANKS, DispatcherConfig
from mscclpp_dispatcher.engine import Capabilities, Engine
from mscclpp_dispatcher.engines.ll import LlEngine
from mscclpp_dispatcher.errors import CapacityError, ConfigError, HandleError, InputError
from mscclpp_dispatcher.types import DispatchHandle, DispatchOutput, HandleState


class Dispatcher:
    """Moves tokens to their experts' ranks and sums what comes back.

    Making it is collective over the group; it allocates everything, so that every later call can be
    captured in a CUDA graph. Calls of one slot must follow each other in stream order (dispatch,
    experts, combine, the next dispatch); on CUDA they run on ``torch.cuda.current_stream()``. All
    ranks must execute the same sequence of operations per slot, eager or replayed in any mixture, and
    the same order of slots where slots share a stream.

    Args:
        config: equal on all ranks.
        group: the ranks; None takes the default group. Any backend: only its store is used, and
            torch's symmetric memory on CUDA. A StoreGroup serves the CPU engine without
            ``init_process_group``.
        device: None takes the current CUDA device if there is one, else the CPU.

    Raises:
        ConfigError: the ranks disagree, a device does not fit, or memory cannot be had; on all ranks.
        PeerTimeoutError: a rank did not come within ``init_timeout_s``.

    Attributes:
        config, rank, num_ranks, device: as made.
        local_experts: global ids of this rank's experts, ascending; entry i is local expert i.
    """

    _ids = itertools.count()

    def __init__(
        self,
        config: DispatcherConfig,
        group: dist.ProcessGroup | StoreGroup | None = None,
        *,
        device: torch.device | str | int | None = None,
    ) -> None:
        self._engine: Engine | None = None
        if not isinstance(config, DispatcherConfig):
            raise ConfigError(f"config is a {type(config).__name__}; it must be a DispatcherConfig")
        self.config = config
        self.device = _resolve_device(device)
        bootstrap = Bootstrap(group, config.init_timeout_s)
        self.rank, self.num_ranks = bootstrap.rank, bootstrap.num_ranks
        self._check_agreement(bootstrap)
        self.local_experts = config.local_experts(self.rank, self.num_ranks)
        self._id = next(self._ids)
        self._epochs = itertools.count(1)
        self._in_flight: list[DispatchHandle | None] = [None] * config.num_slots
        self._engine = LlEngine(config, bootstrap, self.device)
        self.capabilities: Capabilities = self._engine.capabilities

    def _check_agreement(self, bootstrap: Bootstrap) -> None:
        error = None
        if self.num_ranks > MAX_RANKS:
            error = f"the group has {self.num_ranks} ranks; allowed: 1..{MAX_RANKS}"
        else:
            try:
                self.config.owners(self.num_ranks)
            except ConfigError as failure:
                error = str(failure)
        texts = [answer["config"] for answer in bootstrap.agree("config", {"config": self.config.to_dict()}, error)]
        differences = [
            f"{name}: rank {rank} has {text[name]!r}, rank 0 has {texts[0][name]!r}"
            for rank, text in enumerate(texts)
            for name in text
            if text[name] != texts[0].get(name)
        ]
        if differences:
            raise ConfigError("the ranks' configs differ: " + "; ".join(differences))

    # ------------------------------------------------------------------ dispatch

    def dispatch(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        *,
        active_tokens_per_rank: int | None = None,
    ) -> tuple[DispatchOutput, DispatchHandle]:
        """Sends each token to the ranks of its experts and receives theirs. Collective, capturable.

        Args:
            x: ``[T, hidden]``, payload dtype, on the dispatcher's device; T may be 0. Rows may be
                strided; a layout that cannot be read in place is copied. It may be freed or
                rewritten by later work of the stream.
            topk_ids: ``[T, num_topk]`` int32 or int64; -1 is "no expert"; ids may repeat in a token.
            topk_weights: ``[T, num_topk]`` float32; None means ones.
            active_tokens_per_rank: row stride between source ranks, T or more, equal on all ranks;
                None takes max_tokens_per_rank. Give the captured batch size to keep buffers dense.

        Returns:
            What arrived (valid until this handle's combine), and the handle to combine with.

        Raises:
            InputError: wrong dtype, shape or device; a bad id (CPU, or check_ids=True; otherwise the
                route is dropped and the next call raises instead of starting: repeat it, the peers
                wait for it); unlike active_tokens_per_rank.
            CapacityError: more than max_tokens_per_rank tokens, or more than num_slots in flight.
            HandleError: the dispatcher is destroyed.
            PeerTimeoutError: a rank did not come (on CUDA raised by the next call).
        """
        handle = self._begin_dispatch(x, topk_ids, topk_weights, active_tokens_per_rank, and_recv=True)
        return self._engine.output(handle), handle

    def dispatch_send(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        *,
        active_tokens_per_rank: int | None = None,
    ) -> DispatchHandle:
        """First half of ``dispatch``: sends; other work may run until ``dispatch_recv``.

        Same arguments and errors. With EXPERT_MAJOR it waits for the lower ranks' counts.
        """
        return self._begin_dispatch(x, topk_ids, topk_weights, active_tokens_per_rank, and_recv=False)

    def dispatch_recv(self, handle: DispatchHandle) -> DispatchOutput:
        """Second half of ``dispatch``: waits for the rows of all ranks.

        Raises:
            HandleError: not a handle of ``dispatch_send``.
            InputError, PeerTimeoutError: as ``dispatch``.
        """
        engine = self._ready_engine()
        validation.check_handle(self.rank, self._id, handle, HandleState.DISPATCH_SENT)
        try:
            engine.dispatch_recv(handle)
        except InputError:
            self._release(handle)
            raise
        handle.state = HandleState.DISPATCHED
        return engine.output(handle)

    def _begin_dispatch(self, x, topk_ids, topk_weights, active_tokens_per_rank, *, and_recv: bool) -> DispatchHandle:
        engine = self._ready_engine()
        active = validation.check_dispatch(
            self.config, self.rank, self.device, x, topk_ids, topk_weights, active_tokens_per_rank
        )
        if self.capabilities.checks_ids and not self._is_capturing():
            validation.check_ids(self.config, self.rank, topk_ids)
        if validation.needs_copy(x):
            x = x.clone(memory_format=torch.contiguous_format)
        handle = DispatchHandle(self._id, self._free_slot(), next(self._epochs), x.shape[0], active)
        self._in_flight[handle.slot] = handle
        weights = None if topk_weights is None else topk_weights.contiguous()
        try:
            engine.dispatch_send(handle, x, topk_ids.contiguous(), weights, and_recv=and_recv)
        except (ValueError, RuntimeError):  # refused, or not launched: nothing is in flight
            self._release(handle)
            raise
        handle.state = HandleState.DISPATCHED if and_recv else HandleState.DISPATCH_SENT
        return handle

    def _is_capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _free_slot(self) -> int:
        for slot, handle in enumerate(self._in_flight):
            if handle is None:
                return slot
        waiting = ", ".join(str(handle.epoch) for handle in self._in_flight)
        raise CapacityError(
            f"rank {self.rank}: dispatch called while the handles of dispatch {waiting} are not combined; allowed in "
            f"flight: num_slots = {self.config.num_slots}"
        )

    # ------------------------------------------------------------------ combine

    def expert_output_buffer(self, handle: DispatchHandle) -> torch.Tensor:
        """A tensor to write the experts' rows to, for ``combine``; saves a copy where peers read it.

        Until ``dispatch_recv`` has returned, peers may still read the last round's rows from it.

        Returns:
            Payload dtype, shaped as ``expert_output`` of ``combine``; owned by the dispatcher, valid
            until this handle's combine.

        Raises:
            HandleError: not a received dispatch in flight.
        """
        engine = self._ready_engine()
        validation.check_handle(self.rank, self._id, handle, HandleState.DISPATCHED)
        return engine.expert_output_buffer(handle)

    def combine(
        self, expert_output: torch.Tensor, handle: DispatchHandle, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Sums the experts' rows of each token of this rank, in token order. Collective, capturable.

        Sums are in float32, in top-k order, rounded once (LOCAL_REDUCE: once more for each rank's
        part). A token without an expert gives zeros.

        Args:
            expert_output: payload dtype, contiguous, R = num_ranks, A = active_tokens_per_rank of the
                dispatch: EXPERT_MAJOR ``[local experts, R*A, hidden]``; RANK_MAJOR ``[R*A, hidden]``
                (LOCAL_REDUCE, weighted and summed by the runner) or ``[R*A, num_topk, hidden]``
                (DIRECT_SEND). Only rows of valid entries are read.
            handle: of the dispatch; consumed.
            out: ``[T, hidden]``, payload dtype, contiguous; None allocates it.

        Returns:
            ``out``.

        Raises:
            InputError: wrong dtype, shape, device or strides; the handle stays valid.
            HandleError: the handle is foreign, used or not yet received.
            PeerTimeoutError: a rank did not come (on CUDA raised by the next call); ``out`` is NaN.
        """
        out = self._begin_combine(expert_output, handle, out, and_recv=True)
        self._release(handle)
        return out

    def combine_send(
        self, expert_output: torch.Tensor, handle: DispatchHandle, out: torch.Tensor | None = None
    ) -> None:
        """First half of ``combine``: offers this rank's rows. Same arguments and errors.

        ``expert_output`` may be freed by later work of the stream, except for
        ``expert_output_buffer``, which peers read until their ``combine_recv``.
        """
        handle_out = self._begin_combine(expert_output, handle, out, and_recv=False)
        handle.out = handle_out
        handle.state = HandleState.COMBINE_SENT

    def combine_recv(self, handle: DispatchHandle) -> torch.Tensor:
        """Second half of ``combine``: waits for the peers' rows and sums them.

        Returns:
            ``out`` of ``combine_send``.

        Raises:
            HandleError: not a handle of ``combine_send``.
            PeerTimeoutError: as ``combine``.
        """
        engine = self._ready_engine()
        validation.check_handle(self.rank, self._id, handle, HandleState.COMBINE_SENT)
        engine.combine_recv(handle, handle.out)
        out = handle.out
        self._release(handle)
        return out

    def _begin_combine(self, expert_output, handle, out, *, and_recv: bool) -> torch.Tensor:
        engine = self._ready_engine()
        validation.check_handle(self.rank, self._id, handle, HandleState.DISPATCHED)
        shape = validation.expert_output_shape(
            self.config, self.num_ranks, len(self.local_experts), handle.active_tokens_per_rank
        )
        validation.check_combine(self.config, self.rank, self.device, handle, expert_output, out, shape)
        if out is None:
            out = torch.empty(
                (handle.num_tokens, self.config.hidden), dtype=self.config.payload.dtype, device=self.device
            )
        engine.combine_send(handle, expert_output, out, and_recv=and_recv)
        return out

    def abandon(self, handle: DispatchHandle) -> None:
        """Ends a dispatch without its combine, for instance after the experts failed. Collective.

        Raises:
            HandleError: the handle is not a received dispatch in flight.
            PeerTimeoutError: a rank did not come.
        """
        engine = self._ready_engine()
        validation.check_handle(self.rank, self._id, handle, HandleState.DISPATCHED)
        engine.abandon(handle)
        self._release(handle)

    def _release(self, handle: DispatchHandle) -> None:
        handle.state = HandleState.CONSUMED
        handle.out = None
        self._in_flight[handle.slot] = None

    # ------------------------------------------------------------------ life cycle

    def _ready_engine(self) -> Engine:
        engine = self._live_engine()
        engine.raise_on_fault()
        return engine

    def _live_engine(self) -> Engine:
        if self._engine is None:
            raise HandleError("the dispatcher is destroyed; make another one")
        return self._engine

    def synchronize(self) -> None:
        """Waits for this process's work on the device, then raises what a kernel reported.

        Raises:
            PeerTimeoutError, InputError: see ``dispatch``.
        """
        self._live_engine().synchronize()

    def epoch(self, slot: int = 0) -> int:
        """Executed rounds of a slot (mod 2**32, counted from first_epoch), replays included.

        Waits for this process's work on the device.
        """
        return self._live_engine().epoch(slot)

    def buffer_sizes(self) -> dict[str, int]:
        """Bytes of each buffer of this rank over all slots, and their ``total``."""
        return self._live_engine().buffer_sizes()

    def reset(self) -> None:
        """Returns all ranks to the state after creation, for instance after a PeerTimeoutError.

        Collective: every rank of the group must call it. Handles in flight become invalid; graphs
        captured earlier stay usable.

        Raises:
            PeerTimeoutError: a rank did not call it within ``init_timeout_s``.
        """
        self._live_engine().reset()
        for handle in list(self._in_flight):
            if handle is not None:
                self._release(handle)

    def destroy(self) -> None:
        """Releases buffers and mappings. Waits for no peer; a second call does nothing."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.destroy()

    def __enter__(self) -> Dispatcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.destroy()


def _resolve_device(device: torch.device | str | int | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device is {device}; allowed: cpu, cuda")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(f"device is {device}, but torch sees no CUDA device; pass device='cpu'")
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
    return device
