"""Whether cold runs, memory and the disk agree, at many lengths, for every kind of state.

    .venv/bin/python bench/tiers.py [LAYOUT …] [--most 512]

Logits of the next eight tokens, teacher-forced, on tiny models, at one token less, as many and one
more than each edge: windows, blocks and thresholds, and every capacity and chunk up to ``--most``
tokens. Prints a line a layout, and ends with 1 if anything is not as it must be.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from tier_rig import LAYOUTS, THRESHOLD, WINDOW, Tiers, differences, off, recorded

CHUNK = 512
SMALL = (WINDOW, THRESHOLD, 48, 64, 128, 256)


def compare(layout: str, lengths: list[int]) -> list[str]:
    """One layout; what is wrong."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, recorded() as logits:
        results = Tiers(Path(folder), layout, logits, CHUNK).compare(lengths)
    found = differences(layout, results)
    cut = [
        off(results.memory[length].cut or [], results.cold[length].lone)
        for length in lengths
        if results.memory[length].cut is not None
    ]
    told = f"cut states off by {max(cut):.1e}" if cut else "nothing to cut"
    seconds = time.perf_counter() - began
    print(f"{layout:18} {len(lengths)} lengths, {len(found)} wrong, {told}, {seconds:.0f} s")
    return found


def main() -> int:
    """All layouts, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("layouts", nargs="*", metavar="LAYOUT")
    parser.add_argument("--most", type=int, default=512)
    options = parser.parse_args()
    edges = [*SMALL, CHUNK]
    while edges[-1] < options.most:
        edges.append(2 * edges[-1])
    lengths = [edge + by for edge in edges if edge <= options.most for by in (-1, 0, 1)]
    wrong = [line for name in options.layouts or LAYOUTS for line in compare(name, lengths)]
    print("\n".join(wrong))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
