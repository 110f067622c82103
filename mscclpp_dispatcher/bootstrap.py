# Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
"""Meeting of the ranks before there are buffers: a bounded all-gather of bytes over the group's store.

The store of a ``torch.distributed`` group serves every backend alike (gloo, nccl), carries plain
bytes (nothing is unpickled), and tells which rank is missing.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import socket
import time
import weakref
from typing import ClassVar

import torch.distributed as dist

from mscclpp_dispatcher.errors import ConfigError, PeerTimeoutError

_POLL_S = (0.0005, 0.02)
_PRESENT, _LEFT = b"\1", b"\0"  # first byte of what a rank brings to a meeting


@dataclasses.dataclass(frozen=True)
class StoreGroup:
    """A group without ``torch.distributed``'s global state: ranks that share a store.

    Enough for the CPU engine. The CUDA engine maps peers through torch's symmetric memory, which
    needs a ProcessGroup.

    Attributes:
        store: any ``torch.distributed`` store (TCPStore, FileStore, HashStore), shared by all ranks.
        rank: this rank.
        num_ranks: size of the group.
        name: told apart from other groups on the same store.
    """

    store: dist.Store
    rank: int
    num_ranks: int
    name: str = "group"


@dataclasses.dataclass
class _History:
    """What one rank has done on a group's store.

    Attributes:
        num_dispatchers: made so far; the same number on all ranks names the same meetings.
        own_keys: this rank's keys that others may still read: of the last meeting, and any under way.
    """

    num_dispatchers: int = 0
    own_keys: list[str] = dataclasses.field(default_factory=list)


class Bootstrap:
    """Rank, size and byte exchange of one dispatcher's group.

    Dispatchers on one group must be made in the same order on all ranks (as any collective).
    """

    _histories: ClassVar[weakref.WeakKeyDictionary[dist.Store, dict[tuple[str, int], _History]]] = (
        weakref.WeakKeyDictionary()
    )

    def __init__(self, group: dist.ProcessGroup | StoreGroup | None, timeout_s: float) -> None:
        if not isinstance(group, StoreGroup):
            group = _as_store_group(group)
        self.process_group = group.process_group if isinstance(group, _ProcessStoreGroup) else None
        self.rank, self.num_ranks = group.rank, group.num_ranks
        self._timeout_s = timeout_s
        self._store = group.store
        histories = self._histories.setdefault(group.store, {})
        history = histories.setdefault((group.name, group.rank), _History())
        self._prefix = f"mscclpp_dispatcher/{group.name}/{history.num_dispatchers}"
        history.num_dispatchers += 1
        self._own_keys = history.own_keys
        self._step = 0

    def exchange(self, name: str, data: bytes) -> list[bytes]:
        """All ranks' ``data``, in rank order. Collective.

        Args:
            name: what is exchanged, for messages.
            data: this rank's bytes.

        Raises:
            PeerTimeoutError: ranks did not come within the limit; names them.
        """
        # With the name in the key, ranks at different meetings time out instead of passing each other.
        keys = [f"{self._prefix}/{self._step}/{name}/{rank}" for rank in range(self.num_ranks)]
        self._store.set(keys[self.rank], _PRESENT + data)
        deadline = time.monotonic() + self._timeout_s if self._timeout_s else math.inf
        pause_s = _POLL_S[0]
        while (answers := self._answers(keys)) is None:
            if time.monotonic() > deadline and (missing := self._missing(keys)):
                self._store.set(keys[self.rank], _LEFT)  # a later call of this meeting by all ranks can succeed
                raise PeerTimeoutError(
                    f"rank {self.rank}: {_ranks(missing)} did not reach step '{name}' within "
                    f"init_timeout_s = {self._timeout_s} s",
                    ranks=missing,
                    phase=name,
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_S[1])
        self._step += 1
        # Everyone has finished reading the step before once this one is complete.
        self._own_keys.append(keys[self.rank])
        if len(self._own_keys) > 1:
            self._store.delete_key(self._own_keys.pop(0))
        return answers

    def _answers(self, keys: list[str]) -> list[bytes] | None:
        """What the ranks brought; None while one has not come, or has given up waiting."""
        if not self._store.check(keys):
            return None
        values = [bytes(self._store.get(key)) for key in keys]
        if any(value.startswith(_LEFT) for value in values):
            return None
        return [value.removeprefix(_PRESENT) for value in values]

    def _missing(self, keys: list[str]) -> tuple[int, ...]:
        """Ranks that have not come; if all have, those that gave up waiting."""
        absent = tuple(rank for rank, key in enumerate(keys) if not self._store.check([key]))
        return absent or tuple(rank for rank, key in enumerate(keys) if bytes(self._store.get(key)).startswith(_LEFT))

    def agree(self, name: str, value: dict, error: str | None = None) -> list[dict]:
        """All ranks' ``value``; if any rank has an ``error``, every rank raises it. Collective.

        Raises:
            ConfigError: with each failing rank and its reason.
            PeerTimeoutError: as ``exchange``.
        """
        raw = self.exchange(name, json.dumps({"value": value, "error": error}).encode())
        answers = [json.loads(data) for data in raw]
        failures = [f"rank {rank}: {answer['error']}" for rank, answer in enumerate(answers) if answer["error"]]
        if failures:
            raise ConfigError(f"making the dispatcher failed at step '{name}': " + "; ".join(failures))
        return [answer["value"] for answer in answers]

    def barrier(self, name: str) -> None:
        """Returns when all ranks have called it. Raises as ``exchange``."""
        self.exchange(name, b"\1")


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


@dataclasses.dataclass(frozen=True)
class _ProcessStoreGroup(StoreGroup):
    process_group: dist.ProcessGroup | None = None


def _as_store_group(group: dist.ProcessGroup | None) -> _ProcessStoreGroup:
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError(
            "torch.distributed is not initialised; call torch.distributed.init_process_group first (backend gloo is "
            "enough)"
        )
    group = dist.group.WORLD if group is None else group
    if dist.get_rank(group) < 0:
        raise ConfigError(f"this process (global rank {dist.get_rank()}) is not in the given group")
    return _ProcessStoreGroup(
        store=dist.distributed_c10d._get_process_group_store(group),
        rank=dist.get_rank(group),
        num_ranks=dist.get_world_size(group),
        name=group.group_name,
        process_group=group,
    )


@dataclasses.dataclass(frozen=True)
class ProcessIdentity:
    """A process that cannot be confused with a later one of the same pid."""

    host: str
    pid_namespace: int
    pid: int
    start_ticks: int

    @classmethod
    def of_this_process(cls) -> ProcessIdentity:
        pid = os.getpid()
        return cls(_host_id(), _pid_namespace(), pid, _start_ticks(pid) or 0)

    def is_known_dead(self) -> bool:
        """True if it ran where this process can see it, and runs no more."""
        if (self.host, self.pid_namespace) != (_host_id(), _pid_namespace()):
            return False
        return _start_ticks(self.pid) != self.start_ticks


def _host_id() -> str:
    try:
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _start_ticks(pid: int) -> int | None:
    """Start time of a running process in clock ticks since boot; None if it has ended."""
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = text.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])
