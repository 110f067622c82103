# Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
"""Every case of the table, on the engine under test."""

from __future__ import annotations

import collections

import checks
import pytest
from cases import CASES, PATHS, Case

pytestmark = [pytest.mark.cpu, pytest.mark.gpu]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(run_ranks, case: Case):
    run_ranks(case.num_ranks, checks.run_case, case, limit_s=case.limit_s)


def test_names_are_unique():
    repeated = [name for name, count in collections.Counter(case.name for case in CASES).items() if count > 1]
    assert not repeated


def test_table_covers_every_path_on_every_number_of_ranks():
    for num_ranks in (1, 2, 3, 4, 8):
        variants = {case.name.rsplit("-", 1)[1] for case in CASES if case.num_ranks == num_ranks}
        assert variants >= set(PATHS), f"{num_ranks} ranks"
