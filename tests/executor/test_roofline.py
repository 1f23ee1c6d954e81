"""Limits of the roofline: the cost of a step that one resource alone decides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from configs import published_config

from llmsched.engine.architecture.flops import ModelFlops, model_flops
from llmsched.engine.errors import ConfigError, ModelError
from llmsched.engine.executor.cost import StepShape
from llmsched.engine.executor.roofline import Roofline
from llmsched.profiles.engines import engine_spec, find_engine
from llmsched.profiles.gpus import find_gpu

SHARES = ("matrix", "matrix_fp8", "matrix_fp8_block", "attention", "bandwidth", "kv", "experts")
#: An engine that reaches everything and costs nothing.
FREE = dict.fromkeys(("step_us", "layer_us", "row_us"), 0.0)
IDEAL = engine_spec("ideal", FREE | {"on": {"default": dict.fromkeys(SHARES, 1.0) | {"decode": 1e6}}})
LLAMA = "meta-llama--Meta-Llama-3.1-8B"
#: Numbers of its matrices without embeddings, with the head; and of the head.
LLAMA_NUMBERS, LLAMA_HEAD = 32 * (2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336) + 4096 * 128256, 4096 * 128256


def work(name: str, dtype_bytes: int = 2, kv_bytes: int | None = None, **settings: Any) -> ModelFlops:
    content = published_config(name) | settings
    return model_flops(content, dtype_bytes=dtype_bytes, kv_dtype_bytes=kv_bytes)


def test_a_lone_decode_reads_the_weights() -> None:
    seconds = Roofline(work(LLAMA), find_gpu("h100"), IDEAL).seconds(StepShape(0, 1, 1, sampled_rows=1))
    assert seconds == pytest.approx(2 * LLAMA_NUMBERS / 3350e9, rel=0.01)


def test_a_large_prefill_multiplies() -> None:
    shape = StepShape(8192, 0, 8192, 8192, 0, sampled_rows=0)
    model = work(LLAMA)
    vectors = model.vector_bytes * 8192 / 3350e9
    seconds = Roofline(model, find_gpu("h100"), IDEAL).seconds(shape)
    assert seconds == pytest.approx(2 * (LLAMA_NUMBERS - LLAMA_HEAD) * 8192 / 989e12 + vectors, rel=0.01)


def test_decodes_read_their_kv_and_fp8_halves_it() -> None:
    long, short = (StepShape(0, 64, tokens, sampled_rows=64) for tokens in (640_000, 64))
    for kv_bytes, per_token in ((2, 131072), (1, 65536)):
        cost = Roofline(work(LLAMA, kv_bytes=kv_bytes), find_gpu("h100"), IDEAL)
        grown = cost.seconds(long) - cost.seconds(short)
        assert grown == pytest.approx((640_000 - 64) * per_token / 3350e9, rel=0.01)


def test_windowed_layers_read_what_is_in_the_window() -> None:
    cost = Roofline(work("openai--gpt-oss-20b"), find_gpu("h100"), IDEAL)
    assert cost.window == 128
    whole, cut = (StepShape(0, 10, 80_000, window_kv_tokens=kv) for kv in (80_000, 1280))
    assert cost.seconds(whole) - cost.seconds(cut) == pytest.approx((80_000 - 1280) * 24576 / 3350e9, rel=0.01)


def test_a_decode_of_experts_reads_those_that_were_chosen() -> None:
    model = work("Qwen--Qwen3-30B-A3B")
    share = model.experts_per_token / model.num_experts
    active = model.dense.numbers + share * model.experts.numbers + model.head.numbers
    assert active == pytest.approx(3.03e9, rel=0.01)
    cost = Roofline(model, find_gpu("h100"), IDEAL)
    one, many = (cost.seconds(StepShape(0, count, 0)) for count in (1, 200))
    assert one == pytest.approx((model.dense.size + model.experts.size * 8 / 128) / 3350e9, rel=0.01)
    assert many == pytest.approx((model.dense.size + model.experts.size) / 3350e9, rel=0.05)


def test_experts_that_are_all_chosen_are_a_dense_model() -> None:
    model = work("Qwen--Qwen3-30B-A3B", num_experts_per_tok=128)
    cost = Roofline(model, find_gpu("h100"), IDEAL)
    reading = (model.dense.size + model.experts.size) / 3350e9
    assert cost.seconds(StepShape(0, 1, 0)) == pytest.approx(reading, rel=0.01)


def test_latent_attention_reads_one_vector_and_computes_with_every_head() -> None:
    model = work("deepseek-ai--DeepSeek-V3")
    assert [part.kv_bytes for part in model.attention] == [61 * 576 * 2]
    assert [part.decode_flops for part in model.attention] == [61 * 2 * 128 * (576 + 512)]
    assert [part.prefill_flops for part in model.attention] == [61 * 2 * 128 * (192 + 128)]


@pytest.mark.parametrize(
    ("settings", "bytes_per_number", "arithmetic"),
    [
        ({"quant_method": "fp8"}, 1, "fp8"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 1, "fp8_block"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4.16 / 8, "bf16"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 1, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5 / 8, "bf16"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": {"weights": {"num_bits": 8}, "input_activations": {"num_bits": 8}}},
            },
            1,
            "fp8",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": {"weights": {"num_bits": 8}, "input_activations": None}},
            },
            1,
            "bf16",
        ),
    ],
)
def test_quantised_weights(settings: dict[str, Any], bytes_per_number: float, arithmetic: str) -> None:
    dense = work(LLAMA, quantization_config=settings).dense
    assert dense.size / dense.numbers == pytest.approx(bytes_per_number, rel=0.01)
    assert dense.arithmetic == arithmetic


def test_fp8_is_as_slow_as_16_bits_where_there_are_no_units_for_it() -> None:
    shape = StepShape(8192, 0, 0)
    plain, quantised = work(LLAMA), work(LLAMA, quantization_config={"quant_method": "fp8"})
    seconds = {
        (gpu, model is quantised): Roofline(model, find_gpu(gpu), IDEAL).seconds(shape)
        for gpu in ("a100-80gb", "h100")
        for model in (plain, quantised)
    }
    assert seconds["a100-80gb", True] == pytest.approx(seconds["a100-80gb", False], rel=0.01)
    assert seconds["h100", True] < 0.6 * seconds["h100", False]


def test_steps_as_arrays_give_the_same_as_one_by_one() -> None:
    for name in (
        LLAMA,
        "openai--gpt-oss-20b",
        "google--gemma-4-26B-A4B",
        "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    ):
        cost = Roofline(work(name), find_gpu("h100"), find_engine("default"))
        rng = np.random.default_rng(1)
        steps = [StepShape(*map(int, rng.integers(0, 5000, 9))) for _ in range(20)]
        steps = [s._replace(kv_tokens=s.kv_tokens + 5000, window_kv_tokens=s.window_kv_tokens + 5000) for s in steps]
        together = cost.seconds(StepShape(*np.array(steps).T))  # type: ignore[arg-type]
        assert together == pytest.approx([cost.seconds(shape) for shape in steps])


def test_what_cannot_be_simulated_is_refused() -> None:
    with pytest.raises(ConfigError, match="Tesla T4 cannot multiply bfloat16; use float16"):
        Roofline(work(LLAMA), find_gpu("t4"), IDEAL)
    assert Roofline(work(LLAMA), find_gpu("t4"), IDEAL, dtype="float16").error is None
    with pytest.raises(ModelError, match="martian cannot be simulated"):
        model_flops({"model_type": "martian", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64,
                    "vocab_size": 100}, dtype_bytes=2)  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_experts_per_tok": 0}, "a token to 0 of 128 experts; it must be 1 to 128"),
        ({"num_experts_per_tok": 129}, "a token to 129 of 128 experts; it must be 1 to 128"),
        ({"num_experts_per_tok": "all"}, "num_experts_per_tok 'all'; it must be a whole number"),
        ({"vocab_size": "many"}, "vocab_size 'many'; it must be a whole number"),
        ({"moe_intermediate_size": [1]}, r"moe_intermediate_size \[1\]; it must be a whole number"),
    ],
)
def test_a_config_with_impossible_numbers_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        work("Qwen--Qwen3-30B-A3B", **settings)


def test_swap_goes_over_the_link() -> None:
    model = work(LLAMA)
    fast, slow = (Roofline(model, find_gpu(gpu), IDEAL).swap_seconds(1 << 30) for gpu in ("h100", "a100-80gb"))
    assert slow == pytest.approx(2 * fast)
    assert (1 << 30) / fast == pytest.approx(51.2e9)
