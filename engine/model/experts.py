"""Recognition of a transformers model's mixture of experts: weights, the router's rule, and the experts' gate."""
# Routers differ in few things: how logits become scores, how experts are chosen, and whether weights are normalised.
# Names do not say which, so the model's module is run on random rows, and the rule that gives the same weights is
# taken. Then the outputs of the whole module are compared.

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, product
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from llmsched.engine.model.host_experts import HostExperts
from llmsched.engine.model.modules import UnknownStructureError
from llmsched.engine.model.packed_experts import PackedExperts, gate_of
from llmsched.kernels import reference
from llmsched.kernels.experts import Gate, Matrices, Routing

#: Random rows for which the weights of experts are compared, and rows for which outputs are compared.
ROUTED_ROWS, COMPUTED_ROWS = 64, 4
#: Largest difference in the median row, relative to the size of the row, in float32 and in 16-bit types.
TOLERANCE, TOLERANCE_16 = 1e-3, 0.03

_BIASES = ("gate_up_proj_bias", "down_proj_bias")


class ExpertParts(NamedTuple):
    """Weights and rules of a mixture of experts, see `reference.route` and `reference.run_experts`."""

    router: Tensor  # [E, N]
    router_bias: Tensor | None  # [E]
    router_type: torch.dtype  # in which logits are computed
    routing: Routing
    correction: Tensor | None
    up: Matrices
    down: Matrices
    gate: Gate
    up_bias: Tensor | None
    down_bias: Tensor | None
    host: HostExperts | None = None  # None if all matrices are on the device

    def compute(self, kernels: Any, rows: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts' outputs for each row of `rows` [T, N]."""
        bias = None if self.router_bias is None else self.router_bias.to(self.router_type)
        chosen, weights = kernels.route(
            kernels.linear(rows.to(self.router_type), self.router.to(self.router_type), bias),
            self.routing,
            self.correction,
        )
        biases = {"up_bias": self.up_bias, "down_bias": self.down_bias}
        up, down = self.up, self.down
        if self.host is not None:
            experts = chosen.unique().tolist()
            up, down = (self.host.routed(each, experts, len(self.router)) for each in (up, down))
        output: Tensor = kernels.run_experts(rows, chosen, weights, up, down, gate=self.gate, **biases)
        return output


def read_experts(block: nn.Module, parts: Mapping[str, nn.Module], config: Any) -> ExpertParts:
    """Read a module with the children "router", "experts" and maybe "shared" and "shared_gate" in `parts`.

    Raises UnknownStructureError for a module that cannot be computed.
    """
    experts = parts["experts"]
    own = _router_tensors(block, parts["router"])
    router = own["weight"]
    up, down = _matrices(experts, *router.shape)
    weights = {name: parameter.detach() for name, parameter in experts.named_parameters()}
    correction = own["e_score_correction_bias"].float() if "e_score_correction_bias" in own else None
    router_type, routing = _find_routing(block, experts, router, config, correction)
    up_bias, down_bias = (weights.get(name) for name in _BIASES)
    rules = router_type, routing, correction
    host: HostExperts | None = getattr(experts, "host_experts", None)
    made = ExpertParts(router, own.get("bias"), *rules, up, down, gate_of(experts), up_bias, down_bias, host)
    _compare(made, block, parts)
    return made


def _matrices(experts: nn.Module, num_experts: int, hidden: int) -> tuple[Matrices, Matrices]:
    """Return the matrices of the experts' first and second products."""
    if isinstance(experts, PackedExperts):
        return experts.up.matrix, experts.down.matrix
    weights = {name: parameter.detach() for name, parameter in experts.named_parameters()}
    if not {"gate_up_proj", "down_proj"} <= weights.keys() <= {"gate_up_proj", "down_proj", *_BIASES}:
        raise UnknownStructureError(f"experts ({type(experts).__name__}) have parameters {', '.join(sorted(weights))}")
    up, down = weights["gate_up_proj"], weights["down_proj"]
    if getattr(experts, "is_transposed", up.shape[2] != hidden):  # gpt-oss
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    if (len(up), up.shape[2]) != (num_experts, hidden) or down.shape != (num_experts, hidden, up.shape[1] // 2):
        raise UnknownStructureError(f"experts have weights of {tuple(up.shape)} and {tuple(down.shape)}")
    return up, down


def _router_tensors(block: nn.Module, router: nn.Module) -> dict[str, Tensor]:
    """Return the router's parameters and buffers by the last part of their names, among them "weight"."""
    named = chain(router.named_parameters(), router.named_buffers(), block.named_buffers(recurse=False))
    tensors = {name.rpartition(".")[2]: tensor.detach() for name, tensor in named}
    if "weight" not in tensors or not tensors.keys() <= {"weight", "bias", "e_score_correction_bias"}:
        found = ", ".join(sorted(tensors)) or "no weights"
        raise UnknownStructureError(f"a router ({type(router).__name__}) has {found}")
    return tensors


class _Reached(Exception):  # noqa: N818
    """Exception that ends a run of a module at its experts."""

    def __init__(self, chosen: Tensor, weights: Tensor) -> None:
        super().__init__()
        self.chosen, self.weights = chosen, weights


class _RouterProduct(TorchFunctionMode):
    """Mode that keeps the type of the factors and the result of the last product with a matrix of `shape`."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self._shape = shape
        self.found: tuple[torch.dtype, Tensor] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is F.linear and args[1].shape == self._shape:
            self.found = args[0].dtype, result
        return result


def _find_routing(
    block: nn.Module, experts: nn.Module, router: Tensor, config: Any, correction: Tensor | None
) -> tuple[torch.dtype, Routing]:
    """Return the type in which the module computes logits, and its rule."""

    def stop(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        if len(args) + len(kwargs) != 3:
            raise UnknownStructureError(f"{type(module).__name__} takes {len(args) + len(kwargs)} arguments")
        _, first, second = (*args, *kwargs.values())
        raise _Reached(*((second, first) if first.is_floating_point() else (first, second)))

    hook, rows = experts.register_forward_pre_hook(stop, with_kwargs=True), _random_rows(experts, router, ROUTED_ROWS)
    try:
        with torch.inference_mode(), _RouterProduct(router.shape) as mode:
            block(rows[None])
    except _Reached as reached:
        chosen, weights = reached.chosen.long(), reached.weights.float()
    finally:
        hook.remove()
    if mode.found is None or chosen.shape != weights.shape:
        raise UnknownStructureError(f"the router of {type(block).__name__} is unknown")
    kind, logits = mode.found
    expected = torch.zeros_like(logits, dtype=torch.float32).scatter_(1, chosen, weights)
    differences = {}
    for rule in _rules(config, chosen.shape[1], len(router)):
        numbers, shares = reference.route(logits, rule, correction)
        differences[rule] = _differences(torch.zeros_like(expected).scatter_(1, numbers.long(), shares), expected)
    best = min(differences, key=lambda rule: float(differences[rule].mean()))
    if not float(differences[best].median()) <= _tolerance(rows):
        raise UnknownStructureError(f"the router of {type(block).__name__} follows no known rule")
    return kind, best


def _rules(config: Any, chosen: int, num_experts: int) -> Iterator[Routing]:
    """Yield the rules that a model with this config may have."""
    groups, chosen_groups = getattr(config, "n_group", None) or 1, getattr(config, "topk_group", None) or 1
    factors = dict.fromkeys([float(getattr(config, "routed_scaling_factor", None) or 1), 1.0])
    limits = [(1, 1, 1)]
    if groups > 1:
        limits += [(groups, chosen_groups, best) for best in (1, 2) if best <= num_experts // groups]
    scores: tuple[Literal["softmax", "sigmoid"], ...] = ("softmax", "sigmoid")
    for score, normalised, factor, limit in product(scores, (True, False), factors, limits):
        yield Routing(chosen, score, normalised, factor, *limit)


def _compare(made: ExpertParts, block: Any, parts: Mapping[str, nn.Module]) -> None:
    """Raise UnknownStructureError if the parts give other outputs than the module."""
    rows = _random_rows(parts["experts"], made.router, COMPUTED_ROWS)
    with torch.inference_mode():
        outputs = block(rows[None])
        expected = (outputs[0] if isinstance(outputs, tuple) else outputs)[0]
        found = made.compute(reference, rows)
        if "shared" in parts:
            shared = parts["shared"](rows)
            found += shared * parts["shared_gate"](rows).sigmoid() if "shared_gate" in parts else shared
    difference = float(_differences(found, expected).median())  # rounding may choose other experts for a row
    if not difference <= _tolerance(rows):
        raise UnknownStructureError(f"outputs of {type(block).__name__} would differ by {difference:.2g}")


def _random_rows(experts: nn.Module, router: Tensor, count: int) -> Tensor:
    rows = torch.randn(count, router.shape[1], generator=torch.Generator().manual_seed(0))
    return rows.to(router.device, next(experts.parameters(), router).dtype)


def _differences(found: Tensor, expected: Tensor) -> Tensor:
    """Return the norm of the difference of each row, relative to the row."""
    sizes: Tensor = expected.float().norm(dim=1).clamp(min=torch.finfo(torch.float32).tiny)
    differences: Tensor = (found.float() - expected.float()).norm(dim=1)
    return differences / sizes


def _tolerance(rows: Tensor) -> float:
    return TOLERANCE if rows.dtype == torch.float32 else TOLERANCE_16
