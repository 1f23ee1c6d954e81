"""One part in its own process: `python -m gpu_suite.part NAME DEVICE FILE`. On a CPU, sizes are tiny.

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
    """Part of the suite; `budget_s` is its time limit. The limits add up to less than 15 minutes."""

    title: str
    module: str
    function: str
    budget_s: float

    def run(self, device: str, *, small: bool = False) -> Iterator[CheckRow]:
        function: Callable[..., Iterator[CheckRow]] = getattr(importlib.import_module(self.module), self.function)
        return function(device, small=small)


#: In the order in which they run: what is wanted most comes first, because the machine may be taken away.
PARTS = {
    "kernels": SuitePart("kernels against the reference", "gpu_suite.kernels", "check_kernels", 120),
    "steps": SuitePart("steps of Llama-3.1-8B's shape in bf16", "gpu_suite.steps", "measure_steps", 230),
    "serving": SuitePart("the same model, built and served", "gpu_suite.serving", "measure_serving", 170),
    "speed": SuitePart("bandwidth, products and attention alone", "gpu_suite.speed", "measure_speed", 40),
    "memory": SuitePart("planned and actual memory", "gpu_suite.memory", "check_memory", 60),
    "parity": SuitePart("engine against transformers", "gpu_suite.parity", "check_models", 135),
    "swap": SuitePart("KV blocks to host memory and back", "gpu_suite.swap", "check_swap", 20),
    "peers": SuitePart("the same model in transformers' generate", "gpu_suite.peers", "measure_peers", 120),
}


def main() -> None:
    name, device, file = sys.argv[1:]
    with Path(file).open("w", encoding="utf-8") as out:

        def write(row: CheckRow) -> None:
            out.write(json.dumps(row.as_dict()) + "\n")
            out.flush()

        try:
            for row in PARTS[name].run(device, small=device != "cuda"):
                write(row)
        except Exception as error:
            write(failure("the part itself", error))
            raise


if __name__ == "__main__":
    main()
