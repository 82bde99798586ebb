"""The seam between the scheduler and whatever computes: a synchronous device and its steps.

A device runs on one thread (``actors/gpu.py`` owns it) and is told *everything* by plain values:
it keeps weights, rows and snapshots under ids, and answers with host integers. No array crosses
this line. ``runtime.engine`` implements it with MLX, ``actors/testing.py`` with a script.

Three calls make a step: :meth:`Device.launch` prepares it, :meth:`Device.push` sees that it is
being computed, :meth:`Device.settle` waits for the oldest one that was launched. With one running
and one queued, the input tokens of a step are those that the step before it is still computing;
they never visit the host in between.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import NewType, Protocol, TypeAlias

from .adapter_fit import AdapterTarget
from .adapters import AdapterInfo
from .requests import Sampling
from .spill.state import HostLayer, HostState
from .text.matching import TokenMatcher

RowId = NewType("RowId", int)
"""A row; unique for the life of the process, so that no event of an old row is mistaken."""
MAX_LOGPROBS = 20
"""Most alternatives whose log-probabilities a row may ask for."""
SnapshotId = NewType("SnapshotId", int)
StepId = NewType("StepId", int)


@dataclass(frozen=True, slots=True)
class KVLayers:
    """Layers that keep keys and values alike, as read off their arrays.

    ``kind`` is "full", "sliding" or "recurrent", ``form`` what the arrays hold, in words;
    ``bytes_per_token`` is what one token of capacity takes in one such layer of one row, and
    ``fixed_bytes`` what it takes there however long it is.
    """

    kind: str
    form: str
    layers: int
    bytes_per_token: int
    fixed_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the scheduler must know about a loaded model.

    Attributes:
        name: id that clients see.
        vocab_size: number of logits of one position.
        context_window: most tokens (prompt + generated) a row may hold; None if unknown.
        eos_ids: ids that end a generation.
        batchable: rows can share one forward pass; otherwise each runs alone.
        lone_reason: why not, in words, when ``batchable`` is False.
        trim_window: a state of ``n`` tokens can be cut to any shorter length while
            ``n <= trim_window``; None = always (plain layouts), 0 = never (recurrent).
        trim_floor: a state of at least so many tokens is encoded for good and is never cut below;
            a shorter one is still plain. 0 = there is no such limit.
        ragged_prefill: several prompts can be prefilled in one forward pass.
        launches_ahead: launching a step with prefill returns before it is computed. Where it does
            not (a CPU), a second one must not be queued: it could not be taken back.
        kv_bytes_per_token: bytes of state that one more token costs in one row.
        fixed_bytes: bytes of recurrent state, which a row has however long it is.
        kv_scheme: how keys and values are kept, in the words of ``--kv-quant``.
        kv_layers: what came of it, layers alike counted together.
        memory_bytes: of the device, for weights, state and all else; 0 if unknown.
        weights_bytes: of the weights as they were loaded.
        prefill_bytes_per_token: what prefill takes beside weights and state for each token of a
            step, roughly.
        expanded_bytes: what a step of many rows takes for weights that it expands, as measured.
        unpacked_bytes_per_token: what a step takes for each token of its rows' states where
            attention needs them in another form than they are kept in, roughly.
        namespace: digest of all that must be equal for two states to be interchangeable.
        device: short name of the device and MLX build, for people.
    """

    name: str
    vocab_size: int
    context_window: int | None
    eos_ids: frozenset[int]
    batchable: bool = True
    lone_reason: str = ""
    trim_window: int | None = None
    trim_floor: int = 0
    ragged_prefill: bool = True
    launches_ahead: bool = True
    kv_bytes_per_token: int = 0
    fixed_bytes: int = 0
    kv_scheme: str = "off"
    kv_layers: tuple[KVLayers, ...] = ()
    memory_bytes: int = 0
    weights_bytes: int = 0
    prefill_bytes_per_token: int = 0
    expanded_bytes: int = 0
    unpacked_bytes_per_token: int = 0
    namespace: str = ""
    device: str = ""

    def can_trim(self, length: int) -> bool:
        """Whether a state of ``length`` tokens can still be cut to a shorter prefix."""
        return self.trim_window is None or length <= self.trim_window

    def can_cut(self, have: int, length: int) -> bool:
        """Whether a state of ``have`` tokens serves as one of its first ``length``."""
        return length == have or (self.can_trim(have) and not length < self.trim_floor <= have)


