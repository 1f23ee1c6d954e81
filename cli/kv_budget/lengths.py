"""How long requests are, as a file tells it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from llmsched.cli.load.traces.read import read_trace
from llmsched.cli.load.traces.rows import TraceError
from llmsched.engine.errors import ConfigError
from llmsched.engine.memory.concurrency import LengthDistribution


def read_lengths(path: Path) -> LengthDistribution:
    """The lengths of a file that `bench --trace` reads as such, or of a trace, whose times and contents do not matter.

    Output of no tokens counts as one: a request ends with the token that ends it. Raises ConfigError.
    """
    try:
        requests = read_trace(path, "lengths").requests
    except TraceError as problem:
        raise ConfigError("lengths", problem.message) from problem
    prompts = np.array([request.input_len for request in requests], dtype=np.int64)
    outputs = np.array([r.output_len for r in requests if r.output_len is not None], dtype=np.int64)
    if len(outputs) not in (0, len(prompts)):
        raise ConfigError("lengths", f"{path} has outputs for {len(outputs)} of {len(prompts)} requests; give all")
    return LengthDistribution(path.name, np.maximum(1, prompts), np.maximum(1, outputs) if len(outputs) else None)
