from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from llmsched.cli import render
from llmsched.cli.kv_budget.analysis import BudgetAnalysis
from llmsched.cli.kv_budget.json_document import comparison_document
from llmsched.cli.options.flags import flag
from llmsched.cli.render import human_bytes
from llmsched.engine.errors import spell
from llmsched.profiles.gpus import GpuSpec

#: Colours of the parts of a bar.
_PALETTE = ("cyan", "yellow", "magenta", "green", "blue", "red")


def show(analysis: BudgetAnalysis, document: dict[str, Any]) -> None:
    plan, groups = analysis.plan, document["groups"]
    kv_type = "" if analysis.kv_dtype == analysis.dtype else f", KV in {analysis.kv_dtype}"
    render.say(f"{analysis.spec} in {analysis.dtype}{kv_type} on {plan.device.name} ({plan.confidence})")
    render.say()
    columns = ("layers", "count", "KV heads", "head_dim", "window", "B per token", "B per sequence")
    render.table("Layers", columns, [_group_row(group) for group in groups], spare=("window", "head_dim", "KV heads"))
    render.say()
    for line in _formula(analysis, groups):
        render.say(f"  {line}")
    render.say()
    parts = plan.fixed_parts | {"KV": plan.kv_bytes, "other programs": plan.device.used_by_others}
    stacked_bar([(name, count) for name, count in parts.items() if count], plan.device.total)
    render.say()
    labels = {analysis.mean_len: " (mean)", plan.max_model_len: " (max_model_len)"}
    capacity = [
        (f"{row['length']:,}{labels.get(row['length'], '')}", f"{row['blocks_each']:,}", f"{row['max_num_seqs']:,}")
        for row in document["max_num_seqs_by_length"]
    ]
    render.table("Sequences at the same time", ("length", "blocks each", "fit at once"), capacity)
    if document["lengths"] is not None:
        _show_lengths(document["lengths"])
        if analysis.lengths is not None and analysis.lengths.outputs is None:
            render.say("  only total lengths are given, so every request is counted with all its tokens")
    steps = document["max_num_batched_tokens_cost"]
    if any(step["blocks_lost"] for step in steps):
        rows = [
            (
                f"{step['max_num_batched_tokens']:,}",
                human_bytes(step["activation_bytes"]),
                f"{step['num_blocks']:,}",
                f"{-step['blocks_lost']:+,}" if step["blocks_lost"] else "",
            )
            for step in steps
            if step["blocks_lost"] or step["max_num_batched_tokens"] == plan.max_num_batched_tokens
        ]
        render.say()
        render.table("What larger steps cost", ("max_num_batched_tokens", "activations", "blocks", "difference"), rows)
    for note in document["notes"]:
        render.say(f"note: {note}")
    _show_answer(document)


def stacked_bar(parts: Sequence[tuple[str, int]], total: int, *, width: int = 60) -> None:
    """Draw byte counts as shares of `total` bytes in one bar of letters, with a legend."""
    from rich.text import Text

    console = render.stdout()
    width = min(width, console.width - 13)
    sums = list(accumulate(count for _, count in parts))
    ends = [min(width, round(width * done / total)) if total else 0 for done in sums]
    bar, legend, start = Text("["), [], 0
    letters: list[str] = []
    for index, ((label, count), end) in enumerate(zip(parts, ends, strict=True)):
        letter = next((each for each in label.upper() if each.isalpha() and each not in letters), label[0])
        style = f"black on {_PALETTE[index % len(_PALETTE)]}"
        letters.append(letter)
        bar.append(letter * (end - start), style=style)
        legend.append(Text.assemble((letter, style), f" {label} {human_bytes(count)}"))
        start = end
    if start < width:
        bar.append("." * (width - start))
        legend.append(Text(f". free {human_bytes(total - sums[-1] if sums else total)}"))
    console.print(bar.append(f"] {human_bytes(total)}"))
    narrow = sum(len(each) + 2 for each in legend) - 2 > console.width
    console.print(Text("\n" if narrow else "  ").join(legend))


def _head_dims(group: dict[str, Any], factor: str = "") -> str:
    """Return the head dimensions of a group of layers, such as "2 x 128", or "192 + 128" if keys and values differ."""
    key, value = group["head_dim_k"], group["head_dim_v"]
    return f"{factor}{key}" if key == value else f"{key} + {value}"


