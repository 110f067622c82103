# Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
"""Processes that play the ranks: pools that run one function after another on all ranks.

Starting a process costs seconds (torch's import), so a pool's workers stay alive and serve many
tests. A pool whose run failed is discarded: its processes may hold anything.
"""

from __future__ import annotations

import dataclasses
import datetime
import faulthandler
import functools
import multiprocessing
import multiprocessing.connection
import multiprocessing.process
import os
import pathlib
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist

from mscclpp_dispatcher import Dispatcher, DispatcherConfig, StoreGroup

DEVICE_TYPE = os.environ.get("MSCCLPP_DISPATCHER_TEST_DEVICE", "cpu")
"""The engine under test: ``cpu``, or ``cuda`` (all ranks on cuda:0; run it under MPS)."""

MAX_RANKS = int(os.environ.get("MSCCLPP_DISPATCHER_TEST_MAX_RANKS", "8"))
"""Cases with more ranks are skipped."""

DISPATCHER_TIMEOUT_S = 10.0
_START_LIMIT_S = 120.0
_GRACE_S = 3.0  # for the other ranks, after one has failed
_GLOO_TIMEOUT = datetime.timedelta(seconds=60)


class RanksFailedError(Exception):
    """Ranks raised, died or hung; the message holds each one's traceback."""


@dataclasses.dataclass
class Rank:
    """What a function on a worker is given first.

    Attributes:
        rank, num_ranks: of the pool's default group (gloo).
        device: where the engine under test keeps its tensors.
        store: shared by the ranks; it lives in the parent, so it survives every rank.
    """

    rank: int
    num_ranks: int
    device: torch.device
    store: dist.Store

    def dispatcher(self, config: DispatcherConfig, group: Any = None) -> Dispatcher:
        """A dispatcher of the engine under test, with limits that suit a test. Collective."""
        defaults = {field.name: field.default for field in dataclasses.fields(config)}
        changes: dict[str, Any] = {"allow_shared_device": self.device.type == "cuda"}
        if config.timeout_s == defaults["timeout_s"]:
            changes["timeout_s"] = DISPATCHER_TIMEOUT_S
        if config.init_timeout_s == defaults["init_timeout_s"]:
            changes["init_timeout_s"] = 2 * DISPATCHER_TIMEOUT_S
        return Dispatcher(dataclasses.replace(config, **changes), group, device=self.device)

    def barrier(self) -> None:
        """Waits for all ranks of the pool."""
        dist.barrier()

    def group(self, name: str, rank: int | None = None, num_ranks: int | None = None) -> StoreGroup:
        """A group of its own, apart from the pool's default group (CPU engine only)."""
        return StoreGroup(
            self.store, self.rank if rank is None else rank, self.num_ranks if num_ranks is None else num_ranks, name
        )


def segments_of(pids: Collection[int]) -> list[str]:
    """Names of the CPU engine's shared-memory segments that the processes have left to be seen."""
    names = (path.name for path in pathlib.Path("/dev/shm").glob("mscclpp_dispatcher-*"))
    return [name for name in names if int(name.split("-")[2]) in pids]


# ---------------------------------------------------------------------- worker side


def _worker_main(rank: int, num_ranks: int, port: int, trace_path: str, pipe: Any) -> None:
    with open(trace_path, "w") as trace_file:
        faulthandler.register(signal.SIGUSR1, file=trace_file, all_threads=True)
        faulthandler.enable(file=trace_file)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
        torch.set_num_threads(1)
        try:
            context = _connect(rank, num_ranks, port)
        except Exception as failure:  # noqa: BLE001 - sent to the parent
            pipe.send(("raised", _describe(failure)))
            return
        pipe.send(("returned", pickle.dumps(None)))
        while True:
            try:
                sys_path, call = pipe.recv()
            except EOFError:
                return
            sys.path[:] = sys_path
            pipe.send(_answer(context, call))


def _connect(rank: int, num_ranks: int, port: int) -> Rank:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    device = torch.device(DEVICE_TYPE, 0) if DEVICE_TYPE == "cuda" else torch.device(DEVICE_TYPE)
    if device.type == "cuda":
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)  # makes the CUDA context outside the tests' time limits
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=_GLOO_TIMEOUT)
    group_store = dist.PrefixStore("default_group", store)
    dist.init_process_group("gloo", store=group_store, rank=rank, world_size=num_ranks, timeout=_GLOO_TIMEOUT)
    return Rank(rank, num_ranks, device, store)


def _answer(context: Rank, call: bytes) -> tuple[str, Any]:
    try:
        function, args = pickle.loads(call)
        return "returned", pickle.dumps(function(context, *args))
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as failure:  # noqa: BLE001 - sent to the parent; what pytest.raises raises is no Exception
        return "raised", _describe(failure)


def _describe(failure: BaseException) -> str:
    return "".join(traceback.format_exception(failure))


# ---------------------------------------------------------------------- parent side


@functools.cache
def _process_context() -> multiprocessing.context.BaseContext:
    """How processes start: forked from a clean server that has imported torch, or afresh for CUDA."""
    if DEVICE_TYPE == "cuda":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "mscclpp_dispatcher", "pytest"])
    return context


