# Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
"""Regions of the CPU engine: one POSIX shared-memory segment per rank, mapped by all."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import secrets

import torch

from mscclpp_dispatcher import _C
from mscclpp_dispatcher.bootstrap import Bootstrap, ProcessIdentity

_DIRECTORY = pathlib.Path("/dev/shm")
_NAME = re.compile(r"mscclpp_dispatcher-(\d+)-(\d+)-(\d+)-[0-9a-f]+")


class ShmRegions:
    """This rank's region and its peers', in rank order. Making it is collective.

    Names live only until all ranks have mapped the segments, so a killed run leaves memory behind
    only if it dies in that moment; the next start removes such leftovers.

    Attributes:
        local: uint8 ``[num_bytes]`` tensor over this rank's region; it keeps the memory alive.
        addresses: base address of each rank's region in this process.
    """

    def __init__(self, bootstrap: Bootstrap, num_bytes: int) -> None:
        reclaim_leftovers()
        me = ProcessIdentity.of_this_process()
        name = f"mscclpp_dispatcher-{me.pid_namespace}-{me.pid}-{me.start_ticks}-{secrets.token_hex(8)}"
        own, error = None, None
        try:
            try:
                own = _C.SharedSegment.create("/" + name, num_bytes)
            except (OSError, RuntimeError) as failure:
                error = str(failure)
            names = [answer["name"] for answer in bootstrap.agree("shared memory", {"name": name}, error)]
            segments, error = [], None
            try:
                for rank, peer_name in enumerate(names):
                    if not _NAME.fullmatch(peer_name):
                        raise ValueError(f"rank {rank} offers a segment named {peer_name!r}")
                    segments.append(
                        own if rank == bootstrap.rank else _C.SharedSegment.open("/" + peer_name, num_bytes)
                    )
            except (OSError, RuntimeError, ValueError) as failure:
                error = str(failure)
            bootstrap.agree("mapping shared memory", {}, error)
        finally:
            _C.SharedSegment.unlink("/" + name)
        self._segments = segments
        self.addresses = [segment.address for segment in segments]
        self.local = torch.frombuffer(own, dtype=torch.uint8)

    def close(self) -> None:
        """Drops the mappings; the local one lives on while a tensor over it does."""
        self._segments = []
        self.local = None


def reclaim_leftovers() -> None:
    """Removes this user's segments whose owner (pid and start time) is gone."""
    me = ProcessIdentity.of_this_process()
    for path in _DIRECTORY.glob("mscclpp_dispatcher-*"):
        match = _NAME.fullmatch(path.name)
        if not match:
            continue
        namespace, pid, start_ticks = (int(group) for group in match.groups())
        owner = dataclasses.replace(me, pid_namespace=namespace, pid=pid, start_ticks=start_ticks)
        try:
            if owner.is_known_dead() and path.stat().st_uid == os.geteuid():
                _C.SharedSegment.unlink("/" + path.name)
        except FileNotFoundError:
            continue
