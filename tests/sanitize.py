# Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
"""Small cases of every kernel variant for compute-sanitizer, all ranks in one process:

PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tests/sanitize.py
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys

sys.path[:0] = [str(pathlib.Path(__file__).parent), str(pathlib.Path(__file__).parent / "engine")]

from cases import VARIANTS, Case
from test_serial_ranks import run_serial_case

from mscclpp_dispatcher import CopyPath, Payload


@dataclasses.dataclass(frozen=True, kw_only=True)
class PathCase(Case):
    """A case with the copy path of dispatch."""

    copy_path: CopyPath

    def config(self):
        return dataclasses.replace(super().config(), copy_path=self.copy_path)


def main() -> None:
    num_cases = 0
    for name, variant in VARIANTS.items():
        for copy_path in (CopyPath.TMA, CopyPath.PLAIN):
            for payload in Payload:
                case = PathCase(
                    name=f"{name}_{copy_path.value}_{payload.value}",
                    num_tokens=(5, 0, 3),
                    num_experts=7,
                    num_topk=3,
                    hidden=72,
                    routing="repeated",
                    payload=payload,
                    copy_path=copy_path,
                    num_rounds=2,
                    **variant,
                )
                run_serial_case(case, "cuda:0")
                num_cases += 1
    print(f"{num_cases} cases exact")


if __name__ == "__main__":
    main()
