from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar

import typer

from llmsched.cli.options.flags import duration_option, typed, with_options
from llmsched.cli.quantities import duration
from llmsched.engine.goodput import Slo
from llmsched.engine.request_latency import READER_SPEED

R = TypeVar("R")


def parse_itl_target(text: str) -> Slo:
    """Parse a target for ITL: "50ms" (for the P99), "p95:50ms", "mean:30ms" or "max:1s"."""
    statistic, colon, limit = text.rpartition(":")
    return Slo(itl=duration(limit), itl_statistic=statistic if colon else "p99")


def _slo(meaning: str) -> Any:
    return duration_option(f"Target for {meaning}, such as 800ms.")


@dataclass(frozen=True, slots=True)
class SloFlags:
    slo_ttft: Annotated[float | None, _slo("the time to the first token (TTFT)")] = None
    slo_itl: Annotated[
        Slo | None,
        typer.Option(
            parser=typed(parse_itl_target),
            metavar="[STATISTIC:]DURATION",
            help="Target for the gaps between the tokens of a request (ITL). 50ms or p99:50ms limits their P99; other "
            "statistics are p50 to p99.9, mean and max.",
        ),
    ] = None
    slo_tpot: Annotated[float | None, _slo("the mean time per output token after the first (TPOT)")] = None
    slo_e2e: Annotated[float | None, _slo("the time to the last token (E2E)")] = None
    reader_speed: Annotated[
        float,
        typer.Option(
            metavar="TOKENS_PER_SECOND",
            help="Reading speed for the pause figures: a token is late if a reader at this speed has to wait for it. "
            "Most people read more slowly than 10 tokens/s.",
        ),
    ] = READER_SPEED

    def slo(self) -> Slo:
        """Return the targets. Raises ConfigError for a `reader_speed` that is not above 0 and finite."""
        return replace(
            self.slo_itl or Slo(),
            ttft=self.slo_ttft,
            tpot=self.slo_tpot,
            e2e=self.slo_e2e,
            reader_speed=self.reader_speed,
        )


def with_slo_options(command: Callable[..., R]) -> Callable[..., R]:
    """Add the flags of latency targets to a Typer command, which receives the targets as `slo`."""
    return with_options("slo", SloFlags, SloFlags.slo)(command)
