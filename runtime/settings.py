"""Every knob of the runtime in one frozen value, read once at start.

Owned by whoever opens the runtime; nothing here reads the environment or the clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from .kvschemes import PLAIN_KV, KVScheme
from .requests import DEFAULT_HLG, Hlg

Dtype: TypeAlias = Literal["auto", "keep", "float32", "bfloat16"]


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one served model.

    Attributes:
        model: a directory that mlx-lm can load (``runtime.store`` resolves names to one).
        name: the id that clients see.
        batch: most rows that decode together.
        queue: most requests that wait; beyond it a request is refused.
        dtype: what the weights are expanded to at load.
        prompt_cache_bytes: budget of kept states in memory; 0 turns the prefix cache off.
        kv_budget_bytes: most bytes that the states of running requests may take together; None =
            no limit, and then estimates only advise.
        memory_budget_bytes: the same for all that the model takes: weights, prefill, kept and
            running states, by estimate.
        kv: how keys and values are kept.
        exact: on a GPU too a lone row computes what mlx-lm computes, bit for bit; slower.
        max_tokens: cap on every request's output; None = none.
        temperature, top_p, top_k: defaults for requests that leave them out; None = the model's
            generation_config.json, then 0.7 / off / off.
        thinking: whether a model that thinks does so in chats that do not say; None = its template
            decides.
        hlg: the curve of requests that ask for one without all of its figures.
        hlg_sampling: requests that say nothing about it are sampled on that curve.
        step_timeout: seconds without a step's result before the device counts as hung.
        prefill_timeout: the same for prefill and warm-up.
        read_timeout: seconds that a client may read nothing while text waits for it.
        generation_checkpoint: tokens after which an answer that is greedy or has a seed is written
            down in ``ssd_cache``, to be gone on with after a crash; 0 = never.
        stream_grace: seconds that the row of a stream with a name goes on after its client left.
        ssd_cache: a folder in which kept states outlive the process; None = none.
        ssd_cache_max_bytes: most bytes of files in it; None = no limit.
        ssd_cache_verify: compare every tensor that is read with its digest, not the headers alone.
        ssd_demote_idle: seconds without use after which a state that is in the folder leaves
            memory; 0 = never.
        ssd_write_budget_bytes: most bytes that are written in any hour; None = no limit.
        adapters: LoRA folders to mount at start, under their own names. Requests that name no
            adapter get all of these, in this order.
    """

    model: Path
    name: str
    batch: int = 32
    queue: int = 64
    dtype: Dtype = "auto"
    prompt_cache_bytes: int = 8 << 30
    kv_budget_bytes: int | None = None
    memory_budget_bytes: int | None = None
    kv: KVScheme = PLAIN_KV
    exact: bool = False
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    thinking: bool | None = None
    hlg: Hlg = DEFAULT_HLG
    hlg_sampling: bool = False
    step_timeout: float = 60.0
    prefill_timeout: float = 600.0
    read_timeout: float = 120.0
    stream_grace: float = 30.0
    generation_checkpoint: int = 0
    ssd_cache: Path | None = None
    ssd_cache_max_bytes: int | None = None
    ssd_cache_verify: bool = True
    ssd_demote_idle: float = 300.0
    ssd_write_budget_bytes: int | None = None
    adapters: tuple[Path, ...] = ()
