from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmsched.cli.kv_budget.command_lines import OtherEngine
from llmsched.cli.options.flags import duration_option, quantization_option, typed
from llmsched.cli.quantities import MOST_TOKENS, size, tokens
from llmsched.engine.architecture.adapter_files import AdapterSizes, adapter_sizes, read_adapters
from llmsched.engine.architecture.config_fields import read_fields
from llmsched.engine.architecture.online_formats import ONLINE_FORMATS
from llmsched.engine.architecture.parameters import adapted_width
from llmsched.engine.config import EngineConfig
from llmsched.engine.device import DeviceMemory, device_memory, gpu_device
from llmsched.engine.errors import ConfigError, setting
from llmsched.engine.units import human_bytes, human_seconds
from llmsched.profiles.calibrated import LOCAL
from llmsched.profiles.gpus import GpuSpec, find_gpu, gpus
from llmsched.profiles.toml_files import UnknownNameError

if TYPE_CHECKING:
    from llmsched.engine.goodput import Slo
    from llmsched.engine.memory.concurrency import LengthDistribution

ALL = "all"
_MAX_CV = 10.0
#: Rank of adapters if --lora-rank is not given.
_LORA_RANK = 16
#: Targets of the requests for which GPUs are counted, in seconds, if the flags are not given.
_TTFT, _TPOT = 2.0, 0.1
_TARGET = "Latency target for {}, with --users, --context and one GPU: how many GPUs meet it is simulated. Default: {}."


@dataclass(frozen=True, slots=True)
class BudgetOptions:
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|all", help="Plan for this GPU (l4, h100, ...) instead of this machine; all compares all GPUs."
        ),
    ] = None
    gpu_memory: Annotated[
        int | None,
        typer.Option(parser=typed(size), metavar="SIZE", help="Plan for a GPU with this much memory, such as 24GiB."),
    ] = None
    users: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=EngineConfig.knob_rule("max_num_seqs")["high"],
            help="Requests that must fit at the same time. Without --context, find the longest context that fits.",
        ),
    ] = None
    context: Annotated[
        int | None,
        typer.Option(
            parser=typed(tokens),
            metavar="TOKENS",
            help="Tokens of each request, such as 8k.",
        ),
    ] = None
    lengths: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Lengths of your requests: a trace, as for bench --trace, or one request per line, as its total "
            "length or its prompt and output lengths.",
        ),
    ] = None
    mean_len: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_TOKENS,
            metavar="TOKENS",
            help="Also show how many sequences of this mean length (prompt and output) fit.",
        ),
    ] = None
    cv_len: Annotated[
        float | None,
        typer.Option(
            metavar="NUMBER",
            help="Standard deviation / mean of the lengths around --mean-len (log-normal).",
        ),
    ] = None
    weights: Annotated[
        int | None,
        typer.Option(
            "--weights",
            "--weights-bytes",
            parser=typed(size),
            metavar="SIZE",
            help="Size of the loaded weights, such as 15GiB or a number of bytes; default: from files or config.",
        ),
    ] = None
    quantization: Annotated[
        str | None,
        quantization_option(
            "Plan for weights that `serve` rounds while loading",
            "With --simulate or --emit (only fp8), and for the other formats: plan for",
        ),
    ] = None
    lora_count: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1 << 16,
            help="Plan for this many LoRA adapters, which need not exist: as large as those given with --lora or, "
            "without --lora, with matrices of --lora-rank for all linear layers of attention and dense MLPs.",
        ),
    ] = None
    lora_rank: Annotated[
        int | None,
        typer.Option(min=1, max=1 << 12, show_default=str(_LORA_RANK), help="Rank of the adapters of --lora-count."),
    ] = None
    simulate: Annotated[
        str | None,
        typer.Option(
            metavar="GPU[:ENGINE]|local",
            help="Plan for this GPU and simulate its speed with as many requests as fit (or as --users says). local: "
            "this machine, after `llmsched calibrate`.",
        ),
    ] = None
    slo_ttft: Annotated[
        float | None, duration_option(_TARGET.format("the time to the first token", human_seconds(_TTFT)))
    ] = None
    slo_tpot: Annotated[
        float | None, duration_option(_TARGET.format("the mean time per later token", human_seconds(_TPOT)))
    ] = None
    emit: Annotated[
        OtherEngine | None,
        typer.Option(
            help="Print only the command line that starts vLLM or SGLang with the same memory. For vLLM, the plan has "
            "vLLM's defaults and the memory of its start-up profile: vllm for versions up to 0.16, whose profile is "
            "larger, so this plan fits all versions; vllm-0.17 for 0.17 and later."
        ),
    ] = None
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False

    @property
    def rounds(self) -> bool:
        """True if the plan is for weights that `serve` rounds while loading."""
        return self.quantization in ONLINE_FORMATS and self.emit is None and self.simulate is None

    def check(self) -> None:
        if self.emit is not None:
            if self.gpu == ALL:
                raise ConfigError("emit", "is for one GPU; name it with --gpu instead of all")
            if self.quantization not in (None, "fp8"):
                raise ConfigError("emit", f"needs a checkpoint that exists; name one in {self.quantization} as MODEL")
            if self.simulate is not None:
                raise ConfigError("emit", "prints only a command line; leave out --emit or --simulate")
        if self.cv_len is not None:
            if self.lengths is not None:
                raise ConfigError("cv_len", "has no effect with --lengths; leave out one of them")
            if self.mean_len is None:
                raise ConfigError("cv_len", "needs a mean; give --mean-len as well")
            if not 0 <= self.cv_len <= _MAX_CV:
                raise ConfigError("cv_len", f"must be 0 to {_MAX_CV:g}, not {self.cv_len:g}")
        if self.simulate is not None:
            if self.gpu is not None or self.gpu_memory is not None:
                raise ConfigError("simulate", f"{self.simulate} names the device; leave out --gpu and --gpu-memory")
            if self.simulate == ALL:
                raise ConfigError("simulate", "is for one device; name a GPU (l4, h100, ...) or local")
        if self.gpu is not None and self.gpu_memory is not None:
            raise ConfigError("gpu", f"{self.gpu} sets the memory too; leave out --gpu or --gpu-memory")

        if self.has_slo and not self.counts_gpus:
            name = "slo_tpot" if self.slo_ttft is None else "slo_ttft"
            raise ConfigError(
                name, "needs --users, --context and one GPU by name; give them, or leave it and --emit out"
            )

    @property
    def slo(self) -> Slo:
        """Targets of the requests for which GPUs are counted."""
        from llmsched.engine.goodput import Slo

        ttft = _TTFT if self.slo_ttft is None else self.slo_ttft
        return Slo(ttft=ttft, tpot=_TPOT if self.slo_tpot is None else self.slo_tpot)

    @property
    def has_slo(self) -> bool:
        return not self.slo_ttft is self.slo_tpot is None

    @property
    def simulated_gpu(self) -> str | None:
        """Name of the GPU in simulations; None without one GPU by name."""
        name = self.gpu or self.simulate
        return None if name in (ALL, LOCAL) else name

    @property
    def counts_gpus(self) -> bool:
        """True if the report simulates how many GPUs serve the users."""
        return self.emit is None and None not in (self.users, self.context, self.simulated_gpu)

    def devices(self, config: EngineConfig) -> list[DeviceMemory]:
        """Return the GPUs that the flags select, or else the device of this machine. Raises ConfigError."""
        if self.gpu is None and self.gpu_memory is None and self.simulate in (None, LOCAL):
            return [device_memory(config.device)]
        if config.device == "cpu":
            raise ConfigError("device", "cpu contradicts the flag that names a GPU; leave out one of them")
        if self.gpu_memory is not None:
            return [DeviceMemory("cuda", f"GPU with {human_bytes(self.gpu_memory)}", self.gpu_memory)]
        if self.gpu == ALL:
            return [gpu_device(spec) for spec in all_gpus()]
        if self.gpu is not None:
            return [gpu_device(_find_gpu("gpu", self.gpu))]
        return [gpu_device(_find_gpu("simulate", (self.simulate or "").partition(":")[0], ", or local"))]

    def adapters(self, config: EngineConfig, content: Mapping[str, Any]) -> AdapterSizes | None:
        """Return the sizes of the adapters of --lora-count. `content` is that of config.json. Raises ConfigError."""
        if self.lora_count is None:
            if self.lora_rank is not None:
                raise ConfigError("lora_rank", "has no effect without --lora-count; leave it out, or give both")
            return None
        if config.lora:
            if self.lora_rank is not None:
                raise ConfigError("lora_rank", "has no effect with --lora, whose adapters have their own; leave it out")
            given = adapter_sizes(read_adapters(config.lora))
            if self.lora_count < given.count:
                raise ConfigError("lora_count", f"{self.lora_count} is less than the {given.count} given with --lora")
            return replace(given, count=self.lora_count)
        if (width := adapted_width(read_fields(content))) is None:
            raise ConfigError("lora_count", "the layers of this model are not known; give an adapter with --lora too")
        return AdapterSizes(self.lora_count, self.lora_rank or _LORA_RANK, width)

    def distribution(self, config: EngineConfig) -> LengthDistribution | None:
        """Return the request lengths that --lengths or --mean-len describes, if given. Raises ConfigError."""
        limit = config.max_model_len
        if self.mean_len is not None and limit is not None and self.mean_len > limit:
            raise ConfigError("mean_len", f"{self.mean_len} is beyond {setting('max_model_len')} {limit}")
        if self.lengths is not None:
            return read_lengths(self.lengths)
        if self.cv_len is None or self.mean_len is None:
            return None
        from llmsched.engine.memory.concurrency import lognormal_lengths

        return lognormal_lengths(self.mean_len, self.cv_len)


