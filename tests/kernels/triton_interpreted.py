"""Run by test_triton.py in a process of its own with TRITON_INTERPRET=1: the Triton kernels on the CPU.

The variable must be set before triton is imported, and would spoil compilation in the tests' own process. Prints one
JSON object: for each case the greatest difference from the reference. bfloat16 is left out: the interpreter's
arithmetic for it is wrong.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from batches import Batch, Shape, make_batch
from triton.runtime import interpreter

from llmsched.kernels import reference
from llmsched.kernels.triton import ops
from llmsched.kernels.triton.tiling import Tiling, choose_tiling

FEW = ((1, 37), (16, 16), (15, 40), (0, 9), (1, 1), (17, 17), (1, 100), (3, 33))
DECODES = ((1, 1), (1, 16), (1, 17), (1, 150), (1, 300))

SHAPES = (
    Shape("mixed", FEW),
    Shape("decodes", DECODES),
    Shape("chunk of a long context", ((24, 150),)),
    Shape("all heads alike", FEW, heads=2, kv_heads=2),
    Shape("three heads to one", FEW, heads=9, kv_heads=3),
    Shape("eight heads to one", FEW, heads=8, kv_heads=1),
    Shape("head_dim 80", FEW, head_dim=80),
    Shape("head_dim 96", FEW, head_dim=96),
    Shape("head_dim 128", FEW, head_dim=128),
    Shape("head_dim 256", FEW[:4], heads=2, kv_heads=1, head_dim=256),
    Shape("values narrower than keys", FEW, head_dim=96, value_dim=48),
    Shape("block_size 32", FEW, block_size=32),
    Shape("block_size 8", FEW, block_size=8),
    Shape("window 1", FEW, window=1),
    Shape("window below a block", FEW, window=5),
    Shape("window across blocks", FEW, window=37),
    Shape("window beyond the context", FEW, window=1000),
    Shape("softcap", FEW, softcap=3.0),
    Shape("sinks", FEW, sinks=True),
    Shape("softcap, sinks and window", FEW, softcap=3.0, sinks=True, window=20),
)
SPLIT = ("decodes", "chunk of a long context", "softcap, sinks and window", "window below a block")


def tiling(shape: Shape, batch: Batch, **change: int) -> Tiling:
    chosen = choose_tiling(
        num_tokens=batch.query.shape[0],
        num_sequences=len(shape.sequences),
        kv_heads=shape.kv_heads,
        group=shape.heads // shape.kv_heads,
        head_dim=shape.head_dim,
        value_dim=shape.value_dim or shape.head_dim,
        max_context=batch.block_tables.shape[1] * shape.block_size,
        item_size=batch.query.element_size(),
        num_processors=1,
    )
    return chosen._replace(**change)


def attention_difference(shape: Shape, dtype: torch.dtype, **change: int) -> float:
    batch = make_batch(shape, dtype=dtype)
    expected = reference.paged_attention(*batch.tensors, **batch.options)
    options = {"sinks": None, **batch.options}
    query = batch.query.transpose(0, 1).contiguous().transpose(0, 1)  # strided, as transformers hands it over
    actual = ops.attend(query, *batch.tensors[1:], **options, tiling=tiling(shape, batch, **change))
    return float((actual.float() - expected.float()).abs().max())


def write_difference() -> float:
    generator = torch.Generator().manual_seed(0)
    key, value = (torch.randn(3, 6, d, generator=generator).transpose(0, 1) for d in (80, 48))
    caches = [torch.randn(5, 3, 16, d, generator=generator).half() for d in (80, 48)]
    expected = [cache.clone() for cache in caches]
    slots = torch.tensor([79, 0, -1, 17, 32, 3])
    reference.write_kv(key, value, *expected, slots)
    ops.write_kv(key, value, *caches, slots)
    return max(float((a.float() - b.float()).abs().max()) for a, b in zip(caches, expected, strict=True))


def mend_the_interpreter() -> None:
    """Triton 3.6 makes a loop's bound of an array with one element, which NumPy 2.4 no longer does by itself."""
    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_and_mend


def main() -> None:
    torch.set_num_threads(1)
    mend_the_interpreter()
    differences = {"write_kv": write_difference()}
    for shape in SHAPES:
        differences[f"{shape}, float32"] = attention_difference(shape, torch.float32)
        if shape.name in SPLIT:
            differences[f"{shape}, float32, 5 splits"] = attention_difference(shape, torch.float32, splits=5)
    differences["mixed, float16"] = attention_difference(SHAPES[0], torch.float16)
    differences["decodes, float16, 3 splits"] = attention_difference(SHAPES[1], torch.float16, splits=3)
    print(json.dumps(differences))


if __name__ == "__main__":
    main()
