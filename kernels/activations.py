"""Activation functions of MLPs, in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

#: Names of activation functions: gelu_tanh is GELU with the approximation by tanh, relu2 the square of ReLU.
Activation = Literal["silu", "gelu", "gelu_tanh", "relu2"]
ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}
