from __future__ import annotations

import socket
from collections.abc import Sequence

from llmsched.cli import render
from llmsched.engine.architecture.adapter_files import AdapterFiles, read_adapters
from llmsched.engine.core import Engine
from llmsched.engine.memory.graph_memory import CapturedGraphs
from llmsched.engine.memory.plan import MemoryPlan, Reconciled, reconcile
from llmsched.engine.text.parsers.notation import Notation
from llmsched.engine.units import human_bytes


def show_start(
    engine: Engine,
    model_name: str,
    listener: socket.socket,
    *,
    has_key: bool,
    ui: bool = True,
    profile: str | None = None,
    notation: Notation | None = None,
) -> None:
    """Print the banner, with a request to try. Warn if the server listens on all interfaces without an API key."""
    render.table("settings", ("", ""), start_rows(engine, model_name, profile, notation), text_columns=2)
    if ignored := engine.model.ignored_defaults:
        render.warn(f"generation_config.json has fields that this server does not support: {', '.join(ignored)}")
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        if not has_key:
            render.warn(
                "listening on all interfaces without --api-key: anyone who can reach this port can use the model"
            )
        host = "::1" if listener.family == socket.AF_INET6 else "127.0.0.1"
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    page = f"page: {url}, " if ui else ""
    render.say(f"ready: {url}/v1 ({page}health: {url}/health, metrics: {url}/metrics)")
    for label, command in zip(("try: ", "or:  "), commands_to_try(url, has_key=has_key), strict=True):
        render.say(f"{label}  {command}", wrap=False)


def commands_to_try(url: str, *, has_key: bool) -> tuple[str, str]:
    """Return an `llmsched chat` and a curl command for the server at `url`."""
    chat = "llmsched chat" if url.endswith("127.0.0.1:8000") else f"llmsched chat {url}"
    key = " -H 'Authorization: Bearer KEY'" if has_key else ""
    body = '{"messages": [{"role": "user", "content": "Hello"}]}'
    curl = f"curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"
    return f"{chat}{' --api-key KEY' if has_key else ''}", curl


def start_rows(
    engine: Engine, model_name: str, profile: str | None = None, notation: Notation | None = None
) -> list[tuple[str, str]]:
    config, model, stats = engine.config, engine.model, engine.stats()
    most, blocks = stats.max_running, stats.host_blocks_total
    limit = "max_num_seqs" if most == config.max_num_seqs else "max_num_batched_tokens"
    if config.scheduling_policy == "serial":
        limit = "scheduling_policy serial"
    preemption, sampling = "recompute (swap_space 0)", "the API's defaults: temperature 1, top_p 1"
    if blocks:
        host = f"{human_bytes(config.swap_space)} of host memory for {blocks} blocks (swap_space)"
        preemption = f"{config.preemption_mode}, {host}"
    if defaults := model.sampling_defaults:
        said = ", ".join(f"{name} {value}" for name, value in defaults.items())
        sampling = f"{said} unless the request says otherwise"
    served = "" if model_name == model.name else f", served as {model_name}"
    computed = f"{config.dtype} on {config.device}, {config.model_impl} layers (model_impl)"
    if engine.plan is not None and engine.plan.packed_types:
        wide = f"; not quantised: {', '.join(engine.plan.wide_parts)}" if engine.plan.wide_parts else ""
        computed += f", quantised weights ({', '.join(engine.plan.packed_types)}{wide})"
    rows = [("model", f"{model.name} ({model.architecture}){served}, {computed}")]
    if adapters := read_adapters(config.lora):
        rows.append(("adapters", _adapters_text(adapters, engine.plan)))
    if profile is not None:
        rows.append(("profile", profile))
    if engine.plan is not None:
        rows += _memory_rows(
            engine.plan, "" if config.kv_cache_dtype == config.dtype else f" in {config.kv_cache_dtype}"
        )
    rows += [
        ("context", f"{config.max_model_len} tokens, prompt and output (max_model_len)"),
        ("step", f"at most {config.max_num_batched_tokens} tokens (max_num_batched_tokens)"),
        ("running", f"at most {most} requests ({limit}); up to {config.max_queue_size} more may wait (max_queue_size)"),
        ("prefix cache", "on" if config.enable_prefix_caching else "off"),
        ("preemption", preemption),
        ("sampling", sampling),
    ]
    if config.speculative != "off":
        rows.append(("drafts", f"{config.speculative}, up to {config.most_draft_tokens} tokens (speculative)"))
    if notation is not None:
        rows.append(("chats", notation.describe()))
    return rows


def _adapters_text(adapters: Sequence[AdapterFiles], plan: MemoryPlan | None) -> str:
    named = ", ".join(f"{adapter.name} (rank {adapter.rank})" for adapter in adapters)
    memory = "" if plan is None else f"{human_bytes(plan.adapter_bytes)}; "
    return f"{named}: {memory}the field model of a request chooses one (lora)"


def _memory_rows(plan: MemoryPlan, kv_type: str) -> list[tuple[str, str]]:
    if plan.measured is None:
        parts = [("weights", human_bytes(plan.weights_bytes)), ("activations", human_bytes(plan.activation_bytes))]
    else:
        parts = [(each.part, predicted_and_actual(each)) for each in reconcile(plan, plan.measured)]
        if plan.graph_bytes:
            *parts, (label, size) = parts
            parts.append((label, graphs_text(plan.measured.graphs, size)))
    return [
        ("memory", f"{plan.device.name}: {human_bytes(plan.budget_bytes)} for weights, activations and KV"),
        *parts,
        *(
            []
            if plan.offload is None
            else [("experts", plan.offload.describe(plan.max_num_batched_tokens, plan.device.name))]
        ),
        (
            "KV cache",
            f"{human_bytes(plan.kv_bytes)}{kv_type}: {plan.num_blocks} blocks of {plan.block_size} tokens, "
            f"{plan.num_tokens} tokens{' in all layers' if plan.layout.window_groups else ''}; "
            f"{plan.max_num_seqs} requests of {plan.max_model_len} tokens",
        ),
    ]


def graphs_text(graphs: CapturedGraphs | None, size: str) -> str:
    """Return a text about the captured CUDA graphs. `size` is a text with their predicted and actual size."""
    if graphs is None:
        return "none, because they could not be captured (a warning says why)"
    return (
        f"{graphs.num_graphs} for steps of up to {graphs.max_rows} decodes, captured in {graphs.seconds:.1f} s; {size}"
    )


def predicted_and_actual(part: Reconciled) -> str:
    predicted = f"{human_bytes(part.predicted)} predicted"
    if part.actual is None:
        return f"{predicted}, not counted on a CPU"
    ratio = "" if part.ratio is None else f" ({part.ratio:.3f} of predicted)"
    return f"{predicted}, {human_bytes(part.actual)} actual{ratio}{', more than planned' if part.exceeds else ''}"
