"""Time of a decode step's matrix products beside other busy programs, by how long OpenMP threads spin while they wait.

python tests/bench/bench_neighbours.py [GOMP_SPINCOUNT ...]

Takes about a minute. The products have SmolLM2-135M's shapes in bfloat16. Each setting has a process of its own, and
"default" is libgomp's own. The processes take turns of half a second, so that all meet the same machine. A neighbour is
`python -c 'while True: pass'`. Only on a quiet machine does the first column tell what a setting costs.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time

from llmsched.engine.device import SPIN_COUNT

BATCHES, NEIGHBOURS, ROUNDS, SECONDS = (1, 32), (0, 1, 2), 4, 0.5
LAYERS, SHAPES = 30, ((960, 576), (576, 576), (3072, 576), (576, 1536))


def measure() -> None:
    """Print the seconds of the steps of one turn for each batch size that comes on stdin."""
    import torch
    import torch.nn.functional as F

    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator).bfloat16() for _ in range(LAYERS) for shape in SHAPES]
    for line in sys.stdin:
        inputs = {width: torch.ones(int(line), width, dtype=torch.bfloat16) for _, width in SHAPES}
        times: list[float] = []
        end = time.perf_counter() + SECONDS
        with torch.inference_mode():
            while (start := time.perf_counter()) < end or len(times) < 2:
                for weight in weights:
                    F.linear(inputs[weight.shape[1]], weight)
                times.append(time.perf_counter() - start)
        print(json.dumps(times[1:]), flush=True)


def turn(worker: subprocess.Popen[str], batch: int) -> list[float]:
    """Let a worker measure one batch size and return its times in seconds."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    print(batch, file=worker.stdin, flush=True)
    times: list[float] = json.loads(worker.stdout.readline())
    return times


def main() -> None:
    settings = sys.argv[1:] or ["default", "0", str(SPIN_COUNT), str(10 * SPIN_COUNT)]
    workers, times = {}, {}
    for setting in settings:
        environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
        environment |= {} if setting == "default" else {"GOMP_SPINCOUNT": setting}
        command, pipe = [sys.executable, __file__, "--measure"], subprocess.PIPE
        workers[setting] = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)
    for worker in workers.values():
        turn(worker, 1)
    for _ in range(ROUNDS):
        for count in NEIGHBOURS:
            loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
            for batch in BATCHES:
                for setting, worker in workers.items():
                    times.setdefault((setting, batch, count), []).extend(turn(worker, batch))
            for loop in loops:
                loop.kill()
                loop.wait()
    for worker in workers.values():
        worker.kill()
        worker.wait()
    print(f"MEASURED ms of a step, median (least); {os.cpu_count()} CPUs, load average {os.getloadavg()[0]:.1f}")
    print("GOMP_SPINCOUNT  batch" + "".join(f"  {count} neighbours   " for count in NEIGHBOURS))
    for batch in BATCHES:
        for setting in settings:
            cells = [times[setting, batch, count] for count in NEIGHBOURS]
            row = "".join(f"{statistics.median(cell) * 1e3:8.1f} ({min(cell) * 1e3:5.1f})" for cell in cells)
            print(f"{setting:>14}  {batch:5}{row}")


if __name__ == "__main__":
    if sys.argv[1:] == ["--measure"]:
        measure()
    else:
        main()
