"""What of a state lies on disk already, so that only the rest has to be written.

Pure; called on worker threads. A state that was computed a second time may differ in its last bits
from one of the same tokens that was kept, and a delta behind the wrong one would be a state that
nobody computed. So bytes are compared, by the digests that the files' headers hold.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256

from .header import Header
from .state import HostArray, HostState, StateMismatch, check_continues, nbytes, token_runs

LONGEST_CHAIN = 1024
"""Files that one state is joined from. Opening one costs a fraction of a millisecond, and writing a
state anew costs all of its bytes."""

WORTH = 0.1
"""The least part of a state that must be saved for it to depend on another file."""


def is_worth_sharing(state: HostState, first: int) -> bool:
    """Whether the first ``first`` tokens are much of a state, by their bytes."""
    tokens = state.length - state.first
    return _token_bytes(state) * first / tokens >= WORTH * nbytes(state)


def left_out_bytes(state: HostState) -> int:
    """About the bytes that a delta has not, of the whole state that it is the end of."""
    return _token_bytes(state) * state.first // (state.length - state.first)


def _token_bytes(state: HostState) -> int:
    """Bytes of the arrays that hold something of each token."""
    return sum(
        len(array.data)
        for layer in state.layers
        for array, axis in zip(layer.arrays, layer.token_axis, strict=True)
        if axis is not None
    )


def fits(state: HostState, header: Header) -> bool:
    """Whether the layers of a whole state can continue those of a file, by their forms."""
    if len(header.layers) != len(state.layers):
        return False
    try:
        for form, layer in zip(header.layers, state.layers, strict=True):
            check_continues(form, layer)
    except StateMismatch:
        return False
    return True


def starts_with(state: HostState, chain: Iterable[Header]) -> bool:
    """Whether the files of a chain, joined, are a whole state's first tokens to the byte.

    Arrays that hold no tokens do not count: a delta has its own.
    """
    return all(_holds(state, header) for header in chain)


def _holds(state: HostState, header: Header) -> bool:
    if not fits(state, header):
        return False
    for form, layer in zip(header.layers, state.layers, strict=True):
        if all(axis is None for axis in layer.token_axis):
            continue
        for written, array, axis in zip(form.arrays, layer.arrays, layer.token_axis, strict=True):
            if axis is not None and written.digest != _digest(array, axis, header):
                return False
    return True


def _digest(array: HostArray, axis: int, header: Header) -> str:
    digest = sha256()
    for run in token_runs(array, axis, header.first, header.length):
        digest.update(run)
    return digest.hexdigest()
