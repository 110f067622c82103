# Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
"""docs/field_reports.md names exactly the tests that exist, in the files where they are."""

from __future__ import annotations

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
ROW = re.compile(r"\| B(\d\d) \|.*\| (?:`([\w/.]+)`|same) \| [cgu ]+ \|")


def test_table_is_in_step_with_the_tests():
    listed: dict[str, str] = {}
    file = ""
    for row in ROW.finditer((ROOT / "docs" / "field_reports.md").read_text()):
        file = row[2] or file
        listed[row[1]] = file
    found = {
        (number, str(path.relative_to(ROOT / "tests")))
        for path in (ROOT / "tests").rglob("test_*.py")
        for number in re.findall(r"def test_b(\d\d)_", path.read_text())
    }
    assert found == set(listed.items())