def all_gpus() -> list[GpuSpec]:
    """Return all GPUs in gpus.toml, the one with the least memory first."""
    return sorted(gpus().values(), key=lambda spec: spec.memory)


def _find_gpu(field: str, name: str, alternative: str = "") -> GpuSpec:
    """Return the GPU `name`. If it is unknown, raise a ConfigError for `field` whose text ends in `alternative`."""
    try:
        return find_gpu(name)
    except UnknownNameError as unknown:
        raise ConfigError(field, f"{unknown}{alternative}") from unknown


def read_lengths(path: Path) -> LengthDistribution:
    """Return the lengths of the requests in a trace or in a file of lengths. Raises ConfigError for an invalid file."""
    import numpy as np

    from llmsched.cli.load.traces.file_rows import TraceError
    from llmsched.cli.load.traces.read import read_trace
    from llmsched.engine.memory.concurrency import LengthDistribution

    try:
        requests = read_trace(path, "lengths", times=False).requests
    except TraceError as problem:
        raise ConfigError("lengths", problem.message) from problem
    prompts = np.array([request.input_len for request in requests], dtype=np.int64)
    outputs = np.array([r.output_len for r in requests if r.output_len is not None], dtype=np.int64)
    if len(outputs) not in (0, len(prompts)):
        raise ConfigError("lengths", f"{path} has outputs for {len(outputs)} of {len(prompts)} requests; give all")
    return LengthDistribution(path.name, np.maximum(1, prompts), np.maximum(1, outputs) if len(outputs) else None)
