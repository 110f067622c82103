# Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
"""Regions of the CUDA engine: torch symmetric memory, mapped by all ranks of one NVLink or IPC domain."""

from __future__ import annotations

import torch

from mscclpp_dispatcher.bootstrap import Bootstrap


class SymmetricRegions:
    """This rank's region and its peers', in rank order. Making it is collective.

    Attributes:
        local: uint8 ``[num_bytes]`` tensor over this rank's region; it keeps the memory alive.
        addresses: base address of each rank's region as mapped in this process.
    """

    def __init__(self, bootstrap: Bootstrap, num_bytes: int, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symm_mem

        error = None
        if bootstrap.process_group is None:
            error = "the CUDA engine needs a torch.distributed ProcessGroup, not a StoreGroup"
        else:
            try:
                self.local = symm_mem.empty(num_bytes, dtype=torch.uint8, device=device)
                self.local.zero_()
                torch.cuda.synchronize(device)
            except RuntimeError as failure:  # torch.OutOfMemoryError is one
                error = f"allocating {num_bytes} bytes of symmetric memory on {device}: {failure}"
        bootstrap.agree("symmetric memory", {}, error)
        error = None
        try:
            self._handle = symm_mem.rendezvous(self.local, bootstrap.process_group)
            self.addresses = [int(address) for address in self._handle.buffer_ptrs]
            if len(self.addresses) != bootstrap.num_ranks:
                error = f"torch mapped {len(self.addresses)} regions for {bootstrap.num_ranks} ranks"
        except RuntimeError as failure:
            error = (
                f"mapping the peers' memory through torch.distributed._symmetric_memory: {failure} (all ranks must be "
                "in one NVLink or CUDA-IPC domain)"
            )
        bootstrap.agree("mapping symmetric memory", {}, error)

    def close(self) -> None:
        """Unmaps the peers; the local memory lives on while a tensor over it does."""
        self._handle = None
        self.local = None
