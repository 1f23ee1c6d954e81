"""Profiles survive the way to disk and back, and a bad one is refused in one line that names the key."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from llmsched.profiles.toml_files import ProfileError
from llmsched.profiles.tuned import TunedProfile, list_profiles, load_profile, profile_path, save_profile, store_memory

PROFILE = TunedProfile(
    engine={"max_num_batched_tokens": 256, "max_num_seqs": 16, "enable_prefix_caching": True},
    slo={"ttft_ms": 800.0},
    workload={"input_len": 256, "arrivals": "closed loop"},
    model={"name": 'quoted "name" \\ ünïcode'},
    device={"name": "cpu"},
    versions={"llmsched": "0.1.0"},
    memory={"weights_ratio": 1.0},
    trials=({"max_num_batched_tokens": 128, "feasible": False, "reason": "P99 TTFT"}, {"max_num_batched_tokens": 256}),
    reason="256 has the most throughput",
    created=datetime(2026, 1, 31, 12, 0, tzinfo=UTC),
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMSCHED_PROFILES", str(tmp_path / "home"))
    return tmp_path / "home"


def test_round_trip_by_name_and_by_path(home: Path, tmp_path: Path) -> None:
    assert list_profiles() == []
    assert save_profile(PROFILE, "chat-fast") == home / "chat-fast.toml"
    assert load_profile("chat-fast") == PROFILE
    assert list_profiles() == ["chat-fast"]

    path = save_profile(PROFILE, str(tmp_path / "deep" / "er.toml"))
    assert load_profile(str(path)) == PROFILE


def test_saving_replaces_the_older_one_and_leaves_nothing_else(home: Path) -> None:
    save_profile(PROFILE, "a")
    save_profile(TunedProfile(engine={"max_num_seqs": 1}), "a")
    assert load_profile("a").engine == {"max_num_seqs": 1}
    assert [path.name for path in home.iterdir()] == ["a.toml"]


def test_the_default_directory_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLMSCHED_PROFILES")
    assert profile_path("a").parts[-3:] == ("llmsched", "profiles", "a.toml")


def test_memory_is_stored_without_touching_what_a_person_wrote(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    written = "# for the night shift\n[memory]\nkv_ratio = 2.0\n\n[engine] # by hand\nmax_num_seqs = 4\n"
    path.write_text(written)
    store_memory({"kv_ratio": 1.0, "weights_ratio": 1.01}, str(path))
    kept = path.read_text()
    assert kept.startswith("# for the night shift\n[engine] # by hand\nmax_num_seqs = 4\n")
    assert load_profile(str(path)).memory == {"kv_ratio": 1.0, "weights_ratio": 1.01}
    store_memory({"kv_ratio": 3.0}, str(path))
    assert load_profile(str(path)).memory == {"kv_ratio": 3.0}
    assert path.read_text().count("[memory]") == 1
    with pytest.raises(ProfileError, match="no file"):
        store_memory({}, str(tmp_path / "away.toml"))


@pytest.mark.parametrize("memory", ["[memory] # measured", "[memory]"])
def test_memory_that_a_person_commented_is_replaced(tmp_path: Path, memory: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f"[engine]\n{memory}\nkv_ratio = 2.0 # much\n")
    store_memory({"kv_ratio": 1.0}, str(path))
    assert load_profile(str(path)).memory == {"kv_ratio": 1.0}


def test_a_file_is_never_left_broken(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("memory.kv_ratio = 2.0\n[engine]\n")
    with pytest.raises(ProfileError, match=r"not written as a table \[memory\]"):
        store_memory({"kv_ratio": 1.0}, str(path))
    assert load_profile(str(path)).memory == {"kv_ratio": 2.0}


def test_pipes_and_devices_are_not_read(tmp_path: Path, home: Path) -> None:
    """Refuse a pipe: reading one without a writer never ends."""
    pipe = tmp_path / "pipe.toml"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path, Path("/dev/zero")):
        with pytest.raises(ProfileError, match="is not a regular file"):
            load_profile(f"{path}/" if path == tmp_path else str(path))


def test_nobodys_home_is_no_place(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="no file"):
        load_profile("~nobody-of-this-name/day.toml")


def test_a_missing_profile_names_those_that_exist() -> None:
    save_profile(PROFILE, "there")
    with pytest.raises(ProfileError, match=r"no file .*away.toml \(profiles by name: there\)"):
        load_profile("away")


@pytest.mark.parametrize("name", ["", "../up", "a b", ".hidden", "x\ny"])
def test_names_that_cannot_be_files(name: str) -> None:
    with pytest.raises(ProfileError):
        load_profile(name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[engine", "end of a table"),
        ("", r"\[engine\]"),
        ("engine = 3", "engine is not a table"),
        ("[engine]\nmax_num_seqs = [1]", "engine.max_num_seqs"),
        ("[engine]\n[engines]", "unknown key 'engines'"),
        ("trials = 3\n[engine]", "trials is not a list"),
        ("trials = [3]\n[engine]", r"trials\[0\] is not a table"),
        ("reason = 3\n[engine]", "reason"),
        ("created = 'today'\n[engine]", "created"),
        ("\udcff\udcfe", "utf-8"),  # bytes that are not text
    ],
)
def test_a_bad_file_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(ProfileError, match=message) as problem:
        load_profile(str(path))
    assert "\n" not in str(problem.value)
    assert str(path) in str(problem.value)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ProfileError, match="cannot be written"):
        save_profile(PROFILE, str(tmp_path / "file" / "a.toml"))
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(ProfileError, match="cannot be written"):
        save_profile(PROFILE, str(tmp_path / "folder.toml"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.toml"]
