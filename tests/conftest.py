# Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
"""Markers and the fixtures that start rank processes.

Marks say which engine a test needs: ``cpu``, ``gpu``, both (it runs on the engine that
MSCCLPP_DISPATCHER_TEST_DEVICE selects) or neither (it needs no engine).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import launcher
import pytest
import torch

CPU_LIMIT_S, GPU_LIMIT_S = 20.0, 10.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    is_cuda = launcher.DEVICE_TYPE == "cuda"
    for item in items:
        on_cpu, on_gpu = (item.get_closest_marker(name) is not None for name in ("cpu", "gpu"))
        if on_gpu and not on_cpu and not is_cuda:
            item.add_marker(pytest.mark.skip(reason="needs MSCCLPP_DISPATCHER_TEST_DEVICE=cuda"))
        elif on_cpu and not on_gpu and is_cuda:
            item.add_marker(pytest.mark.skip(reason="tests the CPU engine; the engine under test is cuda"))
        elif on_gpu and is_cuda and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="torch finds no CUDA device"))


@pytest.fixture(scope="session")
def pools() -> Iterator[launcher.Pools]:
    """The session's rank processes."""
    pools = launcher.Pools()
    yield pools
    pools.close()


@pytest.fixture
def run_ranks(pools: launcher.Pools) -> Callable[..., list[Any]]:
    """``run_ranks(num_ranks, function, *args, limit_s=...)``: the results of all ranks, or a failure."""

    def run(num_ranks: int, function: Callable[..., Any], *args: Any, limit_s: float | None = None) -> list[Any]:
        if num_ranks > launcher.MAX_RANKS:
            pytest.skip(f"{num_ranks} ranks; at most {launcher.MAX_RANKS} asked for")
        if limit_s is None:
            limit_s = GPU_LIMIT_S if launcher.DEVICE_TYPE == "cuda" else CPU_LIMIT_S
        try:
            return pools.get(num_ranks).run(function, *args, limit_s=limit_s)
        except launcher.RanksFailedError as failure:
            report = str(failure)
        pytest.fail(report, pytrace=False)

    return run


@pytest.fixture
def fresh_pool() -> Iterator[Callable[[int], launcher.Pool]]:
    """``fresh_pool(num_ranks)``: processes of this test alone, for faults."""
    made: list[launcher.Pool] = []

    def make(num_ranks: int) -> launcher.Pool:
        if num_ranks > launcher.MAX_RANKS:
            pytest.skip(f"{num_ranks} ranks; at most {launcher.MAX_RANKS} asked for")
        made.append(launcher.Pool(num_ranks))
        return made[-1]

    yield make
    for pool in made:
        pool.close()
