"""Messages of errors, and the names of settings in them."""

from __future__ import annotations

import pickle

import pytest

from llmsched.cli.options.flags import flag
from llmsched.engine.errors import ConfigError, LlmschedError, check_range, setting, spell


def test_names_of_settings_are_written_for_the_reader() -> None:
    problem = ConfigError("headroom", f"0.3 is above {setting('max_headroom')} 0.2")
    assert str(problem) == "headroom: 0.3 is above max_headroom 0.2"
    assert problem.text(flag) == "--headroom: 0.3 is above --max-headroom 0.2"
    assert flag("model") == "model"


def test_words_and_values_that_look_like_settings_stay_as_they_are() -> None:
    problem = LlmschedError("no file /runs/max_num_seqs/{seed}.json")
    assert problem.text(flag) == str(problem) == "no file /runs/max_num_seqs/{seed}.json"


def test_marks_survive_until_the_last_reader() -> None:
    inner = ConfigError("seed", f"see {setting('request_rate')}")
    assert spell(inner.text(setting), flag) == "--seed: see --request-rate"


def test_errors_can_be_pickled() -> None:
    problem = pickle.loads(pickle.dumps(ConfigError("seed", f"see {setting('request_rate')}")))
    assert (problem.field, str(problem)) == ("seed", "seed: see request_rate")


def test_a_value_out_of_range_is_shown_with_the_range() -> None:
    check_range("seed", 0, True, "0 or more")
    with pytest.raises(ConfigError, match=r"speedup: 0\.5 is out of range; allowed is 1 or more"):
        check_range("speedup", 0.5, False, "1 or more")
    with pytest.raises(ConfigError, match="seed: -1000001 is out of range"):
        check_range("seed", -1_000_001, False, "0 or more")