@dataclass(frozen=True, slots=True)
class Cold:
    """Start with an empty state."""


@dataclass(frozen=True, slots=True)
class FromSnapshot:
    """Start with the first ``length`` tokens of a kept state."""

    snapshot: SnapshotId
    length: int


@dataclass(frozen=True, slots=True)
class FromRow:
    """Start with the first ``length`` tokens of another row's state when the step runs."""

    row: RowId
    length: int


Source: TypeAlias = Cold | FromSnapshot | FromRow


@dataclass(frozen=True, slots=True)
class StartRow:
    """Bring a row into being. ``ids`` is its whole prompt (at least one token).

    ``adapters`` are revisions of mounted adapters, applied in this order; the source was computed
    with exactly the same. A row keeps them until it ends, mounted or not.

    ``matcher`` says which tokens the answer may consist of; it belongs to the device from now on.

    ``logprobs`` asks for each token's log-probability and those of that many alternatives, at most
    MAX_LOGPROBS; None = no figures.
    """

    row: RowId
    ids: tuple[int, ...]
    sampling: Sampling
    source: Source
    adapters: tuple[str, ...] = ()
    matcher: TokenMatcher | None = field(default=None, compare=False)
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """Process the next ``count`` prompt tokens of a row; never its last one.

    The last prompt token is the input of the row's first decode (the oracle's own convention).
    """

    row: RowId
    count: int


@dataclass(frozen=True, slots=True)
class KeepRow:
    """Copy the first ``length`` tokens of a row's state into a snapshot."""

    row: RowId
    length: int
    snapshot: SnapshotId


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One device pass. The parts run in the order of the fields.

    ``keep`` copies states, ``end`` drops rows, ``start`` makes rows (sources are resolved after
    ``keep`` and before ``end``, so a row may start from one that ends in the same step),
    ``prefill`` processes prompt tokens, ``decode`` samples one token for each row named: its input
    is the last prompt token or the token that the row sampled last.
    """

    step: StepId
    keep: tuple[KeepRow, ...] = ()
    start: tuple[StartRow, ...] = ()
    end: tuple[RowId, ...] = ()
    prefill: tuple[PrefillRow, ...] = ()
    decode: tuple[RowId, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one drawn token and of the likeliest tokens in its place.

    They are taken after logit bias, penalties and masks, before filters and temperature. ``top``
    are pairs of an id and its figure in falling order; a figure may be -inf.
    """

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Sampled:
    """A row sampled a token. ``ends``: its matcher says that nothing may come after it.

    ``logprobs`` is there for rows that asked.
    """

    row: RowId
    token: int
    ends: bool = False
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class RowFailed:
    """A row could not go on and is gone from the device; nobody else was touched.

    ``param`` names the field of the request that is to blame; None: the fault is not the client's.
    """

    row: RowId
    reason: str
    param: str | None = None


@dataclass(frozen=True, slots=True)
class SnapshotMade:
    """A state of exactly ``length`` tokens was kept."""

    snapshot: SnapshotId
    length: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SnapshotSkipped:
    """A state could not be kept (it cannot be cut to that length, or there is no room).

    ``nbytes``: what it would have taken, where room is all that it lacked; else 0.
    """

    snapshot: SnapshotId
    reason: str
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class StateSlice:
    """Some layers of an exported state, or all of it, to be kept under a new id.

    ``count`` layers from ``first_layer`` on; None = all that are left. ``adapters``: the revisions
    that the state was computed with; they need not be mounted.
    """

    snapshot: SnapshotId
    state: HostState
    adapters: tuple[str, ...] = ()
    first_layer: int = 0
    count: int | None = None


