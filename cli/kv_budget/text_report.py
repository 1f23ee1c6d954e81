"""The report of kv-budget for a person: the layers, the formula filled in, the memory, and how many it serves."""

from __future__ import annotations

from llmsched.cli import render
from llmsched.cli.kv_budget.analysis import Concurrency, Findings
from llmsched.cli.options.flags import flag
from llmsched.cli.render import human_bytes
from llmsched.engine.architecture.geometry import LayerGroup
from llmsched.engine.errors import spell
from llmsched.engine.memory.plan import MemoryPlan

#: Lengths for which capacity is shown besides max_model_len and the mean.
_LENGTHS = (512, 2048, 8192, 32768, 131072)


def show(found: Findings) -> None:
    """Print all of it."""
    plan = found.plan
    kv_type = "" if found.kv_dtype == found.dtype else f", KV in {found.kv_dtype}"
    render.say(f"{found.spec} in {found.dtype}{kv_type} on {plan.device.name} ({plan.confidence})")
    render.say()
    columns = ("layers", "number", "KV heads", "head_dim", "window", "B per token", "here", "B per sequence")
    render.table("Layers", columns, [_group_row(group, plan.kv_dtype_bytes) for group in found.shape.geometry.groups])
    render.say()
    for line in _formula(found):
        render.say(f"  {line}")
    render.say()
    render.stacked_bar(_parts(plan), plan.device.total)
    render.say()
    render.table("Sequences at the same time", ("length", "blocks each", "max_num_seqs"), _capacity(found))
    if found.concurrency is not None:
        _show_concurrency(found.concurrency)
    _show_steps(found)
    for note in found.notes:
        render.say(f"note: {spell(note, flag)}")
    _show_answer(found)


def _group_row(group: LayerGroup, kv_dtype_bytes: int) -> tuple[str, ...]:
    """A group's shape and costs; `here` is what this engine caches for a token, where that differs."""
    if group.kind == "state":
        return ("state", str(group.layers), "", "", "", "0", "0", f"{group.layers * group.state_bytes:,}")
    same = group.head_dim_k == group.head_dim_v
    return (
        group.kind,
        str(group.layers),
        str(group.kv_heads),
        str(group.head_dim_k) if same else f"{group.head_dim_k} + {group.head_dim_v}",
        f"{group.window:,}" if group.window else "",
        f"{group.bytes_per_token(kv_dtype_bytes):,}",
        f"{group.cached_bytes_per_token(kv_dtype_bytes):,}",
        "",
    )


def _formula(found: Findings) -> list[str]:
    """The arithmetic, each line with its numbers."""
    plan, geometry = found.plan, found.shape.geometry
    lines = [_group_line(group, plan.kv_dtype_bytes) for group in geometry.groups]
    lines.append(_block_line(plan))
    lines.append(
        f"weights    {human_bytes(plan.weights_bytes)} (from {found.shape.weights.source}), activations "
        f"{human_bytes(plan.activation_bytes)} for steps of {plan.max_num_batched_tokens} tokens, "
        f"{plan.max_num_seqs_limit} sequences"
    )
    lines.append(f"KV memory  {_kv_memory(found)}")
    if plan.num_blocks == 0:
        return lines
    lines.append(
        f"blocks     {human_bytes(plan.available_kv_bytes)} / {human_bytes(plan.block_bytes)} = {plan.num_blocks:,} "
        f"blocks = {plan.num_tokens:,} tokens{' in all layers' if plan.layout.window_groups else ''}; "
        f"{plan.headroom_blocks:,} of them are headroom at admission"
    )
    lines.append(
        f"sequences  {plan.num_blocks:,} blocks / {_blocks_of_one(plan)} = "
        f"{plan.max_num_seqs:,} of {plan.max_model_len:,} tokens"
    )
    return lines


def _block_line(plan: MemoryPlan) -> str:
    """What a block is."""
    layout, groups = plan.layout, ""
    if layout.num_groups > 1:
        kinds = f"{layout.full_groups} full, {layout.window_groups} window"
        groups = f", of one of {layout.num_groups} groups of layers ({kinds})"
    per_token = plan.block_bytes // plan.block_size
    return f"block      {plan.block_size} tokens x {per_token:,} B = {human_bytes(plan.block_bytes)}{groups}"


def _blocks_of_one(plan: MemoryPlan) -> str:
    """The blocks of one sequence of max_model_len tokens, as a formula."""
    layout, all_tokens = plan.layout, f"ceil(({plan.max_model_len:,} - 1) / {plan.block_size})"
    if not layout.window_groups:
        return all_tokens
    window = f"min({all_tokens}, ceil(({layout.window:,} - 1) / {plan.block_size}) + 1)"
    if not layout.full_groups:
        return window
    return f"({layout.full_groups} x {all_tokens} + {layout.window_groups} x {window})"