def _group_row(group: dict[str, Any]) -> tuple[str, ...]:
    if group["kind"] == "state":
        return ("state", str(group["layers"]), "", "", "", "0", f"{group['state_bytes_per_seq']:,}")
    return (
        group["kind"],
        str(group["layers"]),
        str(group["kv_heads"]),
        _head_dims(group),
        f"{group['window']:,}" if group["window"] else "",
        f"{group['bytes_per_token']:,}",
        "",
    )


def _formula(analysis: BudgetAnalysis, groups: list[dict[str, Any]]) -> Iterator[str]:
    plan, layout = analysis.plan, analysis.plan.layout
    for group in groups:
        yield _group_line(group, plan.kv_dtype_bytes)
    kinds = f"{layout.full_groups} full, {layout.window_groups} window"
    of_group = f", for one of the {layout.num_groups} groups of layers ({kinds})" if layout.num_groups > 1 else ""
    per_token = plan.block_bytes // plan.block_size
    if plan.block_bytes:
        yield f"block      {plan.block_size} tokens x {per_token:,} B = {human_bytes(plan.block_bytes)}{of_group}"
    yield (
        f"weights    {human_bytes(plan.weights_bytes)} (from {analysis.shape.weights.source}), activations "
        f"{human_bytes(plan.activation_bytes)} for steps of {plan.max_num_batched_tokens} tokens, "
        f"{plan.max_num_seqs_limit} sequences"
    )
    if (adapters := plan.adapters).count:
        yield (
            f"adapters   {adapters.count} x rank {adapters.rank} x {adapters.width:,} inputs and outputs x "
            f"{plan.dtype_bytes} B = {human_bytes(plan.adapter_bytes)}"
        )
    if plan.offload is not None:
        yield f"experts    {plan.offload.describe(plan.max_num_batched_tokens, plan.device.name)}"
    yield f"{'KV memory' if plan.block_bytes else 'left     '}  {_kv_memory(analysis)}"
    if plan.num_blocks:
        blocks_each = f"ceil(({plan.max_model_len:,} - 1) / {plan.block_size})"
        if layout.window_groups:
            window = f"min({blocks_each}, ceil(({layout.window:,} - 1) / {plan.block_size}) + 1)"
            full = f"{layout.full_groups} x {blocks_each} + {layout.window_groups} x {window}"
            blocks_each = f"({full})" if layout.full_groups else window
        in_layers = " in all layers" if layout.window_groups else ""
        yield (
            f"blocks     {human_bytes(plan.available_kv_bytes)} / {human_bytes(plan.block_bytes)} = "
            f"{plan.num_blocks:,} blocks = {plan.num_tokens:,} tokens{in_layers}; "
            f"{plan.headroom_blocks:,} of these blocks are kept free at admission (headroom)"
        )
        yield (
            f"sequences  {plan.num_blocks:,} blocks / {blocks_each} = "
            f"{plan.max_num_seqs:,} sequences of {plan.max_model_len:,} tokens each"
        )


def _group_line(group: dict[str, Any], kv_dtype_bytes: int) -> str:
    layers = f"{group['layers']} layers x"
    if group["kind"] == "state":
        total = group["state_bytes_per_seq"]
        return f"state      {layers} {total // group['layers']:,} B = {total:,} B per sequence"
    dims = _head_dims(group, "2 x ")
    product = f"{group['kv_heads']} KV heads x {dims if dims.startswith('2') else f'({dims})'}"
    if group["kind"] == "mla":
        product = f"{group['head_dim_k']} (latent + rope)"
        if group["index_dim"]:
            product = f"({group['head_dim_k']} (latent + rope) + {group['index_dim']} (index key))"
    window = f", window {group['window']}" if group["window"] else ""
    total = f"{group['bytes_per_token']:,} B per token"
    return f"{group['kind']:9}  {layers} {product} x {kv_dtype_bytes} B = {total}{window}"


def _kv_memory(analysis: BudgetAnalysis) -> str:
    plan, config = analysis.plan, analysis.config
    available = human_bytes(plan.available_kv_bytes)
    if config.num_gpu_blocks_override is not None:
        return f"{config.num_gpu_blocks_override} blocks asked for, {available}"
    if config.kv_cache_memory_bytes is not None:
        return f"{human_bytes(config.kv_cache_memory_bytes)} asked for, {available}"
    if plan.device.kind == "cpu":
        return f"min(4 GiB, {human_bytes(plan.device.free)} available / 4) = {available}"
    parts = " - ".join(f"{human_bytes(count)} {name}" for name, count in plan.fixed_parts.items())
    budget = f"{human_bytes(plan.device.total)} x {plan.utilisation:g}"
    if plan.budget_bytes < int(plan.device.total * plan.utilisation):
        budget = f"{human_bytes(plan.budget_bytes)} that other programs leave"
    return f"{budget} - {parts} {f'= {available}' if plan.available_kv_bytes else 'leaves nothing'}"


