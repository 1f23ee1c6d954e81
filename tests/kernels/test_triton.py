"""The Triton kernels without a GPU: their results under the interpreter, their code for three generations of GPUs, and
how work is cut up. tests/gpu runs them on the device."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
from batches import Batch, Shape, make_batch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from llmsched.kernels.latents import LatentWidths
from llmsched.kernels.packed_matrix import PackedMatrix
from llmsched.kernels.reference import AttentionShape
from llmsched.kernels.triton import expert_ops, lora, ops, packed_products
from llmsched.kernels.triton import launches as attention
from llmsched.kernels.triton.attention import attend_kernel, join_kernel, write_kernel
from llmsched.kernels.triton.experts import expert_kernel, order_kernel, route_kernel
from llmsched.kernels.triton.layer import activation_kernel, latent_kernel, norm_kernel, rotary_kernel
from llmsched.kernels.triton.packed_products import ROW_LIMITS
from llmsched.kernels.triton.sampling import sample_kernel
from llmsched.kernels.triton.tiling import (
    Gpu,
    Tiling,
    choose_expanded_tiling,
    choose_latent_tiling,
    choose_tiling,
    latent_group,
    padded,
)

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
SHARED_MEMORY = {
    80: 163 * 1024,
    89: 99 * 1024,
    90: 227 * 1024,
    100: 227 * 1024,
    120: 99 * 1024,
}  # bytes a program may have (CUDA programming guide)
MAX_REGISTERS = 255
ITEM_SIZE = {"bf16": 2, "fp16": 2, "fp32": 4}


@pytest.fixture(scope="module", autouse=True)
def interpreted() -> Iterator[subprocess.Popen[str]]:
    """Start the kernels under the interpreter. It takes a minute, so the other tests of this file run meanwhile."""
    script = Path(__file__).with_name("triton_interpreted.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    with subprocess.Popen([sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, text=True) as run:
        yield run
        run.kill()


def compile_ahead(kernel: Any, arch: int, types: dict[str, str], constants: dict[str, Any], **options: int) -> Any:
    """Compile a kernel for a GPU that this machine lacks.

    As a launch would find out, addresses of floating-point tensors and of codes, strides, and the size of a packed
    matrix are multiples of 16.
    """
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    divisible = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if re.match(r"\*(fp|bf)", signature[name]) or name.endswith("_stride") or name in ("codes", "size")
    }
    constexprs = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature=signature, constexprs=constexprs, attrs=divisible)
    options = {"enable_fp_fusion": True, **options}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def attention_kernel(
    arch: int,
    dtype: str,
    head_dim: int,
    *,
    decodes: bool,
    group: int = 4,
    kv_heads: int = 8,
    cached: str = "",
    value_dim: int = 0,
    tiling: Tiling | None = None,
    given: tuple[str, ...] = (),
    **options: Any,
) -> Any:
    """Compile the kernel. Of the arguments that may be None, only those in `given` are not."""
    value_dim = value_dim or head_dim
    tiling = tiling or choose_tiling(
        capability=arch,
        decodes=decodes,
        group=group,
        head_dim=head_dim,
        value_dim=value_dim,
        item_size=ITEM_SIZE[dtype],
    )
    types = {
        **dict.fromkeys(("output", "query", "sinks", "slopes", "rope_query"), f"*{dtype}"),
        **dict.fromkeys(("key_cache", "value_cache", "rope_cache"), f"*{cached or dtype}"),
        **dict.fromkeys(("parts", "stats", "scales"), "*fp32"),
        **dict.fromkeys(("block_tables", "items"), "*i32"),
        **dict.fromkeys(("scale", "softcap"), "fp32"),
        **dict.fromkeys(("query_stride", "head_stride", "rope_stride", "rope_head_stride", "max_blocks"), "i32"),
    }
    constants = {
        "GROUP": group,
        "KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "ROPE_DIM": 0,
        "BLOCK_SIZE": 16,
        "BLOCK_M": tiling.block_m,
        "BLOCK_N": tiling.block_n,
        "BLOCK_D": tiling.block_d,
        "BLOCK_V": tiling.block_v,
        "BLOCK_R": padded(max(1, options.get("ROPE_DIM", 0))),
        "LATENT": False,
        "WINDOW": 0,
        **dict.fromkeys({"sinks", "slopes", "softcap"} - set(given)),
        **({} if cached else {"scales": None}),
        **options,
    }
    launch = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages}
    return compile_ahead(attend_kernel, arch, types, constants, **launch)


def resources(compiled: Any, directory: Path) -> dict[str, int]:
    """Return registers, and bytes of stack (spilled registers) and local memory, per thread."""
    cubin = directory / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    usage = subprocess.run([CUOBJDUMP, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    return {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}


# Compilations take seconds. So every kernel is compiled for every GPU in bfloat16, and for one GPU in other types.
@pytest.mark.parametrize(
    ("arch", "dtype", "head_dim", "decodes"),
    [
        *((arch, "bf16", *sizes) for arch in (80, 89, 90) for sizes in ((64, True), (128, False))),
        (89, "fp16", 64, False),
        (90, "fp16", 128, True),
        (80, "fp32", 128, True),
    ],
)
def test_attention_compiles_within_the_gpus_limits(
    arch: int, dtype: str, head_dim: int, decodes: bool, tmp_path: Path
) -> None:
    compiled = attention_kernel(arch, dtype, head_dim, decodes=decodes)
    assert compiled.metadata.shared <= SHARED_MEMORY[arch]
    used = resources(compiled, tmp_path)
    assert used["REG"] <= MAX_REGISTERS
    assert used["STACK"] == used["LOCAL"] == 0
    tensor_cores = re.search(r"mma\.sync|wgmma\.mma_async", compiled.asm["ptx"]) is not None
    assert tensor_cores == (dtype != "fp32")
    assert "tf32" not in compiled.asm["ptx"]


#: Types of fp8 caches by compute capability.
FP8_TYPES = {80: ("fp8e5",), 89: ("fp8e4nv", "fp8e5"), 90: ("fp8e4nv", "fp8e5")}


@pytest.mark.parametrize(
    ("arch", "cached", "dtype", "head_dim", "decodes"),
    [
        (80, "fp8e5", "bf16", 128, False),
        (89, "fp8e4nv", "fp16", 64, True),
        (90, "fp8e4nv", "bf16", 128, False),
        (90, "fp8e5", "fp16", 64, True),
    ],
)
def test_attention_over_fp8_compiles_within_the_gpus_limits(
    arch: int, cached: str, dtype: str, head_dim: int, decodes: bool, tmp_path: Path
) -> None:
    compiled = attention_kernel(arch, dtype, head_dim, decodes=decodes, cached=cached)
    assert compiled.metadata.shared <= SHARED_MEMORY[arch]
    used = resources(compiled, tmp_path)
    assert used["REG"] <= MAX_REGISTERS
    assert used["STACK"] == used["LOCAL"] == 0


#: Latent attention of DeepSeek-V2-Lite and Kimi-K2, GLM-4.7-Flash, and MiniCPM3: heads and widths.
LATENT = {
    "DeepSeek-V2-Lite": (16, LatentWidths(512, 64, 128, 128)),
    "Kimi-K2": (64, LatentWidths(512, 64, 128, 128)),
    "GLM-4.7-Flash": (20, LatentWidths(512, 64, 192, 256)),
    "MiniCPM3": (40, LatentWidths(256, 32, 64, 64)),
}


def latent_kernels(arch: int, dtype: str, name: str, cached: str = "") -> dict[str, Any]:
    """Compile the kernels of absorbed and of expanded latent attention."""
    heads, widths = LATENT[name]
    group, rope = latent_group(heads), {"ROPE_DIM": widths.rope}
    tiling = choose_latent_tiling(group=group, rank=widths.rank, item_size=ITEM_SIZE[dtype])
    sizes: dict[str, Any] = {"group": group, "kv_heads": heads // group, "tiling": tiling, "cached": cached}
    absorbed = attention_kernel(arch, dtype, widths.rank, decodes=True, LATENT=True, **rope, **sizes)
    tiling = choose_expanded_tiling(
        capability=arch, head_dim=widths.key, value_dim=widths.value, item_size=ITEM_SIZE[dtype]
    )
    sizes = {"group": 1, "kv_heads": heads, "value_dim": widths.value, "tiling": tiling}
    return {"absorbed": absorbed, "expanded": attention_kernel(arch, dtype, widths.key, decodes=False, **rope, **sizes)}


@pytest.mark.parametrize(
    ("name", "arch", "dtype", "cached"),
    [
        ("DeepSeek-V2-Lite", 80, "bf16", ""),
        ("DeepSeek-V2-Lite", 89, "fp16", "fp8e5"),
        ("DeepSeek-V2-Lite", 90, "bf16", "fp8e4nv"),
        ("Kimi-K2", 90, "bf16", ""),
        ("GLM-4.7-Flash", 89, "bf16", ""),
        ("MiniCPM3", 80, "fp32", ""),
    ],
)
def test_latent_attention_compiles_within_the_gpus_limits(
    arch: int, dtype: str, cached: str, name: str, tmp_path: Path
) -> None:
    for compiled in latent_kernels(arch, dtype, name, cached).values():
        assert compiled.metadata.shared <= SHARED_MEMORY[arch]
        used = resources(compiled, tmp_path)
        assert used["STACK"] == used["LOCAL"] == 0
        assert ("mma" in compiled.asm["ptx"]) == (dtype != "fp32")


def test_triton_refuses_e4m3_before_ada() -> None:
    """This is why `kv_refusal` refuses it."""
    with pytest.raises(Exception, match="fp8e4nv not supported in this architecture"):
        attention_kernel(80, "bf16", 64, decodes=True, cached="fp8e4nv")


@pytest.mark.parametrize("arch", [100, 120])
def test_chunks_compile_for_blackwell(arch: int, tmp_path: Path) -> None:
    compiled = attention_kernel(arch, "bf16", 128, decodes=False)
    assert compiled.metadata.shared <= SHARED_MEMORY[arch]
    assert resources(compiled, tmp_path)["STACK"] == 0


@pytest.mark.parametrize(
    "options",
    [
        {"head_dim": 256, "decodes": False, "WINDOW": 4096, "given": ("softcap",)},  # Gemma-2
        {"head_dim": 64, "decodes": True, "WINDOW": 128, "given": ("sinks",)},  # gpt-oss
        {"head_dim": 64, "decodes": False, "given": ("slopes",)},  # BLOOM
        {"head_dim": 512, "decodes": False},
        {"head_dim": 128, "decodes": False, "given": ("slopes",)},  # MPT
        {"head_dim": 64, "decodes": True, "group": 71, "kv_heads": 1},  # Falcon
        {"head_dim": 128, "decodes": True, "group": 128, "kv_heads": 1},
    ],
    ids=str,
)
def test_other_models_fit_the_smallest_gpu(options: dict[str, Any], tmp_path: Path) -> None:
    compiled = attention_kernel(89, "bf16", **options)
    assert compiled.metadata.shared <= SHARED_MEMORY[89]
    assert resources(compiled, tmp_path)["STACK"] == 0


@pytest.mark.parametrize("arch", [80, 89, 90])
def test_small_kernels_compile(arch: int, tmp_path: Path) -> None:
    types = {"output": "*bf16", "parts": "*fp32", "stats": "*fp32", "joins": "*i32", "block_m": "i32"}
    constants = {"GROUP": 4, "KV_HEADS": 8, "VALUE_DIM": 128, "BLOCK_V": 128, "CHUNK": attention.JOIN_CHUNK}
    join = compile_ahead(join_kernel, arch, types, constants)
    types = {"new": "*bf16", "slot_mapping": "*i64", "scales": "*fp32", "token_stride": "i32", "head_stride": "i32"}
    constants = {"KV_HEADS": 8, "BLOCK_SIZE": 16, "DIM": 128, "BLOCK_D": 128}
    writes = [
        compile_ahead(
            write_kernel, arch, {**types, "cache": f"*{cached}"}, {**constants, "FP8": cached != "bf16"}, num_warps=1
        )
        for cached in ("bf16", *FP8_TYPES[arch])
    ]
    for compiled in (join, *writes):
        assert resources(compiled, tmp_path)["STACK"] == 0


NORM = {"SIZE": 4096, "BLOCK": 4096, "BRANCH": True, "BRANCH_NORM": True, "CENTRED": False, "BIAS": False}
ROTARY = {"HEADS": 32, "KV_HEADS": 8, "DIM": 128, "ROTATED": 128, "BLOCK_SIZE": 16, "BLOCK_D": 128} | {
    "NORM": True,
    "BY_GROUP": False,
    "NEIGHBOURS": False,
    "NORM_LAST": False,
    "FP8": False,
}
ACTIVATION = {"SIZE": 14336, "BLOCK": ops.ACTIVATION_BLOCK, "ACTIVATION": 2, "GATED": True}
LATENT_VECTORS = {"HEADS": 16, "WIDTH": 192, "RANK": 512, "ROPE": 64, "BLOCK_L": 512, "BLOCK_R": 32} | {
    "INTERLEAVED": True,
    "FP8": False,
}
LAYER_KERNELS: dict[str, tuple[Any, dict[str, Any], dict[str, str]]] = {
    "norm": (norm_kernel, NORM, {}),
    "LayerNorm": (norm_kernel, {**NORM, "BRANCH_NORM": False, "CENTRED": True, "BIAS": True}, {}),
    "rotary": (rotary_kernel, ROTARY, {"slot_mapping": "*i64"}),
    "rotary, partial": (
        rotary_kernel,
        {**ROTARY, "DIM": 80, "ROTATED": 32, "NORM": False, "BY_GROUP": True},
        {"slot_mapping": "*i64"},
    ),
    "rotary, neighbours": (rotary_kernel, {**ROTARY, "NEIGHBOURS": True, "NORM_LAST": True}, {"slot_mapping": "*i64"}),
    "latent vectors": (latent_kernel, LATENT_VECTORS, {"slot_mapping": "*i64", "compressed_stride": "i32"}),
    "gate": (activation_kernel, ACTIVATION, {}),
    "squared ReLU": (activation_kernel, {**ACTIVATION, "ACTIVATION": 3, "GATED": False}, {}),
    "exact GELU": (activation_kernel, {**ACTIVATION, "ACTIVATION": 1, "GATED": False}, {}),
}


@pytest.mark.parametrize("arch", [80, 89, 90])
@pytest.mark.parametrize("name", LAYER_KERNELS)
def test_layer_kernels_compile(name: str, arch: int, tmp_path: Path) -> None:
    kernel, constants, types = LAYER_KERNELS[name]
    types = {**dict.fromkeys(kernel.arg_names, "*bf16"), "eps": "fp32", "offset": "fp32", "scales": "*fp32", **types}
    assert resources(compile_ahead(kernel, arch, types, constants), tmp_path)["STACK"] == 0
    caches = {"rotary": ("key_cache", "value_cache"), "latent vectors": ("latents", "rope_keys")}.get(name, ())
    for cached in FP8_TYPES[arch] if caches else ():
        types |= dict.fromkeys(caches, f"*{cached}")
        assert resources(compile_ahead(kernel, arch, types, {**constants, "FP8": True}), tmp_path)["STACK"] == 0


DENSE = {"CODING": 0, "PER_BYTE": 0, "GROUP": 1}
#: Experts of Qwen3-30B-A3B: first product, second product; and those of gpt-oss-20b.
EXPERTS: dict[str, dict[str, Any]] = {
    "up": {"EXPERTS": 128, "WIDTH": 1536, "SIZE": 2048, "CHOSEN": 8, "GATED": True, "column_stride": 1},
    "down": {"EXPERTS": 128, "WIDTH": 2048, "SIZE": 768, "CHOSEN": 8, "GATED": False, "column_stride": 1},
    "gpt-oss up": {
        **{"EXPERTS": 32, "WIDTH": 5760, "SIZE": 2880, "CHOSEN": 4, "GATED": True, "row_stride": 1},
        **{"INTERLEAVED": True, "LIMITED": True, "given": {"biases"}},
    },
    "gpt-oss up, mxfp4": {
        **{"EXPERTS": 32, "WIDTH": 5760, "SIZE": 2880, "CHOSEN": 4, "GATED": True, "column_stride": 1},
        **{"INTERLEAVED": True, "LIMITED": True, "CODING": 1, "PER_BYTE": 2, "GROUP": 32},
        **{"given": {"biases", "scales", "table"}},
    },
    "up, int4 in order": {
        **{"EXPERTS": 8, "WIDTH": 28672, "SIZE": 4096, "CHOSEN": 2, "GATED": True, "column_stride": 1},
        **{"CODING": 0, "PER_BYTE": 2, "GROUP": 128, "given": {"scales", "offsets", "inputs"}},
    },
    "down, fp8": {
        **{"EXPERTS": 128, "WIDTH": 2048, "SIZE": 768, "CHOSEN": 8, "GATED": False, "column_stride": 1},
        **{"CODING": 2, "PER_BYTE": 1, "GROUP": 128, "given": {"scales"}},
    },
}
#: Arguments that are None unless a case gives them.
OPTIONAL = {"scales", "offsets", "table", "inputs", "biases"}


@pytest.mark.parametrize(("arch", "pairs"), [(80, 8), (89, 1 << 14), (90, 1 << 14)])
@pytest.mark.parametrize(("name", "dtype"), [*((name, "bf16") for name in EXPERTS), ("gpt-oss up, mxfp4", "fp32")])
def test_products_of_experts_compile(name: str, dtype: str, pairs: int, arch: int, tmp_path: Path) -> None:
    constants = {"INTERLEAVED": False, "LIMITED": False, "ACTIVATION": 0, **DENSE, **EXPERTS[name]}
    given = constants.pop("given", set())
    constants |= dict.fromkeys(OPTIONAL - given)
    tiling = expert_ops.choose_expert_tiling(pairs, constants["EXPERTS"], ITEM_SIZE[dtype], "inputs" in given)
    blocks = {"BLOCK_M": tiling.block_m, "BLOCK_N": tiling.block_n, "BLOCK_K": tiling.block_k}
    constants |= blocks | {"BLOCK_E": constants["EXPERTS"]}
    types = {
        **dict.fromkeys(("rows", "matrices", "biases", "output"), f"*{dtype}"),
        **dict.fromkeys(("scales", "offsets"), "*bf16"),
        **{"table": "*fp32", "inputs": "*i64"},
        **dict.fromkeys(("order", "starts"), "*i32"),
        **dict.fromkeys(("expert_stride", "row_stride", "column_stride"), "i32"),
        **dict.fromkeys(("slope", "limit", "shift"), "fp32"),
        "weights": "*fp32",
    }
    if constants["PER_BYTE"]:
        types["matrices"] = "*u8" if constants["PER_BYTE"] == 2 else "*i8"
    compiled = compile_ahead(
        expert_kernel, arch, types, constants, num_warps=tiling.num_warps, num_stages=tiling.num_stages
    )
    assert compiled.metadata.shared <= SHARED_MEMORY[arch]
    used = resources(compiled, tmp_path)
    assert used["STACK"] == used["LOCAL"] == 0
    tensor_cores = re.search(r"mma\.sync|wgmma\.mma_async", compiled.asm["ptx"]) is not None
    assert tensor_cores == (dtype != "fp32")


@pytest.mark.parametrize("arch", [80, 89, 90])
@pytest.mark.parametrize(("groups", "size", "warps"), [(1, 128, 1), (8, 32, 4), (1, 512, 4)])
def test_routing_compiles(arch: int, groups: int, size: int, warps: int, tmp_path: Path) -> None:
    types = {"logits": "*fp32", "correction": "*fp32", "experts": "*i32", "weights": "*fp32", "factor": "fp32"}
    constants = {"GROUPS": groups, "SIZE": size, "CHOSEN": 8, "CHOSEN_GROUPS": min(groups, 4), "GROUP_BEST": 2}
    constants |= {"SIGMOID": groups > 1, "NORMALISED": True, "CORRECTED": groups > 1}
    constants |= {"BLOCK_G": groups, "BLOCK_S": size, "BLOCK_C": 8}
    routing = compile_ahead(route_kernel, arch, types, constants, num_warps=warps)
    types = {**dict.fromkeys(("experts", "order", "starts"), "*i32"), "num_pairs": "i32"}
    ordering = compile_ahead(order_kernel, arch, types, {"BLOCK": expert_ops.ORDER_BLOCK})
    for compiled in (routing, ordering):
        assert resources(compiled, tmp_path)["STACK"] == 0


@pytest.mark.parametrize("arch", [80, 89, 90])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_sampling_compiles_without_spills(arch: int, dtype: str, tmp_path: Path) -> None:
    types = {"outcomes": "*i64", "logits": f"*{dtype}", "parameters": "*fp64", "num_rows": "i32", "width": "i32"}
    constants = {"SHIFT": 16 if dtype == "bf16" else 0, "BLOCK": ops.SAMPLING_BLOCK}
    compiled = compile_ahead(sample_kernel, arch, types, constants, num_warps=ops.SAMPLING_WARPS)
    used = resources(compiled, tmp_path)
    assert used["STACK"] == used["LOCAL"] == 0


#: Constants and types of pointers of products with matrices of GGUF's types, GPTQ, nf4, int8 and fp8.
PRODUCTS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "4 bits": ({"CODING": 0, "PER_BYTE": 2, "GROUP": 32, "SHIFTED": True}, {"codes": "*u8"}),
    "4 bits, groups of 128": ({"CODING": 0, "PER_BYTE": 2, "GROUP": 128, "SHIFTED": True}, {"codes": "*u8"}),
    "table": ({"CODING": 1, "PER_BYTE": 2, "GROUP": 64, "SHIFTED": False}, {"codes": "*u8", "scales": "*fp32"}),
    "8 bits": ({"CODING": 0, "PER_BYTE": 1, "GROUP": 16, "SHIFTED": True}, {"codes": "*i8"}),
    "fp8": ({"CODING": 2, "PER_BYTE": 1, "GROUP": 4096, "SHIFTED": False}, {"codes": "*i8", "scales": "*fp32"}),
}


@pytest.mark.parametrize("arch", [80, 89, 90])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_compile_within_the_gpus_limits(name: str, arch: int, tmp_path: Path) -> None:
    constants, types = PRODUCTS[name]
    sizes = dict.fromkeys(("num_rows", "num_outputs", "size", "first", "stride"), "i32")
    for dtype, num_rows in itertools.product(("bf16", "fp32")[: 2 if arch == 80 else 1], (*ROW_LIMITS, 2048)):
        tiling = packed_products.choose_tiling(num_rows, ITEM_SIZE[dtype])
        blocks = {"BLOCK_T": tiling.block_t, "BLOCK_M": tiling.block_m, "BLOCK_B": tiling.block_b, "BIAS": True}
        pointers = {**dict.fromkeys(("rows", "bias", "output"), f"*{dtype}"), "table": "*fp32"}
        pointers |= {"scales": "*fp16", **types}
        pointers["offsets"] = pointers["scales"]
        launch = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages}
        kernel = packed_products.product_kernel
        compiled = compile_ahead(kernel, arch, {**sizes, **pointers}, {**constants, **blocks}, **launch)
        assert compiled.metadata.shared <= SHARED_MEMORY[arch]
        used = resources(compiled, tmp_path)
        assert used["REG"] <= MAX_REGISTERS
        assert used["STACK"] == used["LOCAL"] == 0
        tensor_cores = re.search(r"mma\.sync|wgmma\.mma_async", compiled.asm["ptx"]) is not None
        assert tensor_cores == (dtype != "fp32")
        assert "tf32" not in compiled.asm["ptx"]
    types = {"parts": "*fp32", "bias": "*bf16", "output": "*bf16"}
    sums = compile_ahead(
        packed_products.sum_kernel,
        arch,
        types | dict.fromkeys(("num_parts", "num_outputs", "first", "stride"), "i32"),
        {"BIAS": True, "BLOCK": packed_products.SUM_BLOCK},
    )
    assert resources(sums, tmp_path)["STACK"] == 0


def test_tiles_of_adapters_have_each_token_once_and_a_fixed_number() -> None:
    """A graph is replayed over arrays of the same shapes, whichever adapters the rows have."""
    generator = np.random.default_rng(0)
    for tokens, num_adapters in itertools.product((1, 5, 32, 33, 64, 200), (1, 3, 40)):
        for lowest in (-1, 0, num_adapters - 1):
            adapters = generator.integers(lowest, num_adapters, tokens).astype(np.int32)
            tiles, order = (array.numpy() for array in lora.prepare_lora(adapters, num_adapters, torch.from_numpy))
            assert tiles.shape == (tokens // lora.BLOCK_T + min(tokens, num_adapters), 3)
            found = [(adapter, order[start : start + count]) for adapter, start, count in tiles]
            assert all(len(own) <= lora.BLOCK_T and (adapters[own] == adapter).all() for adapter, own in found)
            assert sorted(np.concatenate([own for _, own in found])) == np.flatnonzero(adapters >= 0).tolist()


@pytest.mark.parametrize(
    ("arch", "dtype", "rank", "spans"),
    [*((arch, "bf16", 16, 3) for arch in (80, 89, 90)), (90, "fp16", 256, 1), (80, "fp32", 64, 2)],
)
def test_adapters_compile_within_the_gpus_limits(dtype: str, rank: int, spans: int, arch: int, tmp_path: Path) -> None:
    pointers = {**dict.fromkeys(("rows", "a", "b", "output"), f"*{dtype}"), "inner": "*fp32"}
    types = {**pointers, **dict.fromkeys(("tiles", "order", "parts"), "*i32")}
    types |= dict.fromkeys(("num_tokens", "num_shares", "stride"), "i32")
    blocks = {"BLOCK_T": lora.BLOCK_T, "RANKS": rank * spans}
    first = blocks | {"SIZE": 4096, "BLOCK_R": lora.block_of(rank * spans), "BLOCK_N": lora.BLOCK_N}
    second = blocks | {"RANK": rank, "WIDTH": 6144, "BLOCK_R": lora.block_of(rank), "BLOCK_M": lora.BLOCK_M}
    for kernel, constants in ((lora.shrink_kernel, first), (lora.expand_kernel, second)):
        compiled = compile_ahead(kernel, arch, types, constants, num_warps=lora.NUM_WARPS)
        assert compiled.metadata.shared <= SHARED_MEMORY[arch]
        used = resources(compiled, tmp_path)
        assert used["REG"] <= MAX_REGISTERS
        assert used["STACK"] == used["LOCAL"] == 0
        tensor_cores = re.search(r"mma\.sync|wgmma\.mma_async", compiled.asm["ptx"]) is not None
        assert tensor_cores == (dtype != "fp32")


class PretendedGpu:
    """The part of a driver that a launch uses before it runs anything."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


