# Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
"""The rank processes: started by the parent, bounded in time, and ended with it."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import logging
import os
import pathlib
import tempfile
import time
import traceback
from collections.abc import MutableSequence
from ctypes import c_int

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from mscclpp_dispatcher.api import Dispatcher
from mscclpp_dispatcher.config import DispatcherConfig
from mscclpp_dispatcher.demo.decode import DecodeState, RankBatch, decode_step
from mscclpp_dispatcher.demo.exchange import DispatcherExchange, EmptyExchange, PhaseTimer
from mscclpp_dispatcher.demo.model import ModelConfig, MoeTransformer
from mscclpp_dispatcher.demo.progress import Bars
from mscclpp_dispatcher.demo.train import load_checkpoint

GROUP_TIMEOUT = datetime.timedelta(seconds=60)
FAIL_STEP = 5
TIMED_EAGER_STEPS = 32


@dataclasses.dataclass(frozen=True)
class Plan:
    """All that the ranks and the check must agree on.

    Attributes:
        device_type: ``cpu`` or ``cuda``; rank r takes GPU ``r % torch.cuda.device_count()``.
        checkpoint: weights file, read by every rank.
        timeout_s: limit of the whole decoding, in seconds.
        fail_rank: this rank raises an error at its sixth step; None for none.
    """

    model: ModelConfig
    dispatcher: DispatcherConfig
    batches: tuple[RankBatch, ...]
    device_type: str
    checkpoint: str
    timeout_s: float
    fail_rank: int | None = None

    @property
    def num_ranks(self) -> int:
        return len(self.batches)

    @property
    def num_steps(self) -> int:
        """Steps that every rank takes part in, with tokens or without."""
        return max(batch.num_steps for batch in self.batches)

    def device(self, rank: int) -> torch.device:
        """Where a rank computes."""
        return torch.device("cuda", rank % torch.cuda.device_count()) if self.device_type == "cuda" else _CPU


_CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class RankResult:
    """What a rank hands back, on the CPU; see DecodeState for the tensors.

    Attributes:
        routes: int64 ``[layers, S, B, K]``.
        seconds: durations by phase (``dispatch``, ``experts``, ``combine`` per layer call, ``step``).
        graph_step_seconds: duration of each graph replay, empty on the CPU.
        wall_seconds: the decoding loop, waits for slower ranks included.
        buffer_bytes: the dispatcher's buffers.
    """

    history: torch.Tensor
    top_logits: torch.Tensor
    routes: torch.Tensor
    seconds: dict[str, list[float]]
    graph_step_seconds: list[float]
    wall_seconds: float
    buffer_bytes: dict[str, int]


class RankError(RuntimeError):
    """A rank failed, was killed, or did not finish in time; the message holds its traceback."""


class _Decoder:
    """One rank's loop: full batch while it lasts, then zero tokens."""

    def __init__(self, plan: Plan, rank: int, dispatcher: Dispatcher, done: MutableSequence[int]) -> None:
        self._plan, self._rank, self._done = plan, rank, done
        device = plan.device(rank)
        weights, _ = load_checkpoint(pathlib.Path(plan.checkpoint), plan.model)
        self._model = MoeTransformer.for_rank(plan.model, weights, dispatcher.local_experts, device)
        batch = plan.batches[rank]
        self._num_busy_steps = batch.num_steps
        self.state = DecodeState(plan.model, batch, len(batch.prompts), device)
        self._idle_state = DecodeState(plan.model, batch, 0, device)
        self._dispatcher = dispatcher
        self._exchange = DispatcherExchange(dispatcher, self._model)
        self._device = device
        self._graphs: dict[DecodeState, torch.cuda.CUDAGraph] = {}

    def _state_of(self, step: int) -> DecodeState:
        return self.state if step < self._num_busy_steps else self._idle_state

    def _step(self, state: DecodeState) -> None:
        decode_step([self._model], [state], self._exchange)

    def _reset(self) -> None:
        self.state.reset()
        self._idle_state.reset()

    def _finish_step(self, step: int) -> None:
        if step == FAIL_STEP and self._rank == self._plan.fail_rank:
            raise RuntimeError(f"rank {self._rank} fails at step {step}, as --fail-rank {self._rank} asks")
        self._done[self._rank] = max(self._done[self._rank], step + 1)  # the timing pass on a GPU starts over

    def decode_eager(self, num_steps: int) -> dict[str, list[float]]:
        """Decodes from the prompts and returns the durations by phase."""
        timer = self._exchange.timer = PhaseTimer(self._device)
        self._reset()
        for step in range(num_steps):
            with timer("step"):
                self._step(self._state_of(step))
            self._finish_step(step)
        self._exchange.timer = None
        return timer.seconds()

    def capture(self) -> None:
        """Captures the whole step, once with this rank's sequences and once with none."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            # First alone: loading a kernel can wait for the device, and on a shared one for peers that wait for us.
            decode_step([self._model], [self.state], EmptyExchange(self._dispatcher, self._model))
            torch.cuda.synchronize()
            dist.barrier()
            self._step(self.state)  # collective, so every rank does exactly one
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        for state in (self.state, self._idle_state):
            self._graphs[state] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graphs[state]):
                self._step(state)  # recorded only: nothing is sent

    def decode_graph(self, num_steps: int) -> list[float]:
        """Decodes from the prompts by replays; returns the duration of each."""
        timer = PhaseTimer(self._device)
        self._reset()
        for step in range(num_steps):
            with timer("step"):
                self._graphs[self._state_of(step)].replay()
            if step % 8 == 7:
                torch.cuda.synchronize()  # so that the progress bar tells the truth
            self._finish_step(step)
        return timer.seconds()["step"]


def _run_rank(rank: int, plan: Plan, dispatcher: Dispatcher, done: MutableSequence[int]) -> RankResult:
    decoder = _Decoder(plan, rank, dispatcher, done)
    graph_seconds: list[float] = []
    if plan.device_type == "cuda":
        decoder.capture()
    dist.barrier()
    begin = time.perf_counter()
    if plan.device_type == "cuda":
        graph_seconds = decoder.decode_graph(plan.num_steps)
    else:
        seconds = decoder.decode_eager(plan.num_steps)
    dispatcher.synchronize()
    wall_seconds = time.perf_counter() - begin
    state = decoder.state
    history, top_logits = state.history.cpu(), state.top_logits.cpu()
    routes = torch.stack(state.routes).cpu()
    if plan.device_type == "cuda":
        seconds = decoder.decode_eager(min(TIMED_EAGER_STEPS, plan.num_steps))
        dispatcher.synchronize()
    sizes = dispatcher.buffer_sizes()
    return RankResult(history, top_logits, routes, seconds, graph_seconds, wall_seconds, sizes)


def _rank_main(rank: int, plan: Plan, port: int, folder: str, done: MutableSequence[int]) -> None:
    """Body of a rank process; a failure's traceback goes to ``folder`` for the parent."""
    try:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.set_num_threads(1)
        if plan.device_type == "cuda":
            torch.cuda.set_device(plan.device(rank))
        store = dist.TCPStore("127.0.0.1", port, plan.num_ranks, is_master=False, timeout=GROUP_TIMEOUT)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=plan.num_ranks, timeout=GROUP_TIMEOUT)
        with Dispatcher(plan.dispatcher, device=plan.device(rank)) as dispatcher:
            result = _run_rank(rank, plan, dispatcher, done)
            torch.save(dataclasses.asdict(result), pathlib.Path(folder, f"rank{rank}.pt"))
            dist.barrier()
        dist.destroy_process_group()
    except Exception:
        pathlib.Path(folder, f"rank{rank}.error").write_text(traceback.format_exc())
        raise