def _show_lengths(lengths: dict[str, Any]) -> None:
    render.say()
    mix = f"{lengths['requests']:,} requests, mean {lengths['mean']:,.0f} tokens, CV {lengths['cv']:.2f}"
    render.say(f"Lengths: {lengths['source']}, {mix}")
    rows = [
        (f"P{row['percentile']}", f"{row['length']:,}", f"{row['max_num_seqs']:,}", _probability(row))
        for row in lengths["percentiles"]
    ]
    limit = lengths["at_max_num_seqs"]
    rows.append(("at --max-num-seqs", "", f"{limit['max_num_seqs']:,}", _probability(limit)))
    render.table("", ("length percentile", "tokens", "fit at once", "preemption probability"), rows)
    for row in lengths["max_num_seqs_at_preemption_probability"]:
        risk, count = row["preemption_probability"], row["max_num_seqs"]
        render.say(f"  up to {count:,} running requests: preemption in at most {risk:.0%} of steps")
    render.say("  (assumes independent requests, each at a random point of its lifetime, without common prefixes)")
    if lengths["refused"]:
        render.say(f"  left out, because longer than max_model_len: {lengths['refused']:,} requests")


def _probability(row: dict[str, Any]) -> str:
    value = row["preemption_probability"]
    return "< 0.01 %" if 0 < value < 1e-4 else f"{100 * value:.2f} %"


def _show_answer(document: dict[str, Any]) -> None:
    if document["fits"]:
        if document["users"] is not None:
            render.say(f"fits: {document['users']:,} requests of {document['context']:,} tokens at the same time")
        return
    if document["fits"] is None:
        render.say(f"not known to fit: {document['problem']}")
        return
    render.say(f"does not fit: {document['problem']}")
    changes = document["would_fit"]
    for index, change in enumerate(changes):
        label = "or" if index else "cheapest change"
        cost = f" ({change['cost']})" if change["cost"] else ""
        render.say(f"  {label}: {change['change']}{cost}")
    if not changes:
        render.say("  no single change makes it fit; use a smaller model")


def show_comparison(compared: list[tuple[GpuSpec, BudgetAnalysis]]) -> None:
    first, document = compared[0][1], comparison_document(compared)
    wanted = f" for {document['users']:,} requests" if first.has_demand else ""
    columns = ("GPU", "memory", "dtype", "KV", "tokens", "max_model_len", "fit at once", "fits", "GPUs to fit")
    rows = []
    for gpu, (_, analysis) in zip(document["gpus"], compared, strict=True):
        kv_type = "" if gpu["kv_cache_dtype"] == gpu["dtype"] else f", KV {gpu['kv_cache_dtype']}"
        rows.append(
            (
                gpu["gpu"],
                human_bytes(gpu["total_bytes"]),
                f"{gpu['dtype']}{kv_type}",
                human_bytes(analysis.plan.kv_bytes) if gpu["num_blocks"] else "-",
                f"{gpu['kv_tokens']:,}" if gpu["num_blocks"] else "-",
                f"{gpu['max_model_len']:,}" if analysis.plan.fits else "-",
                f"{gpu['max_num_seqs']:,}",
                {True: "yes", False: "no", None: "unknown"}[gpu["fits"]],
                "-" if gpu["replicas"] is None else f"{gpu['replicas']:,}",
            )
        )
    render.table(
        f"{first.spec}{wanted}", columns, rows, spare=("KV", "GPUs to fit", "max_model_len", "dtype", "tokens")
    )
    if first.has_demand:
        render.say("GPUs to fit: they hold all requests; name one with --gpu to simulate how many meet latency targets")
    smallest = next((gpu["name"] for gpu in document["gpus"] if gpu["fits"]), None)
    none = "it fits on none of these GPUs" if document["fits"] is False else "not known to fit on any of these GPUs"
    render.say(f"the smallest GPU that fits: {smallest}" if smallest else none)
    for note in (*first.shape.geometry.notes, *first.shape.weights.notes):
        render.say(f"note: {spell(note, flag)}")
