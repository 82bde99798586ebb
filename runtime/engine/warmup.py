"""A few tokens through every path of a device before the first request.

Runs on the device thread, once after loading. Knows steps and rows, not models.
"""

from __future__ import annotations

from ..device import Device
from ..plans import Cold, PrefillRow, RowId, StartRow, StepId, StepPlan
from ..requests import Hlg, Sampling

IDS = (0,) * 4


# No XTC: what it spares is not known before the tokenizer is.
SAMPLED = (
    Sampling(
        temperature=1.0,
        top_p=0.9,
        min_p=0.01,
        logit_bias=((0, 1.0),),
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
    ),
    # Penalties that look back without a limit are computed in another way.
    Sampling(
        temperature=1.0,
        repetition_penalty=1.1,
        repetition_context_size=0,
        presence_penalty=0.1,
        presence_context_size=0,
        frequency_penalty=0.1,
        frequency_context_size=0,
    ),
    Sampling(temperature=1.0, top_k=20, top_p=0.9, min_p=0.01),
    Sampling(temperature=1.0, hlg=Hlg()),
    Sampling(temperature=1.0, curve=((-9.0, -12.0), (-3.0, -2.0), (0.0, 0.0))),
)
"""On a GPU the first use of an operation compiles it, for which everybody would wait."""


def warm_up(device: Device, rows: int) -> None:
    """Prefill and decode ``rows`` rows, -1 first, and several of them with samplers of all kinds.

    Row -1 stays, and the last of the others. Raises RuntimeError if one fails.
    """
    names = tuple(RowId(-1 - place) for place in range(rows))
    starts = tuple(StartRow(row, IDS, Sampling(), Cold()) for row in names)
    chunks = tuple(PrefillRow(row, len(IDS) - 1) for row in names)
    device.launch(StepPlan(StepId(-1), start=starts, prefill=chunks, decode=names[:1]))
    device.launch(StepPlan(StepId(-2), decode=names))
    faults = device.settle().failed + device.settle().failed
    for place, sampling in enumerate(SAMPLED if rows > 1 else ()):
        row = RowId(names[-1] - 1 - place)
        device.launch(
            StepPlan(
                StepId(-3 - place),
                start=(StartRow(row, IDS, sampling, Cold(), logprobs=2),),
                end=(RowId(row + 1),),
                prefill=(PrefillRow(row, len(IDS) - 1),),
                decode=(names[0], row),
            )
        )
        device.push()
        faults += device.settle().failed
    if faults:
        raise RuntimeError(faults[0].reason)
