"""The command line: help, flags, errors, and the commands on a scripted company."""

from __future__ import annotations

import _thread
import json
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import httpx
import pytest
import trio
from click.testing import CliRunner, Result
from company import WordTokenizer

from mlx_troupe.actors import blocking, system
from mlx_troupe.actors.inline_worker import InlineWorker
from mlx_troupe.actors.testing import ScriptedDevice, count_up
from mlx_troupe.http.cli import models
from mlx_troupe.http.cli.conversation import Ask, Conversation, Leave, Note
from mlx_troupe.http.cli.errors import plain_error
from mlx_troupe.http.cli.main import cli
from mlx_troupe.http.cli.progress import ProgressBar
from mlx_troupe.http.cli.render import printable
from mlx_troupe.http.cli.serve import run_server
from mlx_troupe.runtime.engine import doctor as engine_doctor
from mlx_troupe.runtime.engine.blas import BlasReport
from mlx_troupe.runtime.engine.doctor import DoctorReport, Folder
from mlx_troupe.runtime.errors import ModelError
from mlx_troupe.runtime.requests import Hlg
from mlx_troupe.runtime.settings import Settings

COMMANDS = ("serve", "chat", "generate", "get", "doctor", "clear")
SETTINGS = Settings(Path("/nowhere"), "scripted")
SERVED = {
    "allowed_hosts": (),
    "cors_origins": (),
    "keepalive": 15.0,
    "adapter_dirs": (Path("/nowhere"),),
    "ignore_sessions": False,
}


class ChatTokenizer(WordTokenizer):
    """A word tokenizer with a template: the contents of all messages in a row."""

    has_chat_template = True

    def render(self, messages: list[dict[str, object]], **_: object) -> str:
        return " ".join(str(message["content"]) for message in messages)


@dataclass(frozen=True)
class Found:
    """What resolving a name gives."""

    path: Path
    name: str
    source: str = "test"


class Asked:
    """Opens a scripted company wherever the product would open MLX, and remembers with what."""

    def __init__(self) -> None:
        self.queries: list[str | None] = []
        self.device = ScriptedDevice(decode_seconds=0, prefill_token_seconds=0)
        self._open = system.open_runtime
        self._open_blocking = blocking.open_blocking_runtime

    def find(self, query: str | None, *, offline: bool = False) -> Found:
        """Stands in for ``find_model``."""
        self.queries.append(query)
        return Found(Path("/nowhere"), query or "starter")

    @asynccontextmanager
    async def open_runtime(self, settings: Settings) -> AsyncIterator[system.Runtime]:
        """Stands in for the real one."""
        async with self._open(settings, tokenizer=ChatTokenizer, worker=self._worker()) as runtime:
            yield runtime

    def open_blocking(self, settings: Settings) -> AbstractContextManager[blocking.BlockingRuntime]:
        """Stands in for the blocking twin."""
        return self._open_blocking(settings, tokenizer=ChatTokenizer, worker=self._worker())

    def _worker(self) -> InlineWorker:
        return InlineWorker(self.device)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    """No model is looked for and no MLX imported in this test."""
    stage = Asked()
    monkeypatch.setattr(models, "find_model", stage.find)
    monkeypatch.setattr(models, "fetch_model", stage.find)
    monkeypatch.setattr(system, "open_runtime", stage.open_runtime)
    monkeypatch.setattr(blocking, "open_blocking_runtime", stage.open_blocking)
    # A shell makes its background jobs deaf to Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield stage
    signal.signal(signal.SIGINT, before)


def invoke(*args: str, stdin: str = "") -> Result:
    """Run the command line; an exception that is not an exit fails the test."""
    result = CliRunner().invoke(cli, args, input=stdin, prog_name="mlx-troupe")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


# ---- help, version, flags ----------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help_with_every_option_explained(command: str) -> None:
    """A newcomer reads what each flag does; none is left without a word."""
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert f"Usage: mlx-troupe {command}" in result.stdout
    options = [p for p in cli.commands[command].params if isinstance(p, click.Option)]
    assert all(option.help for option in options)


def test_help_lists_every_command_and_says_what_to_type() -> None:
    """The first screen names all verbs and gives examples."""
    result = invoke("--help")
    assert result.exit_code == 0
    assert all(f"\n  {command}" in result.stdout for command in COMMANDS)
    assert "Examples:" in result.stdout
    assert invoke("help").stdout == result.stdout
    assert invoke("help", "chat").stdout == invoke("chat", "--help").stdout
    assert invoke("help", "nothing").exit_code == 2


def test_version_is_the_distributions() -> None:
    """``--version`` prints one line."""
    assert invoke("--version").stdout.startswith("mlx-troupe 0.")
    assert invoke("-v").stdout == invoke("--version").stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_unknown_flags_are_usage_errors(command: str) -> None:
    """Nothing is silently ignored."""
    result = invoke(command, "--bogus")
    assert result.exit_code == 2
    assert "--bogus" in result.stderr


