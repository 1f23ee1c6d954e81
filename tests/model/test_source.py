"""A model's name leads to files on disk or to one line that says why not."""

from __future__ import annotations

import json
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from llmsched.engine.errors import LlmschedError, ModelError, one_line
from llmsched.engine.model.loader import load_config
from llmsched.engine.model.source import HubUnreachableError, fetch_config, locate

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def offline_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the hub's cache directory, empty, with the hub out of reach."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def test_directory(tiny_model: Any) -> None:
    path = tiny_model("llama")
    source = locate(str(path))
    assert (source.kind, source.name, source.path) == ("directory", path.name, path)


def test_the_current_directory_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my-model").mkdir()
    monkeypatch.chdir(tmp_path / "my-model")
    assert locate(".").name == "my-model"


def test_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "some-model.Q8_0.gguf"
    path.write_bytes(b"GGUF")
    source = locate(str(path))
    assert (source.kind, source.name, source.path) == ("gguf", "some-model.Q8_0", path)


@pytest.fixture
def cached(offline_hub: Path, tiny_model: Any) -> Path:
    """Return the folder of a repository in the cache, without files that serving does not need."""
    repository = offline_hub / "models--acme--tiny"
    shutil.copytree(tiny_model("llama"), repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT, encoding="utf-8")
    return repository


def test_a_hub_model_in_the_cache_needs_no_hub(cached: Path) -> None:
    source = locate("acme/tiny")
    assert (source.kind, source.name) == ("directory", "acme/tiny")
    assert load_config(source).model_type == "llama"


def test_a_cached_model_may_lack_files_that_serving_does_not_need(cached: Path) -> None:
    files = [*(path.name for path in (cached / "snapshots" / COMMIT).iterdir()), "LICENSE.txt"]
    listing = {"format_version": 1, "files": {name: {"size": 1, "blob_id": "0"} for name in files}}
    (cached / "trees").mkdir()
    (cached / "trees" / f"{COMMIT}.json").write_text(json.dumps(listing), encoding="utf-8")
    assert locate("acme/tiny").path == cached / "snapshots" / COMMIT


def test_folders_of_the_hub_cache_have_the_name_of_the_repository(cached: Path) -> None:
    snapshot = cached / "snapshots" / COMMIT
    for path in (cached, snapshot):
        source = locate(str(path))
        assert (source.name, source.path) == ("acme/tiny", snapshot)


def test_a_link_to_a_model_gives_its_name(cached: Path, tmp_path: Path) -> None:
    (tmp_path / "my-model").symlink_to(cached / "snapshots" / COMMIT)
    assert locate(str(tmp_path / "my-model")).name == "my-model"


@pytest.fixture
def online(offline_hub: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Let huggingface_hub open connections, through the proxies that the test sets."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    huggingface_hub.close_session()  # its client keeps the proxies of its first request
    yield monkeypatch
    huggingface_hub.close_session()


@pytest.mark.parametrize("value", ["foo:bar", "ftp://host:1", "http://[::1"])
def test_a_malformed_proxy_is_named(value: str, online: pytest.MonkeyPatch) -> None:
    online.setenv("HTTPS_PROXY", value)
    with pytest.raises(LlmschedError, match=r"HTTPS_PROXY='.*' is not the URL of a proxy; expected one like"):
        locate("acme/absent")


def test_a_socks_proxy_that_is_down_does_not_hide_the_cache(cached: Path, online: pytest.MonkeyPatch) -> None:
    for name in ("ALL_PROXY", "HTTPS_PROXY"):
        online.setenv(name, "socks5://127.0.0.1:1")
    assert locate("acme/tiny").path == cached / "snapshots" / COMMIT


@pytest.mark.parametrize("fetch", [fetch_config, locate])
def test_a_hub_that_is_down_is_asked_once(fetch: Callable[[str], object], online: pytest.MonkeyPatch) -> None:
    """huggingface_hub would try six times, which takes half a minute."""
    calls = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up() -> None:
            with suppress(OSError):  # the test ends
                while True:
                    calls.append(server.accept()[0].close())

        threading.Thread(target=hang_up, daemon=True).start()
        online.setenv("HTTPS_PROXY", f"http://127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(HubUnreachableError, match="the hub cannot be reached"):
            fetch("acme/absent")
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("acme/absent", "the hub cannot be reached.*give a local directory"),
        ("absent", "the hub cannot be reached"),
        ("/no/such/directory", "not a hub id"),
        ("two words", "not a hub id"),
        ("", "the name is empty"),
        ("absent.gguf", "no such file"),
    ],
)
def test_a_missing_model_is_refused_in_one_line(spec: str, message: str, offline_hub: Path) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        locate(spec)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"model {spec}".strip())


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"")
    with pytest.raises(ModelError, match="another kind of file"):
        locate(str(path))


def test_long_errors_become_one_line() -> None:
    assert one_line(ValueError("first\n  second")) == "first second"
    assert one_line(ValueError()) == "ValueError"
    assert len(one_line(ValueError("x" * 5000))) < 310
