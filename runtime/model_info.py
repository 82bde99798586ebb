"""What is known about a loaded model, as the device found it.

Plain values: made once by the device that opened the model, and read by whoever decides or tells.
"""

from __future__ import annotations

from dataclasses import dataclass


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
