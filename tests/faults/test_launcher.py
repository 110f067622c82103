# Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
"""The launcher of rank processes: failures are shown, hangs are bounded, nothing is left running."""

from __future__ import annotations

import os
import time

import pytest
from launcher import Pool, Rank, RanksFailedError

pytestmark = [pytest.mark.cpu]


def _hangs(context: Rank) -> None:
    if context.rank == 1:
        time.sleep(60)


def _fails(context: Rank) -> None:
    if context.rank == 1:
        raise ValueError("a failure on purpose")
    time.sleep(60)


def _does_not_raise(context: Rank) -> None:
    with pytest.raises(ValueError):
        pass


def _ends(context: Rank) -> None:
    if context.rank == 0:
        os._exit(5)


def _answers(context: Rank, value: int) -> tuple[int, int, int]:
    return context.rank, context.num_ranks, value


def _is_running(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}/exe")


def test_shows_where_a_rank_hangs():
    pool = Pool(2)
    pids = pool.pids
    with pytest.raises(RanksFailedError, match=r"rank 1 had not finished(.|\n)*in _hangs"):
        pool.run(_hangs, limit_s=1)
    assert not pool.is_usable
    assert not any(map(_is_running, pids))


def test_does_not_wait_long_for_the_others():
    pool = Pool(2)
    begin = time.monotonic()
    with pytest.raises(
        RanksFailedError, match=r"rank 1 failed(.|\n)*a failure on purpose(.|\n)*rank 0 had not"
    ) as caught:
        pool.run(_fails, limit_s=50)
    assert time.monotonic() - begin < 10
    assert "in _fails" in str(caught.value)


def test_shows_a_raise_that_did_not_come():
    with pytest.raises(RanksFailedError, match=r"rank 0 failed(.|\n)*DID NOT RAISE(.|\n)*rank 1 failed"):
        Pool(2).run(_does_not_raise, limit_s=20)


def test_shows_an_exit():
    with pytest.raises(RanksFailedError, match=r"rank 0 failed(.|\n)*exit code 5"):
        Pool(2).run(_ends, limit_s=20)


def test_close_ends_the_processes():
    pool = Pool(2)
    pids = pool.pids
    assert pool.run(_answers, 7, limit_s=20) == [(0, 2, 7), (1, 2, 7)]
    assert all(map(_is_running, pids))
    pool.close()
    pool.close()
    assert pool.exit_codes(0) == [0, 0]
    assert not any(map(_is_running, pids))


def test_pools_are_reused_and_replaced_after_a_failure(run_ranks, pools):
    assert run_ranks(2, _answers, 1) == [(0, 2, 1), (1, 2, 1)]
    pids = pools.get(2).pids
    assert run_ranks(2, _answers, 2) == [(0, 2, 2), (1, 2, 2)]
    assert pools.get(2).pids == pids
    with pytest.raises(pytest.fail.Exception, match="exit code 5"):
        run_ranks(2, _ends)
    assert run_ranks(2, _answers, 3) == [(0, 2, 3), (1, 2, 3)]
    assert not set(pools.get(2).pids) & set(pids)