class Pool:
    """One process per rank, started at once and reused by every ``run``.

    Args:
        num_ranks: of the pool.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.is_usable = True
        self._is_idle = False  # all workers wait for a call
        self._folder = tempfile.TemporaryDirectory(prefix="dispatcher-tests-")
        self._store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=datetime.timedelta(seconds=60)
        )
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[Any] = []
        context = _process_context()
        for rank in range(num_ranks):
            pipe, worker_pipe = context.Pipe()
            process = context.Process(
                target=_worker_main,
                args=(rank, num_ranks, self._store.port, str(self._trace_path(rank)), worker_pipe),
                daemon=True,
            )
            with _nothing_to_import_as_main():
                process.start()
            worker_pipe.close()
            self._processes.append(process)
            self._pipes.append(pipe)
        self._gather("start", _START_LIMIT_S, frozenset())

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        limit_s: float,
        expect_lost: Collection[int] = (),
    ) -> list[Any]:
        """Runs ``function(rank, *args)`` on all ranks at once.

        Args:
            function: of a module's top level.
            limit_s: after this many seconds the run fails and the workers are killed.
            expect_lost: ranks that die or stop and so give no result (None in its place). The pool
                is not used again.

        Returns:
            What each rank returned, in rank order.

        Raises:
            RanksFailedError: with the traceback of each rank.
        """
        assert self.is_usable, "the pool was discarded"
        call = pickle.dumps((function, args))
        self._is_idle = False
        is_reusable = False
        try:
            for rank, pipe in enumerate(self._pipes):
                try:
                    pipe.send((sys.path, call))
                except BrokenPipeError:
                    raise RanksFailedError(f"rank {rank} has ended since the last run") from None
            results = self._gather(function.__name__, limit_s, frozenset(expect_lost))
            is_reusable = not expect_lost
        finally:  # also when pytest interrupts the wait
            if not is_reusable:
                self.close()
        return results

    def _gather(self, name: str, limit_s: float, expect_lost: frozenset[int]) -> list[Any]:
        deadline = time.monotonic() + limit_s
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = set(range(self.num_ranks)) - expect_lost
        while waiting and time.monotonic() < deadline:
            by_source = {self._pipes[rank]: rank for rank in waiting}
            for source in multiprocessing.connection.wait(list(by_source), timeout=deadline - time.monotonic()):
                rank = by_source[source]
                waiting.discard(rank)
                try:
                    kind, value = source.recv()
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(5)
                    failures[rank] = f"the process ended, exit code {self._processes[rank].exitcode}"
                else:
                    if kind == "returned":
                        results[rank] = pickle.loads(value)
                    else:
                        failures[rank] = value
                if rank in failures:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        self._is_idle = not (failures or waiting or expect_lost)
        if failures or waiting:
            stacks = self._stacks(waiting)
            self.close()
            raise RanksFailedError(_report(name, limit_s, failures, stacks))
        return [results.get(rank) for rank in range(self.num_ranks)]

    def _trace_path(self, rank: int) -> pathlib.Path:
        return pathlib.Path(self._folder.name, f"rank{rank}.trace")

    def _stacks(self, ranks: Collection[int]) -> dict[int, str]:
        """Where each of ``ranks`` is now."""
        for rank in ranks:
            if self._processes[rank].is_alive():
                os.kill(self.pid(rank), signal.SIGUSR1)
        time.sleep(0.5 if ranks else 0)
        return {rank: self._trace_path(rank).read_text() for rank in ranks}

    def pid(self, rank: int) -> int:
        return self._processes[rank].pid

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def exit_codes(self, limit_s: float) -> list[int | None]:
        """Waits until the processes have ended; None for one that has not."""
        deadline = time.monotonic() + limit_s
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return [process.exitcode for process in self._processes]

    def close(self) -> None:
        """Ends the workers: idle ones by closing their pipes, others by a kill. May be called twice."""
        if not self.is_usable:
            return
        self.is_usable = False
        for pipe in self._pipes:
            pipe.close()
        if self._is_idle:
            self.exit_codes(10)
        for process in self._processes:
            if process.is_alive():
                process.kill()  # also ends a stopped one
        self.exit_codes(10)
        self._folder.cleanup()


class _nothing_to_import_as_main:  # noqa: N801 - reads as a statement
    """Keeps workers from importing pytest's main module again."""

    def __enter__(self) -> None:
        main = sys.modules["__main__"]
        self._spec, self._file = main.__spec__, getattr(main, "__file__", None)
        main.__spec__ = main.__file__ = None

    def __exit__(self, *_: object) -> None:
        main = sys.modules["__main__"]
        main.__spec__, main.__file__ = self._spec, self._file


def _report(name: str, limit_s: float, failures: dict[int, str], stacks: dict[int, str]) -> str:
    lines = [f"{name}:"]
    for rank, text in sorted(failures.items()):
        lines.append(f"---- rank {rank} failed:\n{text}")
    for rank, text in sorted(stacks.items()):
        lines.append(f"---- rank {rank} had not finished (limit {limit_s} s); it was here:\n{text}")
    return "\n".join(lines)


class Pools:
    """The pools of a test session, by number of ranks."""

    def __init__(self) -> None:
        self._pools: dict[int, Pool] = {}

    def get(self, num_ranks: int) -> Pool:
        """A pool whose workers are alive."""
        pool = self._pools.get(num_ranks)
        if pool is None or not pool.is_usable:
            pool = self._pools[num_ranks] = Pool(num_ranks)
        return pool

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
