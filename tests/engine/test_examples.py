# Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
"""The example programs run as their first lines say."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.cpu]

EXAMPLES = sorted((pathlib.Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path: pathlib.Path):
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    run = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=100, check=False, env=environment
    )
    assert run.returncode == 0, run.stderr
    for rank in range(2):
        assert f"rank {rank}: " in run.stdout
