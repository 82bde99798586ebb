"""``mlx-troupe generate``: one prompt in, one answer out. The model runs in this process."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import click

from ...runtime.requests import (
    ChatPrompt,
    Finished,
    GenerationRequest,
    Message,
    SamplingRequest,
    TextDelta,
    TextPrompt,
)
from .local import Wishes, answer, open_ready, settings_for_one
from .options import (
    adapter_option,
    check_adapters,
    dtype_option,
    kv_option,
    model_argument,
    offline_option,
    sampling_options,
)
from .render import Printer

if TYPE_CHECKING:
    from pathlib import Path

    from ...runtime.kvschemes import KVScheme
    from ...runtime.settings import Dtype, Settings

EPILOG = """\b
Examples:
  mlx-troupe generate --prompt 'Write a haiku about the sea.'
  git diff | mlx-troupe generate qwen3-4b --max-tokens 100
  mlx-troupe generate --raw --prompt 'Once upon a time' --temperature 0
"""


@click.command(epilog=EPILOG, short_help="Answer one prompt and leave.")
@model_argument
@click.option("--prompt", metavar="TEXT", help="The prompt. Unset: all of standard input.")
@click.option("--raw", is_flag=True, help="Continue the text as it is, without a chat template.")
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    help="Longest answer, in tokens.",
)
@sampling_options
@click.option("--seed", type=int, help="Makes sampling repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end instead.")
@adapter_option
@kv_option
@dtype_option
@offline_option
def generate(
    model: str | None,
    prompt: str | None,
    raw: bool,
    max_tokens: int,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    seed: int | None,
    as_json: bool,
    adapters: tuple[Path, ...],
    kv: KVScheme,
    dtype: Dtype,
    offline: bool,
) -> None:
    """Answer one prompt with MODEL. Speed goes to standard error, the answer to standard output.

    Without MODEL: the one that you have, or the starter model.
    """
    from .models import find_model

    text = read_prompt(prompt)
    sampling = SamplingRequest(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    wanted = TextPrompt(text) if raw else ChatPrompt((Message("user", text),))
    request = Wishes(max_tokens, sampling).request(wanted)
    trial = Trial(Printer(quiet=as_json))
    check_adapters(adapters)
    found = find_model(model, offline=offline)
    finished = trial.run(settings_for_one(found, dtype, adapters, kv), request)
    if as_json:
        click.echo(json.dumps(trial.picture(finished), ensure_ascii=False))
    else:
        trial.printer.end()
        click.echo(trial.speed(finished), err=True)


def read_prompt(given: str | None) -> str:
    """The flag's text or all of standard input. Raises UsageError when there is neither."""
    if given is None and sys.stdin.isatty():
        raise click.UsageError("There is no prompt: give --prompt TEXT, or pipe one in.")
    text = sys.stdin.read() if given is None else given
    if not text.strip():
        raise click.UsageError("The prompt is empty.")
    return text


@dataclass(slots=True)
class Trial:
    """One answer and its times, in seconds after the request was sent."""

    printer: Printer
    begin: float = 0.0
    first: float = 0.0
    end: float = 0.0

    def run(self, settings: Settings, request: GenerationRequest) -> Finished:
        """Load the model and run the request. Raises TroupeError."""
        with open_ready(settings) as runtime:
            self.begin = time.perf_counter()
            finished = answer(runtime, request, self._show)
            self.end = time.perf_counter() - self.begin
            return finished

    def _show(self, delta: TextDelta) -> None:
        if not self.first:
            self.first = time.perf_counter() - self.begin
        self.printer.show(delta)

    def rate(self, finished: Finished) -> float | None:
        """Tokens per second after the first text; None when there was too little to tell."""
        tokens = finished.usage.completion_tokens - 1
        seconds = self.end - self.first
        return tokens / seconds if self.first and tokens > 0 and seconds > 0 else None

    def speed(self, finished: Finished) -> str:
        """The line for a person."""
        usage = finished.usage
        rate = self.rate(finished)
        told = "" if rate is None else f", {rate:.1f} tok/s"
        return (
            f"{usage.prompt_tokens} prompt tokens, first text after {self.first:.2f} s; "
            f"{usage.completion_tokens} tokens in {self.end:.2f} s{told} "
            f"({finished.reason.value})"
        )

    def picture(self, finished: Finished) -> dict[str, object]:
        """The value of ``--json``."""
        return {
            "text": self.printer.content,
            "reasoning": self.printer.reasoning,
            "finish_reason": finished.reason.value,
            "usage": asdict(finished.usage),
            "seconds": round(self.end, 4),
            "first_text_seconds": round(self.first, 4),
            "tokens_per_second": self.rate(finished),
        }