@dataclass(frozen=True, slots=True)
class StepDone:
    """What came of one step. ``seconds`` is the device time that it took, as far as is known."""

    step: StepId
    seconds: float
    sampled: tuple[Sampled, ...] = ()
    failed: tuple[RowFailed, ...] = ()
    kept: tuple[SnapshotMade | SnapshotSkipped, ...] = ()


@dataclass(frozen=True, slots=True)
class DeviceStats:
    """Live figures of the device; bytes are bytes, rows and snapshots are counts.

    ``most_snapshot_bytes`` is the most that kept states ever took, between two looks too.
    """

    active_bytes: int = 0
    cache_bytes: int = 0
    peak_bytes: int = 0
    kv_bytes: int = 0
    snapshot_bytes: int = 0
    rows: int = 0
    batched_rows: int = 0
    snapshots: int = 0
    most_snapshot_bytes: int = 0


class Device(Protocol):
    """A thing that computes steps. All calls come from one thread, one at a time."""

    def open(self) -> ModelInfo:
        """Load and warm up. Raises ModelError."""
        ...

    def launch(self, plan: StepPlan) -> None:
        """Start a step without waiting for its result. At most two are under way.

        A fault of one row is reported by its :class:`RowFailed`; an exception here means that the
        device itself is broken and every row is lost.
        """
        ...

    def overlaps(self, plan: StepPlan) -> bool:
        """Whether launching this step delays the result of the one under way by nothing much.

        Where it would, the result is fetched first.
        """
        ...

    def push(self) -> None:
        """Begin to compute what :meth:`launch` may only have prepared.

        Called after each launch; with another step under way, after that one's result was fetched.
        """
        ...

    def settle(self) -> StepDone:
        """Wait for the oldest step under way and return what came of it."""
        ...

    def release(self, snapshots: tuple[SnapshotId, ...]) -> None:
        """Forget kept states. Unknown ids are ignored."""
        ...

    def export(
        self, snapshot: SnapshotId, first_layer: int, count: int, since: int = 0
    ) -> tuple[HostLayer, ...]:
        """Up to ``count`` layers of a kept state as bytes; fewer, or none, when they end there.

        The first ``since`` tokens are left out of arrays in which tokens lie in order.

        Slices of a big state leave between steps. The bytes are nobody else's to change, and stay
        right when the state is released meanwhile. Raises StateRefused for an unknown id or for
        layers that have no form as bytes.
        """
        ...

    def import_state(self, part: StateSlice) -> SnapshotMade | None:
        """Keep a state that was exported from the same model under a new id, bit for bit.

        Slices of a big state arrive between steps, in order. The answer is None until the last of
        them is there; :meth:`release` gives up a state that is not whole. Raises StateRefused for
        what is no state of this model, NoRoom where it would take more than kept states may; then
        nothing of it is kept.
        """
        ...

    def drop_rows(self) -> None:
        """Forget every row and every step under way (a new scheduler begins)."""
        ...

    def mount(self, adapter_id: str, path: Path) -> AdapterInfo:
        """Make the adapter in a folder available to rows that start from now on.

        Rows and steps under way are not disturbed. A revision that is mounted already stays as it
        is, under however many ids; one :meth:`unmount` removes it. Raises AdapterError, and then
        nothing has changed.
        """
        ...

    def unmount(self, revision: str) -> int:
        """Take a revision from rows that start from now on; how many modules it changed.

        Rows that use it keep it until they end; its memory is freed with the last of them. 0 for a
        revision that is not mounted.
        """
        ...

    def adapter_targets(self) -> tuple[AdapterTarget, ...]:
        """The modules that adapters may change, for :func:`.adapter_fit.fit`; none before open."""
        ...

    def stats(self) -> DeviceStats:
        """Live figures; cheap."""
        ...

    def idle(self) -> None:
        """Called when nothing is running: give unused memory back to the system."""
        ...

    def close(self) -> None:
        """Forget everything, adapters too; the device may be opened again."""
        ...
