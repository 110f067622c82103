# Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
"""The only reader of environment variables; each has its default and meaning here."""

from __future__ import annotations

import os

ALLOW_OVERLAPPING_DEVICES = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""torch's own switch for several ranks on one GPU; set for ``allow_shared_device``."""


def stress_delay_ns() -> int:
    """MSCCLPP_DISPATCHER_STRESS_DELAY_NS: upper bound, in ns, of random delays inside kernels.

    Default 0: none. For stress tests only.
    """
    return _non_negative_int("MSCCLPP_DISPATCHER_STRESS_DELAY_NS", 0)


def allow_overlapping_devices() -> None:
    """Tells torch's symmetric memory that ranks share a device (before the first rendezvous)."""
    os.environ[ALLOW_OVERLAPPING_DEVICES] = "1"


def _non_negative_int(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if not text:
        return default
    if not text.isdecimal():
        raise ValueError(f"environment variable {name} is {text!r}; allowed: an integer of 0 or more")
    return int(text)
