"""Search for the best setting: the one with the highest knee, or the best under the given load."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from llmsched.cli.load.load import Load
from llmsched.cli.tune.knees import KneeFinder, RateReport, RateRow, given_rate, meets
from llmsched.cli.tune.knob_search import SearchSpace, search
from llmsched.cli.tune.knobs import Setting
from llmsched.cli.tune.preference import best_trial, contenders, preferred
from llmsched.cli.tune.race import Race
from llmsched.cli.tune.time_limit import OutOfTimeError
from llmsched.cli.tune.trial_history import TrialHistory
from llmsched.cli.tune.trials import Trial

#: Rate by which settings are judged: their knees, or the rate of the given load.
JudgedBy = Literal["knee", "given"]

#: Rates at which the default and the choice are compared, as multiples of the knee or of the given rate.
MULTIPLES: Mapping[str, Sequence[float]] = {"knee": (0.5, 0.8, 1.0, 1.2), "given": (1.5, 2.0)}
#: Most settings that run at rates above the default's knee, in a simulation and measured.
_CLIMBERS, _MEASURED_CLIMBERS = 8, 2
#: Factor between the first two rates of a search above the default's knee, or around a predicted knee.
_STEP = 1.25
#: The default stays if, at a rate up to the knee, the choice has less than this share of the default's goodput.
_LEAST_GOOD = 0.97


@dataclass(slots=True)
class RateSearch:
    """Search that compares the settings of `space` with the default and chooses one."""

    history: TrialHistory
    load: Load
    space: SearchSpace
    race: Callable[[float | None], Awaitable[Race]]  # returns a race at a rate (None: the given load)
    finder: KneeFinder  # finds knees with real runs
    guess: KneeFinder | None  # finds knees with predictions of a cost model
    rates: RateReport = field(default_factory=RateReport)
    notes: list[str] = field(default_factory=list)  # sentences for the user

    @property
    def default(self) -> Setting:
        return self.history.default

    async def at_given(self) -> Setting | None:
        """Search under the given load. Return the best setting, or None if no setting is feasible."""
        self.notes += await search(self.space, await self.race(None))
        self.rates.given = given_rate(self.load, self.history.trial(self.default))
        if (best := best_trial(self.history)) is None:
            return None
        self._note_alike(best)
        await self._compare(best.setting, "given", self.rates.given)
        return best.setting

    async def by_knee(self) -> Setting | None:
        """Search for the setting with the highest knee. Return it, or None if no setting is feasible.

        Compare the settings at the default's knee if that rate is above the rate of the given load, else under the
        given load. Then run the settings that met the SLOs at higher and higher rates, until no setting meets them.
        """
        try:
            served = await self.finder.trial(self.default, None)
        except OutOfTimeError:
            return None
        self.rates.given = given_rate(self.load, served)
        compared = self.rates.compared = await self._default_knee(served)
        race = await self.race(compared)
        self.notes += await search(self.space, race)
        if not self.history.runs.get(self.default):
            self.history.add(self.finder.runs[self.default, compared])  # time was up before
        best = await self._climb(compared)
        if best is None:
            return None
        if race.out_of_time and best == self.default:
            self.notes.append(
                "the time is too short to compare settings, so the default stays; set a longer --time-limit"
            )
        elif self.rates.light or self.rates.default.missed is None:
            self._note_alike(self.history.trial(best))
        self.rates.best = self.finder.bounds(best)
        knee = None if self.rates.light else self.rates.best.met
        await self._compare(best, "knee", knee)
        if best != self.default and (worse := next(filter(self._worse, self.rates.rows), None)):
            self.notes.append(f"the default stays: the setting with the highest knee is worse at {worse.rate:.3g}/s")
            best, self.rates.best, self.rates.rows = self.default, self.rates.default, []
            await self._compare(best, "knee", knee)
        return best

    @property
    def _open_rate(self) -> float | None:
        given = self.rates.given
        return None if given is None or math.isinf(given) or self.load.closed else given

    async def _default_knee(self, served: Trial) -> float | None:
        """Return the knee of the default setting if it is above the rate of the given load, else None."""
        given, default = self.rates.given, self.default
        base, met = self._open_rate or served.requests_per_s, meets(served)
        if not base or (self.guess is not None and not met):
            return None  # a load past the knee is judged as it is
        if self._open_rate is not None:
            self.finder.trials[default, base] = served
        low, start, factor = base if met and self._open_rate else base / 64, base * (2.0 if met else 0.5), 2.0
        if self.guess is not None and await self.guess.climb([default], base / 64, start):
            start, factor = self.guess.bounds(default).met or start, _STEP
        await self.finder.climb([default], low, start, factor)
        found = self.rates.default = self.finder.bounds(default)
        self.rates.light = found.missed is None and not self.finder.out_of_time
        return found.met if found.met and not self.rates.light and given is not None and found.met > given else None

    async def _climb(self, compared: float | None) -> Setting | None:
        """Run settings at rates above `compared`, and return the one that meets the SLOs at the highest rate.

        If several settings meet the SLOs at this rate, `preferred(...)` chooses among them. If no higher rate can be
        tried, return the best setting so far.
        """
        able = {setting: trial for setting, trial in contenders(self.history).items() if meets(trial)}
        rate = self._open_rate if compared is None else compared
        if rate is None or self.rates.light or not able:
            best = best_trial(self.history)
            return best.setting if best else self.default if compared is not None else None
        longest = max(trial.longest_run for trial in able.values())
        self.finder.trials |= {(t.setting, rate): t for t in self.history.trials() if t.longest_run == longest}
        most = _CLIMBERS if self.guess is None else _MEASURED_CLIMBERS
        climbers = sorted(able, key=lambda setting: able[setting].miss)[:most]
        if self.default in able and self.default not in climbers:
            climbers.append(self.default)
        missed = self.finder.bounds(self.default).missed
        start = missed if missed is not None and missed > rate else rate * _STEP
        top = await self.finder.climb(climbers, rate, start, _STEP) or climbers
        usual = self.rates.default = self.finder.bounds(self.default)
        highest = self.finder.bounds(top[0]).met or 0.0
        if self.default not in top and usual.met and highest <= usual.met * (1 + self.finder.tolerance):
            top.append(self.default)  # the knees differ by no more than the tolerance
        return preferred([self.finder.trials[s, self.finder.bounds(s).met] for s in top], self.default).setting

    async def _compare(self, best: Setting, name: JudgedBy, unit: float | None) -> None:
        """Run the default and `best` under the given load and at multiples of the rate `unit`. Add rows to `rates`."""
        if self.rates.compared is None:
            done = [setting for setting in (self.default, best) if self.history.runs.get(setting)]
            self.finder.trials |= {(setting, None): self.history.trial(setting) for setting in done}
        rows: list[tuple[str, float | None]] = [("given", None)]
        if unit and math.isfinite(unit):
            rows += [(f"{multiple:g} x {name}", multiple * unit) for multiple in MULTIPLES[name]]
        for label, rate in rows:
            source = self.finder if rate is None else self.guess or self.finder
            with suppress(OutOfTimeError):
                pair = [await source.trial(setting, rate) for setting in (self.default, best)]
                self.rates.rows.append(RateRow(label, rate or self.rates.given, pair[0], pair[1], source is self.guess))

    def _note_alike(self, best: Trial) -> None:
        able = list(contenders(self.history))
        if best.setting == self.default and len(able) > 1 and self.history.ranking().level(able) == able:
            self.notes.append(
                "the load is too light to tell the settings apart, so the default stays; give a higher --request-rate, "
                "more requests (--num-prompts) or tighter SLOs"
            )

    def _worse(self, row: RateRow) -> bool:
        """Return True if the chosen setting, at a rate up to its knee, has clearly less goodput than the default."""
        past = row.rate is not None and self.rates.best.met is not None and row.rate > self.rates.best.met
        less = (row.best.goodput_rps or 0.0) < _LEAST_GOOD * (row.default.goodput_rps or 0.0)
        return less and not row.predicted and not past
