"""The SSD tier without a device: lookups among many entries, opening their folder, save and load.

.venv/bin/python bench/spill_index.py [--entries 10000] [--tokens 2000] [--files 2000] [--mib 256]
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path

from mlx_troupe.runtime.spill.folder import make_key
from mlx_troupe.runtime.spill.header import namespace_digest, pack_ids
from mlx_troupe.runtime.spill.index import SpillIndex
from mlx_troupe.runtime.spill.state import HostArray, HostLayer, HostState
from mlx_troupe.runtime.spill.store import SpillEntry, SpillStore

VOCABULARY = 49_152
SYSTEM_PROMPTS = 50


def prompts(count: int, tokens: int) -> list[tuple[int, ...]]:
    """Chats of up to ``tokens`` tokens; many share a system prompt, some continue another."""
    rng = random.Random(0)
    heads = [_ids(rng, tokens // 4) for _ in range(SYSTEM_PROMPTS)]
    made: list[tuple[int, ...]] = []
    for _ in range(count):
        before = rng.choice(made[-100:]) if made and rng.random() < 0.5 else rng.choice(heads)
        start = before if len(before) < tokens else rng.choice(heads)
        made.append(start + _ids(rng, rng.randint(1, tokens // 2)))
    return made


def _ids(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.choices(range(VOCABULARY), k=count))


def bench_index(entries: list[tuple[int, ...]]) -> None:
    """Lookups of prompts that continue an entry, part from one in its middle, or are new."""
    index, namespace = SpillIndex(), namespace_digest("bench")
    began = time.perf_counter()
    for ids in entries:
        packed = pack_ids(ids)
        key = make_key(namespace, packed)
        index.add(key, namespace, packed, 1, setup="", kind="final", cuttable=True)
    filled = time.perf_counter() - began
    rng = random.Random(1)
    for name, make in (
        ("continues an entry", lambda ids: (*ids, *_ids(rng, 50))),
        ("parts in the middle", lambda ids: (*ids[: len(ids) // 2], *_ids(rng, 500))),
        ("new from the start", lambda ids: _ids(rng, len(ids))),
    ):
        times = []
        for _ in range(1000):
            ids = make(rng.choice(entries))
            began = time.perf_counter()
            index.lookup(ids, namespace)
            times.append(1e3 * (time.perf_counter() - began))
        cuts = statistics.quantiles(times, n=100)
        print(
            f"lookup among {len(entries)}, {name:20} median {cuts[49]:.3f} ms, 99 % {cuts[98]:.3f}"
        )
    print(f"filing: {1e6 * filled / len(entries):.0f} µs an entry")


def bench_open(entries: list[tuple[int, ...]]) -> None:
    """Opening a folder of many small files."""
    with tempfile.TemporaryDirectory() as folder:
        store = SpillStore(Path(folder))
        store.open()
        for ids in entries:
            store.save(SpillEntry("bench", ids, "final", True), _state(len(ids), len(ids)))
        began = time.perf_counter()
        SpillStore(Path(folder)).open()
        print(f"opening a folder of {len(entries)}: {time.perf_counter() - began:.2f} s")


def bench_bytes(mib: int) -> None:
    """Save and load of one large state, the load from the system's cache."""
    size = mib << 20
    with tempfile.TemporaryDirectory() as folder:
        entry = SpillEntry("bench", tuple(range(4096)), "final", True)
        state = _state(4096, size)
        for verify in (False, True):
            store = SpillStore(Path(folder), verify=verify)
            store.open()
            store.drop(entry.key)
            began = time.perf_counter()
            store.save(entry, state)
            saved = time.perf_counter()
            store.load(entry.key)
            loaded = time.perf_counter()
            print(
                f"{mib} MiB: save {size / (saved - began) / 1e6:.0f} MB/s,"
                f" load {size / (loaded - saved) / 1e6:.0f} MB/s"
                f" {'hashed' if verify else 'not hashed'}"
            )


def _state(tokens: int, size: int) -> HostState:
    width = size // tokens
    keys = HostArray("uint8", (tokens, width), bytes(tokens * width))
    return HostState(tokens, (HostLayer("plain", (), (keys,), (0,)),))


def main() -> None:
    """All three."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--entries", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=2_000)
    parser.add_argument("--files", type=int, default=2_000)
    parser.add_argument("--mib", type=int, default=256)
    options = parser.parse_args()
    made = prompts(options.entries, options.tokens)
    bench_index(made)
    bench_open(made[: options.files])
    bench_bytes(options.mib)


if __name__ == "__main__":
    main()
