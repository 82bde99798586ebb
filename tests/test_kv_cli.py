"""``--kv-quant`` from the command line to what ``/stats`` says, and its refusals at start."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from click.testing import CliRunner, Result
from company import WordTokenizer, ask, run
from kv_rig import checkpoint
from tiny import make_checkpoint, prompt

from mlx_troupe.actors.system import open_runtime
from mlx_troupe.http.cli import models
from mlx_troupe.http.cli.banner import banner
from mlx_troupe.http.cli.errors import plain_error
from mlx_troupe.http.cli.main import cli
from mlx_troupe.http.cli.serve import run_server
from mlx_troupe.http.seams import HttpSettings
from mlx_troupe.runtime.engine import tokenizer
from mlx_troupe.runtime.kvschemes import PLAIN_KV, AffineKV, PerLayerKV, TurboKV
from mlx_troupe.runtime.model_info import KVLayers, ModelInfo
from mlx_troupe.runtime.requests import Finished
from mlx_troupe.runtime.settings import Settings


def invoke(*args: str) -> Result:
    return CliRunner().invoke(cli, args)


@pytest.mark.parametrize("command", ["serve", "generate", "chat", "doctor"])
@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--kv-quant", "6"), "'6' is none of off, config, 4, 8, turbo and turbo:kXvY"),
        (("--kv-quant", "turbo:k3v3"), "keys of 3 bits do not exist, only 2, 4, 5 and 8"),
        (("--kv-quant", "8", "--kv-quant", "turbo"), "schemes exclude each other"),
    ],
)
def test_schemes_that_do_not_exist_are_usage_errors(
    command: str, flags: tuple[str, ...], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are told before a model is looked for."""
    monkeypatch.setattr(models, "find_model", lambda *_, **__: pytest.fail("looked for a model"))
    result = invoke(command, *flags)
    assert result.exit_code == 2
    assert told in " ".join(result.stderr.split())


def test_the_doctor_needs_a_model_for_a_scheme() -> None:
    """A flag that would change nothing is not accepted."""
    result = invoke("doctor", "--kv-quant", "8")
    assert result.exit_code == 2
    assert "--model" in result.stderr


@pytest.mark.parametrize(
    ("word", "scheme"),
    [
        (None, PLAIN_KV),
        ("off", PLAIN_KV),
        ("config", PerLayerKV()),
        ("8", AffineKV(8)),
        ("turbo:k8v4", TurboKV(8, 4)),
    ],
)
def test_the_flag_reaches_the_settings(
    word: str | None, scheme: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Served rows are encoded from their first token on."""
    from test_cli import Found

    seen: list[tuple[object, ...]] = []
    monkeypatch.setattr(models, "find_model", lambda *_, **__: Found(Path("/nowhere"), "m"))
    monkeypatch.setattr(trio, "run", lambda function, *rest: seen.append(rest))
    assert (
        invoke("serve", "m", "--port", "0", *(("--kv-quant", word) if word else ())).exit_code == 0
    )
    settings = seen[0][0]
    assert isinstance(settings, Settings)
    assert settings.kv == scheme


def test_the_banner_says_what_was_applied() -> None:
    """A line for each kind of layer, and none where nothing is encoded."""
    layers = (KVLayers("sliding", "plain bfloat16", 2, 512), KVLayers("full", "turbo k8v3", 1, 200))
    plain = ModelInfo("m", 128, 4096, frozenset(), kv_layers=layers[:1])
    encoded = ModelInfo("m", 128, 4096, frozenset(), kv_scheme="turbo:k8v3", kv_layers=layers)
    settings, http = Settings(Path("/m"), "m"), HttpSettings()
    assert "kv " not in banner(settings, plain, http, "http://x")
    told = banner(settings, encoded, http, "http://x")
    assert "kv       2 sliding layers: plain bfloat16, 512 bytes a token each" in told
    assert "kv       1 full layers: turbo k8v3, 200 bytes a token each" in told


@pytest.mark.mlx
@pytest.mark.parametrize(
    ("scheme", "told"),
    [
        (AffineKV(8), "--kv-quant 8 and llama: heads of 16 are not whole groups of 64"),
        (TurboKV(), "--kv-quant turbo:k8v3 and llama: TurboQuant takes heads of 64, 128, 256, 512"),
    ],
)
async def test_a_server_whose_model_cannot_take_the_scheme_does_not_start(
    scheme: AffineKV | TurboKV, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends with one line that names the option and the family; nobody hangs."""
    path = make_checkpoint(tmp_path / "m", "llama")
    monkeypatch.setattr(tokenizer, "load_tokenizer", lambda *_, **__: WordTokenizer())
    settings = Settings(path, "tiny", dtype="float32", kv=scheme)
    flags = {
        "allowed_hosts": (),
        "cors_origins": (),
        "keepalive": 15.0,
        "adapter_dirs": (tmp_path,),
        "ignore_sessions": False,
    }
    with pytest.raises(ExceptionGroup) as raised, trio.fail_after(60):
        await run_server(settings, "127.0.0.1", 0, flags)
    assert told in (plain_error(raised.value) or "")


@pytest.mark.mlx
@pytest.mark.parametrize("scheme", [AffineKV(8), AffineKV(4, start=30), TurboKV()])
async def test_a_company_on_encoded_rows(scheme: AffineKV | TurboKV, tmp_path: Path) -> None:
    """Requests together, prefixes reused, and figures that tell the scheme applied."""
    path = checkpoint(tmp_path / "m", "plain")
    settings = Settings(path, "tiny", dtype="float32", kv=scheme)
    asks = [ask(*prompt(40), *prompt(9, seed=n), max_tokens=6) for n in range(4)]
    async with open_runtime(settings, tokenizer=lambda: WordTokenizer()) as runtime:
        with trio.fail_after(60):
            await runtime.wait_ready()
            alone = [await run(runtime, request) for request in asks]
            again: dict[int, str] = {}

            async def one(n: int) -> None:
                again[n], _ = await run(runtime, asks[n])

            async with trio.open_nursery() as nursery:
                for n in range(4):
                    nursery.start_soon(one, n)
            stats = runtime.stats()
    assert stats["model"]["kv"]["layers"][0]["form"] != "plain float32"  # type: ignore[index]
    assert stats["model"]["kv"]["start"] == scheme.start  # type: ignore[index]
    for text, end in alone:
        assert isinstance(end, Finished)
        assert text
    # The shared 40 tokens are past the threshold.
    assert [end.usage.cached_tokens for _, end in alone[1:] if isinstance(end, Finished)] == [
        40
    ] * 3
    assert sorted(again) == [0, 1, 2, 3]
