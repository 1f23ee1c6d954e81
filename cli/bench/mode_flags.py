from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from llmsched.cli.bench.compare.variants import SYNTAX
from llmsched.cli.bench.knee.knee_exploration import SLACK
from llmsched.cli.bench.knee.knee_search import ATTAINMENT, TOLERANCE
from llmsched.cli.options.flags import flag, typed
from llmsched.cli.quantities import fraction
from llmsched.cli.targets.simulated_replicas import MAX_REPLICAS, Replication
from llmsched.engine.errors import LlmschedError
from llmsched.engine.routing.router import RULES


@dataclass(frozen=True, slots=True)
class ModeFlags:
    """Flags that select a mode of `bench`. Raises LlmschedError if flags exclude each other."""

    compare: Annotated[
        str | None,
        typer.Option(
            metavar="VARIANTS",
            show_default=False,
            help="Run the same load under two or more engine settings, in turn, and print ratios to the first. "
            f"Separate variants with commas; each is {SYNTAX}. continuous is another name for fair.",
        ),
    ] = None
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default="2",
            help="Runs of each variant. Each round has new requests, the same for all variants.",
        ),
    ] = None
    find_knee: Annotated[
        bool,
        typer.Option(
            "--find-knee",
            help=f"Find the highest request rate at which {100 * ATTAINMENT:g} % of requests meet every SLO. Default "
            f"SLOs: {SLACK:g} times the TTFT and TPOT of an idle target. Starts at --request-rate, or at half the "
            "target's throughput.",
        ),
    ] = False
    max_request_rate: Annotated[
        float | None,
        typer.Option(
            metavar="PER_SECOND",
            show_default="4 times the target's throughput",
            help="Highest request rate to try; --request-rate is then the lowest.",
        ),
    ] = None
    knee_attainment: Annotated[
        float | None,
        typer.Option(
            parser=typed(fraction),
            metavar="SHARE",
            show_default=f"{ATTAINMENT:.0%}",
            help="Share of requests that must meet every SLO.",
        ),
    ] = None
    knee_tolerance: Annotated[
        float | None,
        typer.Option(
            parser=typed(fraction),
            metavar="SHARE",
            show_default=f"{TOLERANCE:.0%}",
            help="Stop when the rates just below and above the knee differ by at most this share.",
        ),
    ] = None

    self_check: Annotated[
        bool,
        typer.Option(
            "--self-check",
            help="Check the accuracy of this bench on this machine against a built-in server with known timings.",
        ),
    ] = False

    replicas: Annotated[
        int,
        typer.Option(
            min=1,
            max=MAX_REPLICAS,
            help="With --simulate: replicas of the engine, each on a GPU of its own, behind a router.",
        ),
    ] = 1
    router: Annotated[
        str,
        typer.Option(
            metavar="RULE",
            help=f"With --replicas: the rule that chooses a replica for each request: {', '.join(RULES)}. prefix "
            "chooses the lowest expected time to first token, affinity as Ray Serve's PrefixCacheAffinityRouter does.",
        ),
    ] = "prefix"

    @property
    def replication(self) -> Replication:
        return Replication(self.replicas, self.router)

    @property
    def one_run(self) -> bool:
        return self.compare is None and not self.find_knee and not self.self_check

    def __post_init__(self) -> None:
        if self.self_check and (self.compare is not None or self.find_knee):
            raise LlmschedError("--self-check checks the bench itself; leave out --compare and --find-knee")
        if self.compare is not None and self.find_knee:
            raise LlmschedError("--compare and --find-knee exclude each other; run one after the other")
        if self.compare is None and self.rounds is not None:
            raise LlmschedError("--rounds applies only to --compare; leave it out, or add --compare")
        needing = ("max_request_rate", "knee_attainment", "knee_tolerance")
        given = [name for name in needing if getattr(self, name) is not None]
        if given and not self.find_knee:
            names = ", ".join(map(flag, given))
            raise LlmschedError(f"{names}: applies only to --find-knee; leave it out, or add --find-knee")