@pytest.mark.parametrize(
    "args",
    [
        ("serve", "--temperature", "5.1"),
        ("serve", "--temperature", "nan"),
        ("serve", "--prompt-cache", "inf"),
        ("serve", "--prompt-cache", "-1"),
        ("serve", "--top-p", "2"),
        ("serve", "--port", "65536"),
        ("serve", "--batch", "0"),
        ("serve", "--dtype", "int3"),
        ("serve", "one", "two"),
        ("generate", "--max-tokens", "0"),
        ("get",),
        ("bogus",),
    ],
)
def test_values_out_of_range_are_usage_errors(asked: Asked, args: tuple[str, ...]) -> None:
    """They are found before a model is looked for."""
    result = invoke(*args)
    assert result.exit_code == 2
    assert "Error:" in result.stderr
    assert not asked.queries


def test_importing_the_command_line_imports_nothing_heavy() -> None:
    """A fast BLAS can still be put in front of MLX, and help answers at once."""
    program = """
        import sys
        import mlx_troupe.http.cli.main
        heavy = {"mlx", "mlx_lm", "numpy", "trio", "quart", "hypercorn", "rich", "httpx"}
        print(sorted(heavy & set(sys.modules)))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


# ---- errors ------------------------------------------------------------------------------------


def test_a_model_that_is_not_found_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit status 1, the message, and no traceback."""

    def find(query: str | None, *, offline: bool) -> Found:
        raise ModelError(f"no model matches {query}")

    monkeypatch.setattr(models, "fetch_model", find)
    for args in (["serve", "x", "--port", "0"], ["chat", "x"], ["get", "x"]):
        result = invoke(*args)
        assert result.exit_code == 1
        assert result.stderr == "Error: no model matches x\n"


def test_a_device_that_cannot_load_is_one_line(asked: Asked) -> None:
    """An error out of the company's nursery comes as a group and is still one line."""
    asked.device.fail_next = ModelError("weights are missing")
    result = invoke("generate", "--prompt", "1")
    assert result.exit_code == 1
    assert "weights are missing" in result.stderr
    assert "Traceback" not in result.stderr


def test_faults_of_ours_keep_their_traceback() -> None:
    """Only what a person can act on becomes a plain line, also inside groups."""
    told = ModelError("told")
    assert plain_error(ExceptionGroup("", [ExceptionGroup("", [told])])) == "told"
    assert plain_error(ExceptionGroup("", [told, ValueError("bug")])) is None
    assert plain_error(KeyError("bug")) is None
    assert "mlx-troupe[cpu]" in str(plain_error(ImportError("libmlx.so: cannot open", name="core")))
    assert "mlx-troupe[cpu]" in str(plain_error(ModuleNotFoundError("none", name="mlx_lm.utils")))
    assert plain_error(ImportError("bug", name="core")) is None
    assert plain_error(FileNotFoundError(2, "No such file", "x.gguf")) == "No such file (x.gguf)"


def test_ctrl_c_ends_a_command_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit status is the shell's for an interrupt, also out of a nursery."""

    def find(query: str | None, *, offline: bool) -> Found:
        raise BaseExceptionGroup("", [KeyboardInterrupt()])

    monkeypatch.setattr(models, "fetch_model", find)
    result = invoke("get", "x")
    assert result.exit_code == 130
    assert "Traceback" not in result.stderr


# ---- generate ----------------------------------------------------------------------------------


def test_generate_streams_the_answer_and_tells_the_speed(asked: Asked) -> None:
    """The answer goes to standard output, figures to standard error."""
    result = invoke("generate", "m", "--prompt", "3 4", "--max-tokens", "3", "--temperature", "0")
    assert result.exit_code == 0
    assert result.stdout == " 5 6 7\n"
    assert result.stderr.startswith("2 prompt tokens")
    assert "tok/s" in result.stderr
    assert asked.queries == ["m"]


def test_generate_reads_a_pipe_and_prints_json(asked: Asked) -> None:
    """``--json`` is one object with text, usage and times."""
    result = invoke("generate", "--raw", "--json", "--max-tokens", "2", stdin="8\n")
    picture = json.loads(result.stdout)
    assert picture["text"] == " 9 10"
    assert picture["finish_reason"] == "length"
    assert picture["usage"]["prompt_tokens"] == 1
    assert picture["usage"]["completion_tokens"] == 2
    assert result.stderr == ""


def test_generate_refuses_an_empty_prompt(asked: Asked) -> None:
    """Before a model is looked for."""
    assert invoke("generate", stdin=" \n").exit_code == 2
    assert not asked.queries


