"""One part in its own process: `python -m gpu_suite.part NAME DEVICE FILE`.

Appends each row to FILE as soon as it is there, one JSON document a line, so that a part that dies leaves its results.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gpu_suite.rows import CheckRow, failure


@dataclass(frozen=True)
class SuitePart:
    """Part of the suite; `budget_s` is its time limit. The limits add up to less than eight minutes."""

    title: str
    module: str
    function: str
    budget_s: float

    def run(self, device: str, *, small: bool = False) -> Iterator[CheckRow]:
        function: Callable[..., Iterator[CheckRow]] = getattr(importlib.import_module(self.module), self.function)
        return function(device, small=small)


PARTS = {
    "kernels": SuitePart("kernels against the reference", "gpu_suite.attention", "check_kernels", 130),
    "parity": SuitePart("engine against transformers", "gpu_suite.parity", "check_models", 130),
    "swap": SuitePart("KV blocks to host memory and back", "gpu_suite.swap", "check_swap", 15),
    "memory": SuitePart("planned and actual memory", "gpu_suite.memory", "check_memory", 60),
    "speed": SuitePart("Llama-3.1-8B's shape in bf16", "gpu_suite.speed", "measure_speed", 140),
}


def main() -> None:
    name, device, file = sys.argv[1:]
    with Path(file).open("w", encoding="utf-8") as out:

        def write(row: CheckRow) -> None:
            out.write(json.dumps(row.as_dict()) + "\n")
            out.flush()

        try:
            for row in PARTS[name].run(device):
                write(row)
        except Exception as error:
            write(failure("the part itself", error))
            raise


if __name__ == "__main__":
    main()
