"""Table of model families for users: how each is served, as found by running a small model of it.

`python tests/support/family_table.py` writes the table anew.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from stepping import Stepper, make_sequence
from tiny_models import ARCHITECTURES, RARE_ARCHITECTURES, RECURRENT, REFUSED_ARCHITECTURES, VOCAB_SIZE, build_model

from llmsched.engine.architecture.geometry import Geometry, kv_geometry
from llmsched.engine.executor.torch_executor import TorchExecutor
from llmsched.engine.kv.layout import KVLayout
from llmsched.engine.model.support import refusal

FILE = Path(__file__).parents[2] / "cli" / "serve" / "FAMILIES.md"
SERVED = [*ARCHITECTURES, *RARE_ARCHITECTURES, *RECURRENT]
LENGTHS = (37, 5, 64)

_HEAD = """# Model families

This table lists model families by the `model_type` in config.json. `python tests/support/family_table.py` writes it,
and a test that runs a small random model of each family fails if the table is out of date. Each served model in it
gives the logits of transformers within 1e-4 in float32, for mixed and for chunked prompts.

- fused: the engine's own decoder computes the layers. This is the fast path.
- transformers: the modules of transformers compute the layers, with the engine's attention and KV cache.
- refused: `serve` and `kv-budget` give this reason.

KV says what layers keep: the keys and values of all tokens (full), or of the last tokens (window), a latent vector per
token from which keys and values are computed (latent), or a recurrent state per sequence (state). Other decoders that
use transformers' attention interface are served too. `llmsched verify MODEL` checks any model.

Of multimodal checkpoints with the types gemma3, gemma3n, gemma4, mistral3, qwen3_5 and qwen3_5_moe, the text part is
served: it is loaded and planned as a model of the text type in the table, without encoders for images and sound.

| model_type | class | served | KV |
| --- | --- | --- | --- |
"""


@cache
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(4, VOCAB_SIZE, (length,), generator=generator).tolist() for length in LENGTHS]


@cache
def executor(arch: str) -> TorchExecutor:
    model = build_model(arch, seed=3)
    sizes = {"num_blocks": 120, "block_size": 4, "num_states": len(LENGTHS)}
    layout = KVLayout(4, full_groups=bool(kv_geometry(model.config).caches_kv))
    return TorchExecutor(model, **sizes, layout=layout, device="cpu", kv_dtype=torch.float32)


def difference(arch: str, chunks: tuple[int, ...]) -> float:
    """Return the greatest difference of a small model's logits from those of transformers with eager attention."""
    sequences = [make_sequence(str(index), prompt) for index, prompt in enumerate(prompts())]
    found = Stepper(executor(arch), sequences, max(LENGTHS), seed=len(chunks)).logits(chunks)
    model = build_model(arch, seed=3)
    model.set_attn_implementation("sdpa" if model.config.model_type == "falcon" else "eager")
    with torch.inference_mode():
        expected = [model(input_ids=torch.tensor([prompt])).logits[0] for prompt in prompts()]
    return max(float((one - other).abs().max()) for one, other in zip(found, expected, strict=True))


@cache
def served_row(arch: str) -> str:
    model = build_model(arch, seed=3)
    kv = _kv(kv_geometry(model.config), model.config.get_text_config().num_hidden_layers)
    return _row(model.config.model_type, type(model).__name__, executor(arch).model_impl, kv)


def refused_row(model_type: str) -> str:
    content = {"model_type": model_type, "architectures": [REFUSED_ARCHITECTURES[model_type]]}
    reason = refusal(content)
    assert reason is not None, f"{model_type} is no longer refused: move it to RARE_ARCHITECTURES"
    name = REFUSED_ARCHITECTURES[model_type]
    return _row(model_type, name, f"refused: {reason.partition('; ')[0].removeprefix(name).strip()}", "")


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |\n"


def _kv(geometry: Geometry, layers: int) -> str:
    kinds = " and ".join(dict.fromkeys(group.kind for group in geometry.groups)).replace("mla", "latent (MLA)")
    attention = [group for group in geometry.groups if group.kind != "state"]
    if len({(group.kv_heads, group.head_dim_k) for group in attention}) > 1:
        kinds += ", of different shapes"
    shared = layers - sum(group.layers for group in attention)
    return kinds + (", some layers share that of others" if shared and len(attention) == len(geometry.groups) else "")


def table() -> str:
    rows = sorted({served_row(arch) for arch in SERVED})
    return _HEAD + "".join([*rows, *map(refused_row, REFUSED_ARCHITECTURES)])


if __name__ == "__main__":
    FILE.write_text(table(), encoding="utf-8")