def _describe(error: Exception, folder: str) -> str:
    """The cause: a rank that was killed, else the earliest traceback (later ones are its consequences)."""
    if isinstance(error, ProcessExitedException):
        return f"rank {error.error_index} ended without a traceback: {error.signal_name or error.exit_code}"
    paths = sorted(pathlib.Path(folder).glob("rank*.error"), key=lambda path: path.stat().st_mtime_ns)
    return f"{paths[0].stem} failed:\n{paths[0].read_text()}" if paths else str(error)


def _note(plan: Plan, rank: int, num_done: int) -> str:
    if num_done == 0:
        return "starting"
    batch = plan.batches[rank]
    return f"{len(batch.prompts)} sequences" if num_done <= batch.num_steps else "0 sequences (all ended)"


def run_ranks(plan: Plan) -> list[RankResult]:
    """Starts one process per rank and returns their results in rank order.

    Raises:
        RankError: a rank failed or the time limit passed; all rank processes have been ended.
    """
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # it tells of each process it ends
    spawn = torch.multiprocessing.get_context("spawn")
    done = spawn.Array(c_int, plan.num_ranks, lock=False)
    store = dist.TCPStore("127.0.0.1", 0, plan.num_ranks, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="mscclpp_dispatcher_demo_") as folder:
        ranks = torch.multiprocessing.spawn(
            _rank_main, args=(plan, store.port, folder, done), nprocs=plan.num_ranks, join=False, daemon=True
        )
        deadline = time.monotonic() + plan.timeout_s
        try:
            with Bars() as bars:
                numbers = [bars.add(f"rank {rank}", plan.num_steps) for rank in range(plan.num_ranks)]
                is_finished = False
                while not is_finished:
                    is_finished = ranks.join(timeout=0.2, grace_period=2)
                    for rank, number in enumerate(numbers):
                        bars.set(number, done[rank], _note(plan, rank, done[rank]))
                    if not is_finished and time.monotonic() > deadline:
                        raise TimeoutError(
                            f"the ranks did not finish within --timeout {plan.timeout_s:g} s; steps done by rank: "
                            f"{list(done)} of {plan.num_steps}"
                        )
        except (ProcessExitedException, ProcessRaisedException, TimeoutError) as error:
            raise RankError(_describe(error, folder)) from None
        finally:
            for process in ranks.processes:
                with contextlib.suppress(OSError):
                    process.kill()
            for process in ranks.processes:
                process.join(timeout=5)
        return [
            RankResult(**torch.load(pathlib.Path(folder, f"rank{rank}.pt"), weights_only=True))
            for rank in range(plan.num_ranks)
        ]
