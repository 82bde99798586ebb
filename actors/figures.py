"""What ``/stats`` and ``/health`` tell: the figures of all actors in plain JSON types.

Pure functions on trio's thread over what the actors show of themselves; they own nothing.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

import trio

from mlx_troupe.runtime.budgets import Budgets, budgets, max_safe_context, why_no_cache
from mlx_troupe.runtime.model_info import ModelInfo
from mlx_troupe.runtime.prefix.entries import PrefixStats
from mlx_troupe.runtime.scheduling.effects import SchedulerStats
from mlx_troupe.runtime.settings import Settings

from .generation import Health
from .gpu import GpuView
from .ledger import ledger
from .supervisor import Supervisor


def figures(
    settings: Settings,
    view: GpuView,
    supervisor: Supervisor,
    scheduler: SchedulerStats,
    cache: PrefixStats,
    adapters: dict[str, object],
    *,
    active: int,
    started_at: float,
) -> dict[str, object]:
    """One snapshot. ``active`` requests have an actor; ``started_at`` is in Unix seconds."""
    return {
        "model": _model(view.model),
        "batch": _batch(settings, view, scheduler),
        "admission": _admission(settings, view, scheduler),
        "scheduler": asdict(scheduler),
        "prompt_cache": {
            **asdict(cache),
            "off": why_no_cache(settings),
            "ledger": ledger(view.stats, cache, view.model),
        },
        "adapters": adapters,
        "device": asdict(view.stats),
        "requests": {"active": active},
        "process": {
            "tasks": trio.lowlevel.current_statistics().tasks_living,
            "resident_bytes": resident_bytes(),
            "started_at": started_at,
        },
        "actors": {
            name: {"state": state, "crashes": supervisor.crashes.get(name, 0)}
            for name, state in supervisor.states.items()
        },
    }


def health(supervisor: Supervisor, view: GpuView, *, loaded: bool, draining: bool) -> Health:
    """How the company is. ``loaded``: the tokenizer is there."""
    states = dict(supervisor.states)
    if supervisor.failure is not None:
        return Health("failed", supervisor.failure, states)
    down = [name for name, state in states.items() if state != "running"]
    if view.model is None or not loaded:
        lost = view.loads > 0
        reason = view.error or ("the model is loading again" if lost else "loading")
        return Health("degraded" if lost else "loading", reason, states)
    if down or draining:
        return Health("degraded", ", ".join(down) or "stopping", states)
    return Health("ok", "", states)


def _batch(settings: Settings, view: GpuView, scheduler: SchedulerStats) -> dict[str, object]:
    model = view.model
    reason = model.lone_reason if model else ""
    if settings.batch == 1:
        reason = reason or "the server was told to run one row at a time"
    return {
        "configured": settings.batch,
        "active_rows": scheduler.prefill_rows + scheduler.decode_rows + scheduler.ending_rows,
        "pending_rows": scheduler.waiting_rows,
        "queue": settings.queue,
        "batched": bool(model and model.batchable and settings.batch > 1),
        "lone_reason": reason,
        "kv_bytes": view.stats.kv_bytes,
        "grammar_wait_seconds": round(view.stats.grammar_seconds, 3),
    }


def _admission(settings: Settings, view: GpuView, scheduler: SchedulerStats) -> dict[str, object]:
    """Limits that somebody set (null: nobody did), what is reserved and used, and advice."""
    model = view.model
    limits = budgets(settings, model) if model else Budgets()
    tokens = limits.context_tokens
    if tokens is not None and model and model.context_window:
        tokens = min(tokens, model.context_window)
    return {
        "max_safe_context": max_safe_context(model, model.memory_bytes) if model else None,
        "enforced_context_tokens": tokens,
        "memory_budget_bytes": settings.memory_budget_bytes,
        "kv_budget_bytes": settings.kv_budget_bytes,
        "kv_limit_bytes": limits.kv_bytes,
        "usable_bytes": limits.usable_bytes,
        "weights_bytes": model.weights_bytes if model else None,
        "reserved_bytes": scheduler.reserved_bytes,
        "used_bytes": view.stats.kv_bytes,
        "rows_without_room": scheduler.rows_without_room,
        "shortened": scheduler.shortened,
    }


def _model(model: ModelInfo | None) -> dict[str, object] | None:
    if model is None:
        return None
    return {
        "name": model.name,
        "vocab_size": model.vocab_size,
        "context_window": model.context_window,
        "device": model.device,
        "kv_bytes_per_token": model.kv_bytes_per_token,
        "kv": {
            "scheme": model.kv_scheme,
            "start": model.trim_floor,
            "layers": [asdict(alike) for alike in model.kv_layers],
        },
    }


def resident_bytes() -> int:
    """Memory of this process that is in RAM now; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
