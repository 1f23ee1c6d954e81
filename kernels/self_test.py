"""Quick test that the kernels compile on this machine, and agree with the reference."""

from __future__ import annotations

import torch

from llmsched.kernels import dispatch, reference


def kernel_fault(device: str) -> str | None:
    """Compile attention and write_kv for `device` (cuda or cpu) and run them. Return a fault in words, or None.

    Exceptions of the compiler are passed on.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    query, key, value = random(3, 4, 64), random(3, 2, 64), random(3, 2, 64)
    slots = torch.tensor([16, 17, 18])
    tables, bounds, lengths = (torch.tensor(each, dtype=torch.int32) for each in ([[1]], [0, 3], [3]))
    outputs = []
    for backend, where in ((dispatch, device), (reference, "cpu")):
        caches = [torch.zeros(4, 2, 16, 64, device=where) for _ in range(2)]
        backend.write_kv(key.to(where), value.to(where), *caches, slots.to(where))
        outputs.append(
            backend.paged_attention(
                query.to(where),
                *caches,
                *(each.to(where) for each in (tables, bounds, lengths)),
                scale=0.125,
            ).cpu()
        )
    found, expected = outputs
    difference = float((found - expected).abs().max())
    return None if difference < 1e-2 else f"attention differs from the reference by {difference:.2g}"
