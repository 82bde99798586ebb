"""A few tokens through every path of a device before the first request.

Runs on the device thread, once after loading. Knows steps and rows, not models.
"""

from __future__ import annotations

from ..device import Cold, Device, PrefillRow, RowId, StartRow, StepId, StepPlan
from ..requests import Sampling

IDS = (0,) * 4


def warm_up(device: Device, rows: int) -> None:
    """Prefill and decode ``rows`` rows, -1 first; they stay. Raises RuntimeError if one fails."""
    names = tuple(RowId(-1 - place) for place in range(rows))
    starts = tuple(StartRow(row, IDS, Sampling(), Cold()) for row in names)
    chunks = tuple(PrefillRow(row, len(IDS) - 1) for row in names)
    device.launch(StepPlan(StepId(-1), start=starts, prefill=chunks, decode=names[:1]))
    device.launch(StepPlan(StepId(-2), decode=names))
    faults = device.settle().failed + device.settle().failed
    if faults:
        raise RuntimeError(faults[0].reason)
