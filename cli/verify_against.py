"""`verify --save` and `--against`: the engine's outputs for fixed prompts, now and at an earlier time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmsched.cli import render
from llmsched.cli.options.flags import typed_options
from llmsched.cli.output_files import check_file, writing
from llmsched.cli.profiles.this_machine import versions_table
from llmsched.engine.device import device_memory
from llmsched.engine.errors import LlmschedError

if TYPE_CHECKING:
    from llmsched.engine.config import EngineConfig
    from llmsched.engine.parity.saved_outputs import OutputComparison
    from llmsched.engine.parity.verification import LoadedModel

#: Most first divergences that are listed.
_MOST = 4
#: Flags that choose the prompts, which a saved file fixes.
_PROMPT_FLAGS = ("--num-prompts", "--num-tokens", "--seed")


@dataclass(frozen=True, slots=True)
class SavedOutputFlags:
    """Flags of `verify` that save outputs and compare with saved ones."""

    save: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the engine's tokens and log-probabilities for fixed prompts to FILE, as JSON, instead of "
            "comparing with transformers.",
        ),
    ] = None
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Compare with the outputs that --save has written: after an upgrade, with other settings, on another "
            "device.",
        ),
    ] = None
    max_kl: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            metavar="NATS",
            show_default="0.01",
            help="With --against, the largest mean KL divergence per token for which the exit code is 0.",
        ),
    ] = None

    @property
    def given(self) -> bool:
        return self.save is not None or self.against is not None

    @property
    def limit(self) -> float:
        return 0.01 if self.max_kl is None else self.max_kl

    def check(self, context: typer.Context) -> None:
        """Raise LlmschedError for flags that do not go together, and for a file that cannot be written."""
        if self.max_kl is not None and (self.against is None or not math.isfinite(self.max_kl)):
            raise LlmschedError(f"--max-kl {self.max_kl:g}: must be a finite number, given with --against FILE")
        if self.against is not None and (fixed := set(typed_options(context)) & {*_PROMPT_FLAGS}):
            raise LlmschedError(f"{', '.join(sorted(fixed))}: the file of --against fixes the prompts; leave it out")
        if self.save is not None:
            check_file("--save", self.save, self.against)


def run_saved(config: EngineConfig, flags: SavedOutputFlags, settings: Mapping[str, int], as_json: bool) -> bool:
    """Save outputs, compare with saved ones, or both, and print the result. Return False if they differ too much.

    `settings` are num_prompts, num_tokens and seed of new outputs.
    """
    from llmsched.engine.parity.saved_outputs import compare_outputs, generate_outputs, read_outputs
    from llmsched.engine.parity.verification import load_for_parity

    with render.progress_bar() as progress:
        try:
            earlier = None if flags.against is None else read_outputs(flags.against)
        except LlmschedError as problem:
            raise LlmschedError(f"--against {problem}") from problem
        loaded = load_for_parity(config, progress, with_reference=False)
        origin = _origin(loaded, config)
        found = None if earlier is None else compare_outputs(loaded, earlier, progress)
        if flags.save is not None:
            outputs = generate_outputs(loaded, origin, **settings)
            with writing("--save", flags.save):
                outputs.write(flags.save)
    if found is None or earlier is None:
        document = {"saved": str(flags.save), "origin": origin, **settings}
        if as_json:
            render.emit_json(document)
        else:
            render.say(f"saved {settings['num_prompts']} outputs of {origin['model']} to {flags.save}")
            render.say(f"compare later with: llmsched verify {config.model} --against {flags.save}", wrap=False)
        return True
    well = found.mean_kl <= flags.limit
    if as_json:
        both = {"origin": origin, "saved_origin": dict(earlier.origin)}
        render.emit_json({"ok": well, "max_kl": flags.limit, **asdict(found), **_divergences(found), **both})
    else:
        _show(found, flags, _changes(earlier.origin, origin), well)
    return well


def _divergences(found: OutputComparison) -> dict[str, Any]:
    return {"divergences": [one._asdict() for one in found.divergences]}


def _origin(loaded: LoadedModel, config: EngineConfig) -> dict[str, Any]:
    """Return the model, settings and versions that compute the outputs."""
    names = [str(dtype).removeprefix("torch.") for dtype in (loaded.dtype, loaded.kv_dtype)]
    return {
        "model": loaded.info.name,
        "device": device_memory(loaded.device).name,
        "dtype": names[0],
        "kv_cache_dtype": names[1],
        "quantization": config.quantization,
        "lora": config.lora and config.lora[0],
        "model_impl": config.model_impl,
        "block_size": config.block_size,
        **{f"{name} version": found for name, found in versions_table().items()},
        "created": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    }


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the entries of two origins that differ, except the time."""
    return [
        f"{name} {before.get(name)} -> {now.get(name)}"
        for name in dict.fromkeys([*before, *now])
        if name != "created" and before.get(name) != now.get(name)
    ]


def _show(found: OutputComparison, flags: SavedOutputFlags, changes: list[str], well: bool) -> None:
    render.say(f"compared with {flags.against}: {', '.join(changes) or 'same model, device, settings and versions'}")
    render.say(
        f"KL divergence  mean {found.mean_kl:.2g} nats per token, largest {found.largest_kl:.2g}; allowed mean "
        f"{flags.limit:g}"
    )
    render.say(
        f"tokens         {found.same_token:.1%} of {found.num_positions} equal, after the saved tokens before them"
    )
    for one in found.divergences[:_MOST]:
        kl = found.kl_by_prompt[one.prompt]
        render.say(
            f"  {one.prompt}: first differs at token {one.position}, {one.got} instead of {one.expected}; KL {kl:.2g}"
        )
    if len(found.divergences) > _MOST:
        render.say(f"  {len(found.divergences) - _MOST} more outputs differ")
    if flags.save is not None:
        render.say(f"saved the new outputs to {flags.save}")
    render.say(_verdict(found, flags.limit, well))


def _verdict(found: OutputComparison, limit: float, well: bool) -> str:
    if not well:
        return f"NOT as before: the mean KL divergence is above --max-kl {limit:g}"
    if num_differing := len(found.divergences):
        outputs = f"{num_differing} of {len(found.kl_by_prompt)} outputs have other tokens than before"
        return f"within --max-kl {limit:g}, but {outputs}"
    return f"within --max-kl {limit:g}, with the same tokens as before"
