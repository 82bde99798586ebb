"""A client leaves in the middle of a long prefill and asks again: how much of it is still there?

    .venv/bin/python bench/cancel.py [--tokens 4000] [--at 0.5] [--company lone beside]

One server on the starter, spoken to over HTTP. For every moment and company a prompt of its own:
its client closes the connection as soon as ``/stats`` says that so many of its tokens were
prefilled or are being prefilled, and sends the identical request again. What counts is the second
answer's ``usage.cached_tokens``. ``beside``: while another client's answer is being streamed.
About 100 s for each line on two quiet cores.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from clients import POLL_SECONDS, ask, leave, ordinary_ids, scheduler
from serve import RESULTS, starter
from servers import running, troupe

ANSWER = 8000


@contextmanager
def streaming(url: str, seed: int) -> Iterator[None]:
    """Another client's answer, which goes on until the end."""
    over = threading.Event()
    decoding = scheduler(url)["generated_tokens"]
    prompt = ordinary_ids(50, seed)
    thread = threading.Thread(target=leave, args=(url, prompt, over.is_set, ANSWER))
    thread.start()
    try:
        while scheduler(url)["generated_tokens"] <= decoding + 4:
            time.sleep(POLL_SECONDS)
        yield
    finally:
        over.set()
        thread.join()


def cut(url: str, prompt: tuple[int, ...], at: float) -> str:
    """Leave at this part of the prompt, ask again; a line of the table."""
    before = int(scheduler(url)["prefilled_tokens"])

    def prefilled() -> int:
        return int(scheduler(url)["prefilled_tokens"]) - before

    began = time.perf_counter()
    leave(url, prompt, lambda: prefilled() >= at * len(prompt))
    left = prefilled()
    seconds = time.perf_counter() - began
    again = ask(url, prompt)
    share = again.cached / len(prompt)
    return f"{seconds:.1f} | {left} | {again.first:.1f} | {again.cached} | {share:.1%}"


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--at", type=float, nargs="+", default=[0.5])
    parser.add_argument("--company", nargs="+", default=["lone", "beside"])
    options = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    print("| company | leaves at | after s | tokens prefilled or under way | retry: first token s"
          " | cached_tokens | of the prompt |")  # fmt: skip
    print("|---|---|---|---|---|---|---|")
    with running(troupe(starter()), RESULTS / "cancel.log") as url:
        ask(url, ordinary_ids(300, 1))
        for turn, company in enumerate(options.company):
            for n, at in enumerate(options.at):
                seed = 10 * turn + n + 2
                with streaming(url, 100 + seed) if company == "beside" else nullcontext():
                    row = cut(url, ordinary_ids(options.tokens, seed), at)
                print(f"| {company} | {at:.0%} | {row} |", flush=True)


if __name__ == "__main__":
    main()
