"""Products with all matrices of the demo model, quantised as in its file, in float32 and in bfloat16, MEASURED.

The contenders take turns and the best time of each counts, so ratios hold on a shared machine. The floor is the time in
which torch sums as many bytes of float32 as the quantised matrices have, with equally warm caches. With --steps, whole
decode steps of an engine are measured instead, each sequence with 256 tokens of context.

python tests/bench/bench_products.py [--steps] [--rows 1 2 4 8 32] [--seconds 5]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from bench_kernels import Contender, best_times

from llmsched.engine.executor.recorded_decodes import MAX_ROWS
from llmsched.engine.executor.torch_executor import TorchExecutor
from llmsched.engine.model.decoder import FusedDecoder
from llmsched.engine.model.loader import load_config, load_model
from llmsched.engine.model.source import locate

#: What the products compute with: type of activations, and whether matrices stay quantised.
FORMS = {
    "quantised": (torch.bfloat16, True),
    "quantised float32": (torch.float32, True),
    "float32": (torch.float32, False),
    "bfloat16": (torch.bfloat16, False),
}
CONTEXT = 256


def load(form: str) -> TorchExecutor:
    dtype, packed = FORMS[form]
    source = locate("demo")
    model = load_model(source, load_config(source), device="cpu", dtype=dtype, packed=packed)
    executor = TorchExecutor(model, num_blocks=1024, block_size=16, device="cpu", kv_dtype=dtype)
    executor.capture(MAX_ROWS, 2 * CONTEXT)
    return executor


def products(decoder: FusedDecoder) -> list[Any]:
    """Return the weights and biases of all products of a decode step, in order."""
    of_layers = [(layer.project, layer.output, *(layer.mlp or ())[:2]) for layer in decoder._layers]
    return [*(product for layer in of_layers for product in layer), decoder._head]


def weights_of(product: Any) -> list[Tensor]:
    """Return the tensors that a product reads, apart from its bias."""
    if isinstance(product.weight, Tensor):
        return [product.weight]
    return [tensor for part in product.weight for tensor in part if tensor is not None]


def all_products(
    executor: TorchExecutor, dtype: torch.dtype, count: int, num_logits: int | None = None
) -> Callable[[], None]:
    """Return a function that multiplies `count` rows by all matrices, and `num_logits` (None: all) by the head."""
    decoder: Any = executor._model
    computed = []
    for product in products(decoder):
        size = (product.weight if isinstance(product.weight, Tensor) else product.weight[0]).shape[1]
        rows = count if num_logits is None or product is not decoder._head else num_logits
        computed.append((product, torch.randn(rows, size).to(dtype)))

    def run() -> None:
        for product, rows in computed:
            product.compute(decoder._kernels, rows)

    return run


def decode_step(executor: TorchExecutor, count: int) -> Callable[[], None]:
    def run() -> None:
        executor.execute(executor.rehearsal([(CONTEXT, 1)] * count))

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", action="store_true", help="measure decode steps")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 32])
    parser.add_argument("--seconds", type=float, default=5.0, help="spent on each number of rows")
    options = parser.parse_args()
    executors = {form: load(form) for form in FORMS}
    kept: Any = executors["quantised"]._model
    num_bytes = sum(tensor.nbytes for product in products(kept) for tensor in weights_of(product))
    stretch = torch.ones(num_bytes // 4)
    what = "decode steps" if options.steps else "products"
    title = f"MEASURED: {what}, {num_bytes / 1e6:.0f} MB, {torch.get_num_threads()} threads, ms (times quantised)"
    table = Table(title=title)
    for column in ("rows", "load", "floor", *FORMS):
        table.add_column(column, justify="right")
    for count in options.rows:
        contenders: dict[str, Contender] = {"floor": stretch.sum}
        for form, executor in executors.items():
            step = decode_step(executor, count) if options.steps else all_products(executor, FORMS[form][0], count)
            contenders[form] = step
        with torch.inference_mode():
            times = best_times(contenders, options.seconds, "cpu")
        cells = [f"{1e3 * times[name]:.1f} ({times[name] / times['quantised']:.2f})" for name in contenders]
        table.add_row(str(count), f"{os.getloadavg()[0]:.1f}", *cells)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
