"""From a model's folder to all that its steps need.

Pure construction, on the device thread, once for each :meth:`MLXDevice.open`. Owns nothing; knows
no rows and no steps.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ..errors import ModelError
from ..kvschemes import PLAIN_KV, KVScheme, name_of
from ..model_info import KVLayers, ModelInfo
from ..settings import Dtype
from .adapters import Adapters
from .batch import why_not_batchable
from .encodable import plan_for
from .expanding import Expanding, expand_for_many
from .forward import Forward
from .fused_blocks import fuse_blocks, unfuse_blocks
from .fusing import fuse_projections, joint_products, turn_weights
from .hosting import Hosting
from .kvplan import KVPlan
from .masks import MaskMaker
from .models import device_label, load_checkpoint, state_kind
from .needs import with_needs
from .sampling import Sampler
from .selfcheck import may_prefill_together
from .states import States

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Options:
    """What a device is told.

    Attributes:
        path: a directory that mlx-lm can load.
        name: the id that clients see.
        dtype: what the weights are expanded to.
        batch: most rows that decode together (the scheduler keeps to it).
        kv: how keys and values are kept.
        memory_budget: most bytes that MLX may take; None = what the machine has.
        snapshot_limit: most bytes that kept states take; what would be more is not kept.
        spare_slots: a batch may keep room for rows to come, beyond what its rows take.
        replay: decode steps are traced once and replayed, those of lone rows too, which are then no
            more bit for bit those of mlx-lm; None = on a GPU.
        xtc_exempt: gives the ids that XTC sampling never removes, such as a newline's; asked when
            the first row samples by XTC. End tokens are never removed.
    """

    path: Path
    name: str
    dtype: Dtype = "auto"
    batch: int = 32
    kv: KVScheme = PLAIN_KV
    memory_budget: int | None = None
    snapshot_limit: int | None = None
    spare_slots: bool = True
    replay: bool | None = None
    xtc_exempt: Callable[[], frozenset[int]] = frozenset

    @property
    def replays(self) -> bool:
        """Whether decode steps are replayed on this machine."""
        return mx.default_device() == mx.gpu if self.replay is None else self.replay


@dataclass(frozen=True, slots=True)
class Parts:
    """What the steps of one loaded model need; ``info`` lacks only what a warm-up shows."""

    model: Any
    info: ModelInfo
    plan: KVPlan
    adapters: Adapters
    states: States
    masks: MaskMaker
    make_forward: Callable[[], Forward]


def load_parts(options: Options) -> Parts:
    """Load a model and see what it can do. Raises ModelError."""
    if mx.cuda.is_available() and not has_kernels(os.environ.get("MLX_PTX_CACHE_DIR")):
        log.warning("compiling kernels for this GPU: a minute or two, at the first start only")
    checkpoint = load_checkpoint(options.path, options.dtype, options.kv)
    model: Any = checkpoint.model
    expanding = Expanding()
    if options.replays:
        fuse_projections(model)
        products = [*model.modules(), *joint_products(model)]
        expanding = expand_for_many(products)
        turn_weights(products)
        fuse_blocks(model)
    kind = state_kind(model)
    reason = kind.obstacle or _why_not_batchable(model) or ""
    plan, reason = plan_for(model, options.kv, options.path, reason)
    together = not reason
    eos = checkpoint.eos_ids
    try:
        # Never evaluated: the shape alone is wanted.
        vocab_size = model(mx.array([[0]]), cache=make_prompt_cache(model)).shape[-1]
        ragged = together and may_prefill_together(model)
        hosting = Hosting(model, plan)
        adapters = Adapters(model, together=together)
    except Exception as error:
        raise cannot_run(options.path, error) from error
    masks = MaskMaker(vocab_size)
    make_forward = partial(
        Forward,
        model,
        Sampler(vocab_size, lambda: eos | options.xtc_exempt()),
        masks,
        adapters,
        plan,
        together=together,
        ragged=ragged,
        replay=options.replays,
        spare=options.spare_slots,
    )
    info = ModelInfo(
        name=options.name,
        vocab_size=vocab_size,
        context_window=checkpoint.context_window,
        eos_ids=eos,
        batchable=together,
        lone_reason=reason,
        trim_window=kind.trim_window,
        trim_floor=plan.start if plan.encodes else 0,
        ragged_prefill=ragged,
        launches_ahead=mx.default_device() == mx.gpu,
        kv_scheme=name_of(options.kv),
        expanded_bytes=expanding.nbytes,
        # States of replayed steps differ in the last bits.
        namespace=checkpoint.namespace + ":replayed" * options.replays,
        device=device_label(checkpoint.dtype),
    )
    states = States(model, vocab_size, adapters, plan, hosting, options.snapshot_limit)
    return Parts(model, info, plan, adapters, states, masks, make_forward)


def _why_not_batchable(model: Any) -> str | None:
    """As ``why_not_batchable``, without the fused blocks if it is because of them."""
    reason = why_not_batchable(model)
    if reason is None or not unfuse_blocks(model):
        return reason
    return why_not_batchable(model)


def described(parts: Parts, options: Options, layers: tuple[KVLayers, ...]) -> ModelInfo:
    """The model as it runs: with the layers that a warm-up left."""
    per_token = sum(alike.layers * alike.bytes_per_token for alike in layers)
    fixed = sum(alike.layers * alike.fixed_bytes for alike in layers)
    info = replace(parts.info, kv_layers=layers, kv_bytes_per_token=per_token, fixed_bytes=fixed)
    return with_needs(info, parts.model, parts.plan, options.path)


def has_kernels(folder: str | None) -> bool:
    """Whether MLX left compiled CUDA kernels there at an earlier start."""
    return folder is not None and any(Path(folder).glob("*.ptx"))


def cannot_run(path: Path, error: Exception) -> ModelError:
    """The error of a model that loads and does not run."""
    return ModelError(f"{path} cannot be run: {error}")
