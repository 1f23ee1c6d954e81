"""How much memory the parts of a running engine take, by torch's and the driver's own count."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmsched.engine.memory.plan import MeasuredMemory

if TYPE_CHECKING:
    import torch

    from llmsched.engine.executor.torch_executor import TorchExecutor
    from llmsched.engine.memory.plan import MemoryPlan


def tensor_bytes(model: torch.nn.Module) -> int:
    """Bytes of a model's parameters and buffers; memory that two of them share counts once."""
    storages = {}
    for tensor in (*model.parameters(), *model.buffers()):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def measured_memory(
    weights_bytes: int, executor: TorchExecutor, plan: MemoryPlan, peak_activations: int | None
) -> MeasuredMemory:
    """What an engine takes after its warm-up; `peak_activations` is what that reported.

    The CUDA context is what the driver counts beyond torch's own memory and what others held when the plan was made.
    """
    context = None
    if executor.device.type == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info(executor.device)
        context = max(0, total - free - torch.cuda.memory_reserved(executor.device) - plan.device.used_by_others)
    return MeasuredMemory(weights_bytes, executor.kv_cache_bytes, peak_activations, context)
