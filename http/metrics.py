"""Prometheus figures of one app, in a registry of its own.

Counters and histograms are written from request tasks (one thread); the runtime's own figures are
read from ``runtime.stats()`` at each scrape, so there is nothing to keep in step.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from mlx_troupe.runtime.requests import Failed, Finished, TextDelta

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prometheus_client.core import Metric

    from mlx_troupe.runtime.requests import GenerationEvent, Usage

    from .seams import RuntimeLike

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

GAUGES = (
    ("mlx_troupe_active_rows", "Rows that are being computed", ("batch", "active_rows")),
    ("mlx_troupe_waiting_requests", "Requests in the queue", ("batch", "pending_rows")),
    ("mlx_troupe_kv_bytes", "Bytes of state of running rows", ("batch", "kv_bytes")),
    ("mlx_troupe_prompt_cache_bytes", "Bytes of kept prefixes", ("prompt_cache", "bytes")),
    ("mlx_troupe_prompt_cache_entries", "Kept prefixes", ("prompt_cache", "entries")),
    ("mlx_troupe_adapter_bytes", "Bytes of mounted adapters", ("adapters", "ram_bytes")),
    ("mlx_troupe_ssd_cache_bytes", "Bytes of prefixes on disk", ("ssd_cache", "bytes")),
    ("mlx_troupe_ssd_cache_entries", "Prefixes on disk", ("ssd_cache", "entries")),
    (
        "mlx_troupe_ssd_cache_pending_bytes",
        "Bytes of prefixes that wait to be written",
        ("ssd_cache", "pending_spill_bytes"),
    ),
    (
        "mlx_troupe_ssd_cache_pending",
        "Prefixes and interrupted answers that wait to be written",
        ("ssd_cache", "pending_spills"),
    ),
    (
        "mlx_troupe_ssd_cache_longest_tokens",
        "Tokens of the longest prefix on disk",
        ("ssd_cache", "longest_durable_prefix_tokens"),
    ),
    ("mlx_troupe_answers_kept", "Interrupted answers in memory", ("checkpoints", "records")),
)
COUNTERS = (
    ("mlx_troupe_prompt_cache_hits", "Prefix lookups that hit", ("prompt_cache", "hits")),
    ("mlx_troupe_prompt_cache_misses", "Prefix lookups that missed", ("prompt_cache", "misses")),
    (
        "mlx_troupe_prompt_cache_evictions",
        "Prefixes that memory gave up for room",
        ("prompt_cache", "evictions"),
    ),
    (
        "mlx_troupe_prompt_cache_reused_tokens",
        "Tokens of all hits",
        ("prompt_cache", "tokens_reused"),
    ),
    ("mlx_troupe_ssd_cache_restores", "Prefixes read from disk", ("ssd_cache", "restores")),
    ("mlx_troupe_ssd_cache_spills", "Prefixes written to disk", ("ssd_cache", "spills")),
    (
        "mlx_troupe_ssd_cache_written_bytes",
        "Bytes written to disk",
        ("ssd_cache", "bytes_written"),
    ),
    (
        "mlx_troupe_ssd_cache_demotions",
        "Idle prefixes that left memory for the disk",
        ("ssd_cache", "demotions"),
    ),
    (
        "mlx_troupe_ssd_cache_dropped_spills",
        "Prefixes that were not written for want of room in the queue",
        ("ssd_cache", "dropped_spills"),
    ),
    (
        "mlx_troupe_ssd_cache_over_budget_spills",
        "Prefixes that were not written for the hour's write budget",
        ("ssd_cache", "over_budget_spills"),
    ),
    (
        "mlx_troupe_ssd_cache_failed_spills",
        "Prefixes and interrupted answers that could not be written",
        ("ssd_cache", "failed_spills"),
    ),
    (
        "mlx_troupe_ssd_cache_evictions",
        "Files given up for room on disk",
        ("ssd_cache", "evictions"),
    ),
    (
        "mlx_troupe_ssd_cache_quarantined",
        "Damaged files set aside",
        ("ssd_cache", "quarantined"),
    ),
    (
        "mlx_troupe_ssd_cache_faults",
        "Reads and writes of prefixes that went wrong",
        ("ssd_cache", "faults"),
    ),
    ("mlx_troupe_answers_written", "Checkpoints of answers written", ("checkpoints", "written")),
    ("mlx_troupe_answers_found", "Interrupted answers gone on with", ("checkpoints", "found")),
)


class Meter:
    """Follows one generation; told of every event that is read from it."""

    def __init__(self, metrics: Metrics, route: str, started: float) -> None:
        self._metrics = metrics
        self._route = route
        self._started = started
        self._has_text = False
        self.outcome = "cancelled"

    def saw(self, event: GenerationEvent) -> None:
        """Note one event."""
        match event:
            case TextDelta():
                if not self._has_text:
                    self._has_text = True
                    self._metrics.first_text(self._route, self._elapsed())
            case Finished():
                self.outcome = event.reason.value
                self._metrics.count_tokens(self._route, event.usage)
            case Failed():
                self.failed()

    def failed(self) -> None:
        """Note an end that no event told of."""
        self.outcome = "error"

    def close(self) -> None:
        """Write the duration and the outcome; called once, at the end."""
        self._metrics.ended(self._route, self.outcome, self._elapsed())

    def _elapsed(self) -> float:
        return time.perf_counter() - self._started


class Metrics:
    """All figures of one app."""

    def __init__(self, runtime: RuntimeLike) -> None:
        self._registry = registry = CollectorRegistry()
        registry.register(_RuntimeFigures(runtime))
        self._requests = Counter(
            "mlx_troupe_http_requests",
            "HTTP requests by route and status (499 = the client left before a reply)",
            ("route", "status"),
            registry=registry,
        )
        self._generations = Counter(
            "mlx_troupe_generations",
            "Generations by route and how they ended",
            ("route", "outcome"),
            registry=registry,
        )
        self._prompt_tokens = Counter(
            "mlx_troupe_prompt_tokens", "Prompt tokens", ("route",), registry=registry
        )
        self._completion_tokens = Counter(
            "mlx_troupe_completion_tokens", "Generated tokens", ("route",), registry=registry
        )
        self._cached_tokens = Counter(
            "mlx_troupe_cached_tokens",
            "Prompt tokens that were not computed again",
            ("route",),
            registry=registry,
        )
        self._first_text = Histogram(
            "mlx_troupe_time_to_first_token_seconds",
            "From the parsed request to its first text",
            ("route",),
            registry=registry,
            buckets=SECONDS,
        )
        self._duration = Histogram(
            "mlx_troupe_generation_seconds",
            "From the parsed request to its end, however it ended",
            ("route",),
            registry=registry,
            buckets=SECONDS,
        )

    def count_request(self, route: str, status: int) -> None:
        """Count one HTTP request; ``route`` is a rule of the router, never a raw path."""
        self._requests.labels(route, str(status)).inc()

    @contextmanager
    def measure(self, route: str, started: float) -> Iterator[Meter]:
        """A meter for one admitted generation; ``started`` is a ``time.perf_counter`` value."""
        meter = Meter(self, route, started)
        try:
            yield meter
        finally:
            meter.close()

    def first_text(self, route: str, seconds: float) -> None:
        """Note the time to the first text of a generation."""
        self._first_text.labels(route).observe(seconds)

    def count_tokens(self, route: str, usage: Usage) -> None:
        """Add the tokens of a generation that finished."""
        self._prompt_tokens.labels(route).inc(usage.prompt_tokens)
        self._completion_tokens.labels(route).inc(usage.completion_tokens)
        self._cached_tokens.labels(route).inc(usage.cached_tokens)

    def ended(self, route: str, outcome: str, seconds: float) -> None:
        """Count the end of a generation."""
        self._generations.labels(route, outcome).inc()
        self._duration.labels(route).observe(seconds)

    def render(self) -> bytes:
        """The Prometheus text of everything."""
        return generate_latest(self._registry)


class _RuntimeFigures(Collector):
    """The runtime's figures, read at scrape time; a figure that it does not give is left out."""

    def __init__(self, runtime: RuntimeLike) -> None:
        self._runtime = runtime

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        stats = self._runtime.stats()
        for name, text, path in GAUGES:
            value = _figure(stats, path)
            if value is not None:
                yield GaugeMetricFamily(name, text, value=value)
        for name, text, path in COUNTERS:
            value = _figure(stats, path)
            if value is not None:
                yield CounterMetricFamily(name, text, value=value)


def _figure(stats: Mapping[str, object], path: tuple[str, str]) -> float | None:
    block = stats.get(path[0])
    value = block.get(path[1]) if isinstance(block, dict) else None
    return float(value) if isinstance(value, (int, float)) else None