def _kv_memory(found: Findings) -> str:
    """Where the memory for KV comes from."""
    plan, config = found.plan, found.config
    available = human_bytes(plan.available_kv_bytes)
    if config.num_gpu_blocks_override is not None:
        return f"{config.num_gpu_blocks_override} blocks asked for, {available}"
    if config.kv_cache_memory_bytes is not None:
        return f"{human_bytes(config.kv_cache_memory_bytes)} asked for, {available}"
    if plan.device.kind == "cpu":
        return f"min(4 GiB, {human_bytes(plan.device.free)} available / 4) = {available}"
    parts = [
        f"{human_bytes(count)} {name}"
        for name, count in (
            ("weights", plan.weights_bytes),
            ("activations", plan.activation_bytes),
            ("CUDA context", plan.context_bytes),
            ("state", plan.state_bytes),
        )
        if count
    ]
    budget = f"{human_bytes(plan.device.total)} x {plan.utilisation:g}"
    if plan.budget_bytes < int(plan.device.total * plan.utilisation):
        budget = f"{human_bytes(plan.budget_bytes)} that others leave"
    return f"{budget} - {' - '.join(parts)} {f'= {available}' if plan.num_blocks else 'leaves nothing'}"


def _group_line(group: LayerGroup, kv_dtype_bytes: int) -> str:
    """What one group costs: its kind, the product, the result."""
    if group.kind == "state":
        total = group.layers * group.state_bytes
        return f"state      {group.layers} layers x {group.state_bytes:,} B = {total:,} B per sequence"
    same = group.head_dim_k == group.head_dim_v
    dims = f"2 x {group.head_dim_k}" if same else f"({group.head_dim_k} + {group.head_dim_v})"
    product = f"{group.layers} layers x {group.kv_heads} KV heads x {dims} x {kv_dtype_bytes} B"
    if group.kind == "mla":
        product = f"{group.layers} layers x {group.head_dim_k} (latent + rope) x {kv_dtype_bytes} B"
    window = f", window {group.window}" if group.window else ""
    return f"{group.kind:9}  {product} = {group.bytes_per_token(kv_dtype_bytes):,} B per token{window}"


def _parts(plan: MemoryPlan) -> list[tuple[str, int]]:
    """What the memory of the device holds."""
    parts = {
        "weights": plan.weights_bytes,
        "activations": plan.activation_bytes,
        "CUDA context": plan.context_bytes,
        "state": plan.state_bytes,
        "KV": plan.kv_bytes,
        "others": plan.device.used_by_others,
    }
    return [(name, count) for name, count in parts.items() if count]


def _capacity(found: Findings) -> list[tuple[str, str, str]]:
    plan = found.plan
    labels = {length: "" for length in _LENGTHS if length < plan.max_model_len}
    if found.mean_len is not None:
        labels[found.mean_len] = " (mean)"
    labels[plan.max_model_len] = " (max_model_len)"
    return [
        (f"{length:,}{label}", f"{plan.blocks_for(length):,}", f"{plan.num_seqs_at(length):,}")
        for length, label in sorted(labels.items())
    ]


def _show_concurrency(found: Concurrency) -> None:
    """How many sequences of mixed lengths fit, and how likely they outgrow the pool."""
    lengths = found.lengths
    render.say()
    render.say(
        f"Lengths: {lengths.source}, {len(lengths.prompts):,} requests, mean {lengths.mean:,.0f} tokens, "
        f"CV {lengths.variation:.2f}"
    )
    render.table("", ("if all were as long as", "tokens", "max_num_seqs", "P(preemption) of the mix"), _mix_rows(found))
    for risk, count in found.safe:
        render.say(f"  up to {count:,} running need more blocks than there are at most {risk:.0%} of the time")
    render.say("  (independent requests, each at a random step of its life, with no prefix in common)")
    if found.refused:
        render.say(f"  left out, since longer than max_model_len: {found.refused:,} requests")
    if lengths.outputs is None:
        render.say("  prompts and outputs are not told apart, so every request is counted with all its tokens")


def _mix_rows(found: Concurrency) -> list[tuple[str, str, str, str]]:
    return [
        (
            "what max_num_seqs lets run" if row.percentile is None else f"P{row.percentile}",
            "" if row.length is None else f"{row.length:,}",
            f"{row.max_num_seqs:,}",
            _probability(row.preemption_probability),
        )
        for row in found.rows
    ]


def _probability(value: float) -> str:
    return "< 0.01 %" if 0 < value < 1e-4 else f"{100 * value:.2f} %"


def _show_steps(found: Findings) -> None:
    """What other values of max_num_batched_tokens would leave."""
    plan = found.plan
    shown = [step for step in found.step_sizes if step.num_blocks != plan.num_blocks]
    if not shown:
        return
    shown = sorted([*shown, plan], key=lambda step: step.max_num_batched_tokens)
    rows = [
        (
            f"{step.max_num_batched_tokens:,}",
            human_bytes(step.activation_bytes),
            f"{step.num_blocks:,}",
            f"{step.num_blocks - plan.num_blocks:+,}" if step is not plan else "",
        )
        for step in shown
    ]
    render.say()
    render.table("What larger steps cost", ("max_num_batched_tokens", "activations", "blocks", "difference"), rows)


def _show_answer(found: Findings) -> None:
    """Whether it fits, and if not what would help."""
    if found.problem is None:
        if found.asked:
            length = found.demand.context or found.plan.max_model_len
            render.say(f"fits: {found.demand.users:,} requests of {length:,} tokens at the same time")
        return
    render.say(f"does not fit: {spell(found.problem, flag)}")
    served = next((change for change in found.changes if change.servable), None)
    for index, change in enumerate(found.changes):
        label = "cheapest change" if index == 0 else "cheapest that serve can do" if change is served else "or"
        cost = f" ({spell(change.cost, flag)})" if change.cost else ""
        render.say(f"  {label}: {spell(change.what, flag)}{cost}")
    if not found.changes:
        render.say("  no single change makes it fit; use a smaller model")
