# Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
"""The contract of an engine: what the Dispatcher asks of the code that moves the bytes.

Arguments are already checked (validation.py). One handle goes through the four halves in order; a
whole ``dispatch`` or ``combine`` is its two halves in one launch.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch

from mscclpp_dispatcher.types import DispatchHandle, DispatchOutput


@dataclasses.dataclass(frozen=True)
class Capabilities:
    """What an engine can do, for frameworks to ask instead of guessing."""

    name: str
    device_type: str
    is_capturable: bool
    checks_ids: bool


class Engine(Protocol):
    """Moves rows between ranks; owns its buffers and its peers' mappings."""

    capabilities: Capabilities

    def dispatch_send(
        self,
        handle: DispatchHandle,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None,
        *,
        and_recv: bool,
    ) -> None:
        """Sends this rank's rows; with ``and_recv`` also waits for the peers' in the same launch."""

    def dispatch_recv(self, handle: DispatchHandle) -> None:
        """Waits for the rows of all ranks."""

    def output(self, handle: DispatchHandle) -> DispatchOutput:
        """Views of the received rows."""

    def expert_output_buffer(self, handle: DispatchHandle) -> torch.Tensor:
        """The buffer that peers read in combine; experts that write here save a copy."""

    def combine_send(
        self, handle: DispatchHandle, expert_output: torch.Tensor, out: torch.Tensor, *, and_recv: bool
    ) -> None:
        """Offers this rank's expert rows to the peers; with ``and_recv`` also sums into ``out``."""

    def combine_recv(self, handle: DispatchHandle, out: torch.Tensor) -> None:
        """Waits for the peers' rows and sums them into ``out``."""

    def abandon(self, handle: DispatchHandle) -> None:
        """Ends a dispatch without its combine. Collective."""

    def raise_on_fault(self) -> None:
        """Raises what a kernel reported since the last call (bad ids, a peer's time-out)."""

    def synchronize(self) -> None:
        """Waits for all launched work, then does ``raise_on_fault``."""

    def epoch(self, slot: int) -> int:
        """The slot's last executed round."""

    def reset(self) -> None:
        """Collective: back to the state after creation, on all ranks."""

    def buffer_sizes(self) -> dict[str, int]:
        """Bytes of each buffer, by name, with ``total``."""

    def destroy(self) -> None:
        """Releases everything; waits for no peer; may be called twice."""