Launch = tuple[str, Any, list[Any], dict[str, Any]]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Return a list that gets the kernel, grid, tensor shapes and other arguments of each launch. No kernel runs."""
    found: list[Launch] = []
    launch = triton.runtime.jit.JITFunction.run

    def compile_only(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        compiled = launch(kernel, *arguments, grid=grid, warmup=True, **options)
        shapes = [(each.shape, each.dtype) if isinstance(each, torch.Tensor) else each for each in arguments]
        found.append((kernel.__name__, grid, shapes, {**options, "compiled": id(compiled)}))

    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", compile_only)
    monkeypatch.setattr(triton.runtime.driver, "_active", PretendedGpu())
    monkeypatch.setattr(ops, "gpu_properties", lambda device: Gpu(132, 90))
    return found


def attend(sequences: list[tuple[int, int]], max_blocks: int = 80) -> Batch:
    """Launch attention for a batch without data."""
    bounds, contexts = make_batch(Shape("", tuple(sequences))).tensors[4:]
    batch = make_batch(Shape("", tuple(sequences)), dtype=torch.float16, device="meta")
    layer = AttentionShape(6, 2, 64, 64, None, 2)
    work = ops.prepare_attention([layer], bounds.numpy(), contexts.numpy(), batch.query.device, to_meta)[0]
    tables = torch.empty(len(sequences), max_blocks, dtype=torch.int32, device="meta")
    ops.paged_attention(*batch.tensors[:3], tables, *batch.tensors[4:], work=work, **batch.options)
    return batch


def to_meta(array: Any) -> torch.Tensor:
    return torch.from_numpy(array).to("meta")


def test_batches_of_all_sizes_share_few_kernels(launches: list[Launch]) -> None:
    """A server must not compile while it serves.

    One attention kernel each for decodes and for chunks, and one to join.
    """
    for sequences in ([(1, 90)], [(1, 90)] * 16, [(1, 90)] * 300, [(1, 90), (5, 60)], [(600, 600)] * 17):
        for max_blocks in (33, 80):
            batch = attend(sequences, max_blocks)
        slots = torch.empty(batch.query.shape[0], dtype=torch.int64, device="meta")
        ops.write_kv(batch.query[:, :2], batch.query[:, 2:4], batch.key_cache, batch.value_cache, slots)
        rows, weight, tables = batch.query.flatten(1), batch.query[0].flatten(), batch.query[:, 0].contiguous()
        for branch in (None, rows):
            ops.add_norm(rows, branch, weight, eps=1e-5)
        ops.rotate_and_write(rows.repeat(1, 2), tables, tables, batch.key_cache, batch.value_cache, slots)
        ops.gated(rows, "silu")
    assert len({options["compiled"] for *_, options in launches}) == 8


@pytest.mark.parametrize("shape", [(4096, 4096), (14336 + 7, 4096), (1024, 2048)])
def test_the_first_product_compiles_the_kernels_for_all_numbers_of_rows(
    launches: list[Launch], shape: tuple[int, int]
) -> None:
    rows, size = shape
    with torch.device("meta"):
        scales = torch.empty(rows, size // 32, dtype=torch.float16)
        matrix = PackedMatrix(torch.empty(rows, size // 2, dtype=torch.uint8), scales, scales)
        bias = torch.empty(rows, dtype=torch.bfloat16)

        def compiled(counts: tuple[int, ...]) -> set[tuple[str, int]]:
            for count in counts:
                ops.linear(torch.empty(count, size, dtype=torch.bfloat16), (matrix,), bias)
            return {(name, options["compiled"]) for name, *_, options in launches}

        first = compiled((1,))
        assert [name for name, _ in sorted(first)].count("product_kernel") == len(ROW_LIMITS) + 1
        assert compiled((0, 2, 7, 15, 16, 17, 32, 63, 64, 65, 128, 300, 2048, 2049)) == first


def test_launches_of_decodes_do_not_depend_on_contexts(launches: list[Launch]) -> None:
    """A CUDA graph replays them for other contexts."""
    attend([(1, 1), (1, 1), (1, 1201)])
    attend([(1, 900), (1, 310), (1, 2)])  # with as many blocks
    assert [name for name, *_ in launches] == ["attend_kernel", "join_kernel"] * 2
    assert launches[:2] == launches[2:]


def test_a_decode_beside_a_chunk_has_small_tiles(launches: list[Launch]) -> None:
    attend([(1, 90), (64, 64), (1, 30)])
    assert [(name, grid, options["BLOCK_M"]) for name, grid, _, options in launches] == [
        ("attend_kernel", (4,), 16),
        ("attend_kernel", (4,), 128),
    ]


def test_tiles_are_legal() -> None:
    """Powers of two, none smaller than a tensor-core product, and room for a KV head's whole group."""
    dims, kinds = (64, 80, 96, 128, 192, 256, 512), (False, True)
    for group, dim, item_size, decodes in itertools.product((1, 3, 4, 7, 8, 71), dims, (2, 4), kinds):
        shape = {"group": group, "head_dim": dim, "value_dim": dim, "item_size": item_size}
        tiling = choose_tiling(capability=80, decodes=decodes, **shape)
        for size in (tiling.block_m, tiling.block_n, tiling.block_d, tiling.block_v):
            assert size >= 16
            assert size & (size - 1) == 0
        assert tiling.block_m >= group
        assert tiling.block_d >= dim


def test_heads_that_are_not_contiguous_are_refused() -> None:
    batch = make_batch(Shape("", ((1, 20),)))
    with pytest.raises(ValueError, match=r"heads have strides .* the last must be 1"):
        ops.paged_attention(batch.query.expand(2, 6, 64).permute(2, 1, 0), *batch.tensors[1:], **batch.options)


def test_interpreted_kernels_equal_the_reference(interpreted: subprocess.Popen[str]) -> None:
    """float32 within 1e-5; float16 rounds the weights and the output, values being less than 4."""
    output, _ = interpreted.communicate()
    assert interpreted.returncode == 0
    differences: dict[str, float] = json.loads(output)
    assert len(differences) == 102 + 39 + 21 + 37 + 26
    limits = {name: 8 * torch.finfo(torch.float16).eps if "float16" in name else 1e-5 for name in differences}
    assert {name: d for name, d in differences.items() if not d <= limits[name]} == {}
    exact = [name for name in differences if name.startswith("written ")]
    assert len(exact) == 2
    assert {differences[name] for name in ("write_kv", "sample", "ties", *exact)} == {0}