# ---- chat --------------------------------------------------------------------------------------


def test_chat_in_a_pipe_answers_line_by_line_and_remembers(asked: Asked) -> None:
    """Each line is a turn; the second prompt holds the first answer."""
    result = invoke("chat", "--max-tokens", "2", "--temperature", "0", stdin="3\n\n10\n")
    assert result.exit_code == 0
    assert result.stdout == " 4 5\n 11 12\n"
    prompts = [start.ids for plan in asked.device.plans for start in plan.start]
    assert prompts == [(3,), (3, 4, 5, 10)]


def test_chat_commands_reset_and_set_the_system_message(asked: Asked) -> None:
    """What is reset is out of the next prompt; the system message stays in front."""
    lines = "3\n/system 7\n20\n/reset\n30\n/nonsense\n/exit\n40\n"
    result = invoke("chat", "--max-tokens", "1", "--temperature", "0", stdin=lines)
    assert result.stdout == " 4\n 21\n 31\n"
    assert "Unknown command /nonsense" in result.stderr
    prompts = [start.ids for plan in asked.device.plans for start in plan.start]
    assert prompts == [(3,), (7, 20), (7, 30)]


def test_chat_goes_on_after_an_error(asked: Asked) -> None:
    """A question that cannot be served is taken back and the next one is answered."""
    too_long = " ".join(["5"] * 5000)
    result = invoke("chat", "--max-tokens", "1", "--temperature", "0", stdin=f"{too_long}\n8\n")
    assert result.exit_code == 0
    assert result.stdout.split() == ["9"]
    assert "context window" in result.stderr


def test_conversation_keeps_only_what_was_answered() -> None:
    """A question without an answer is forgotten, an interrupted answer is kept."""
    conversation = Conversation("be brief")
    assert isinstance(conversation.hear("one"), Ask)
    conversation.answered("")
    heard = conversation.hear(" two ")
    assert isinstance(heard, Ask)
    assert [m.content for m in heard.prompt.messages] == ["be brief", "two"]
    conversation.answered("half an ans")
    assert [m.content for m in conversation.turns] == ["two", "half an ans"]
    assert conversation.hear("") == Note("")
    assert conversation.hear("/exit") == Leave()
    assert isinstance(conversation.hear("/"), Note)


def test_ctrl_c_stops_the_answer_and_nothing_else(asked: Asked) -> None:
    """The answer so far is kept, and the next question is answered in full."""

    def interrupted(ids: tuple[int, ...]) -> int:
        if ids[-1] == 200:
            _thread.interrupt_main()
        return count_up(ids)

    asked.device.script = interrupted
    # A person presses the key while text appears, not before the first of it is shown.
    asked.device.decode_seconds = 0.002
    asked.device.model = replace(asked.device.model, context_window=100_000)
    result = invoke("chat", "--temperature", "0", stdin="3\n999 0\n")
    first, second = result.stdout.splitlines()
    assert first.startswith(" 4 5 6")
    assert "stopped" in result.stderr
    prompts = [start.ids for plan in asked.device.plans for start in plan.start]
    assert prompts[1] == (3, *map(int, first.split()), 999, 0)
    assert second.startswith(" 1 2 3")


def test_control_characters_never_reach_the_terminal() -> None:
    """A model cannot move the cursor or set the title of a person's window."""
    assert printable("a\x1b]0;title\x07b\r\n\tc\x9b") == "a]0;titleb\n\tc"


# ---- doctor ------------------------------------------------------------------------------------


REPORT = DoctorReport(
    version="0.1.0",
    python="3.11.7",
    system="Linux",
    device="Device(cpu, 0), a CPU",
    mlx_version="0.32",
    mlx_build="cpu",
    mlx_lm_version="0.32.2",
    blas=BlasReport("openblas", path="/lib/libopenblas.so.0", core="Haswell", threads=2),
    gemm_gflops=123.4,
    processor="a CPU",
    cores=2,
    memory_total=24 << 30,
    memory_available=20 << 30,
    device_memory=None,
    folders=(Folder("models", Path("/cache"), 1 << 30, 50 << 30),),
    advice=("Add memory.",),
)


def test_doctor_prints_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every figure that is known, and the advice last."""
    monkeypatch.setattr(engine_doctor, "inspect", lambda: REPORT)
    told = invoke("doctor").stdout
    for part in ("openblas, Haswell kernels, 2 threads", "123 GFLOP/s", "24.0 GiB, 20.0 GiB avail"):
        assert part in told
    assert told.endswith("\n- Add memory.\n")
    assert "GPU memory" not in told


def test_doctor_as_json_is_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines read the same figures."""
    monkeypatch.setattr(engine_doctor, "inspect", lambda: REPORT)
    picture = json.loads(invoke("doctor", "--json").stdout)
    assert picture["blas"]["kind"] == "openblas"
    assert picture["folders"][0]["path"] == "/cache"


# ---- get, serve --------------------------------------------------------------------------------


def test_get_prints_the_directory_last(asked: Asked) -> None:
    """A script can take the last line."""
    result = invoke("get", "starter")
    assert result.stdout.splitlines()[-1] == "/nowhere"
    assert asked.queries == ["starter"]


def test_progress_without_a_terminal_is_one_line_for_each_job(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A log is not filled with bars."""
    with ProgressBar() as bar:
        for done in range(0, 101, 10):
            bar(done * 10**6, 100 * 10**6, "downloading x")
        bar(1, None, "checking x")
    assert capsys.readouterr().err == "downloading x (100 MB)\nchecking x\n"


@pytest.mark.parametrize("args", [(), ("--batch", "4"), ("serve", "--batch", "4")])
def test_no_verb_means_serve(
    asked: Asked, args: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only options, or nothing at all, serve the default model."""
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(trio, "run", lambda function, *rest: seen.append((function, *rest)))
    assert invoke(*args).exit_code == 0
    function, settings, host, port, flags = seen[0]
    assert function is run_server
    assert isinstance(settings, Settings)
    assert (host, port) == ("127.0.0.1", 8080)
    assert settings.batch == (4 if args else 32)
    assert settings.queue == 64
    assert 0 < settings.prompt_cache_bytes <= 8 << 30
    assert flags["keepalive"] == 15.0
    assert asked.queries == [None]


def test_flags_of_serve_reach_the_settings(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values, aliases, repeated flags and variables."""
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(trio, "run", lambda function, *rest: seen.append(rest))
    monkeypatch.setenv("MLX_TROUPE_SERVE_QUEUE", "7")
    flags = (
        "serve some/model --port 0 --decode-concurrency 3 --dtype keep --prompt-cache 0.5 "
        "--max-tokens 9 --temp 0.5 --top-p 0.25 --top-k 2 --allowed-host a --allowed-host b "
        "--cors-origin http://x --keepalive 0 --ignore-sessions --thinking false "
        "--kv-budget 1.5 --memory-budget 30 --hlg-sampling --hlg-toe 2"
    )
    assert invoke(*flags.split()).exit_code == 0
    settings, host, port, rest = seen[0]
    assert settings == Settings(
        Path("/nowhere"),
        "some/model",
        batch=3,
        queue=7,
        dtype="keep",
        prompt_cache_bytes=512 << 20,
        max_tokens=9,
        temperature=0.5,
        top_p=0.25,
        top_k=2,
        thinking=False,
        kv_budget_bytes=1_500_000_000,
        memory_budget_bytes=30_000_000_000,
        hlg=Hlg(toe=2.0),
        hlg_sampling=True,
    )
    assert (host, port) == ("127.0.0.1", 0)
    assert rest["allowed_hosts"] == ("a", "b")
    assert rest["cors_origins"] == ("http://x",)
    assert rest["keepalive"] == 0
    assert rest["ignore_sessions"]


def test_a_taken_port_is_told_before_a_model_is_looked_for(asked: Asked) -> None:
    """Nobody waits for a download to learn that."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = invoke("serve", "--port", str(port))
    assert result.exit_code == 1
    assert f"Port {port} on 127.0.0.1 is taken" in result.stderr
    assert not asked.queries


async def test_serve_answers_until_ctrl_c(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    """The banner names a working address; the first interrupt drains and ends."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_server, SETTINGS, "127.0.0.1", 0, SERVED)
        told = ""
        with trio.fail_after(60):
            while "Ctrl-C stops" not in told:
                await trio.sleep(0.01)
                told += capsys.readouterr().out
            url = next(line.split()[1] for line in told.splitlines() if "address" in line)
            async with httpx.AsyncClient() as client:
                health = await client.get(url.removesuffix("/v1") + "/health")
                assert health.json() == {"status": "ok"}
                body = {"messages": [{"role": "user", "content": "3"}], "max_tokens": 2}
                chat = await client.post(f"{url}/chat/completions", json=body)
                assert chat.json()["choices"][0]["message"]["content"] == " 4 5"
            signal.raise_signal(signal.SIGINT)
            while "Ctrl-C again" not in told:
                await trio.sleep(0.01)
                told += capsys.readouterr().err


async def test_serve_ends_when_the_engine_is_gone(asked: Asked) -> None:
    """A server without an engine does not linger."""
    asked.device.fail_next = ModelError("weights are missing")
    with pytest.raises(ExceptionGroup) as raised, trio.fail_after(60):
        await run_server(SETTINGS, "127.0.0.1", 0, SERVED)
    assert plain_error(raised.value)
