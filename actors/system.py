"""Casts and wires the company; the library's front door.

``open_runtime`` starts the supervisor with its permanent actors and hands out a :class:`Runtime`;
each generation adds one Request actor to the same nursery. Everything runs on the caller's trio
loop but for the device's own thread.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path

import trio

from mlx_troupe.runtime.adapters import AdapterDescription, AdapterInfo
from mlx_troupe.runtime.budgets import budgets, cache_bytes
from mlx_troupe.runtime.device import Device, ModelInfo, RowId, SnapshotId, StepId
from mlx_troupe.runtime.errors import Overloaded, Unavailable
from mlx_troupe.runtime.prefix.index import PrefixCore
from mlx_troupe.runtime.requests import GenerationRequest
from mlx_troupe.runtime.scheduling.core import SchedulerCore
from mlx_troupe.runtime.settings import Settings
from mlx_troupe.runtime.text.tokenizer import Tokenizer

from .adapters import AdapterDesk
from .checkpoints import checkpoints_of
from .desk import SpillDesk
from .disk import Disk, folder_disk
from .explaining import Explainer
from .figures import figures, health
from .gate import Bounds, Gate
from .generation import Generation, Health
from .gpu import GpuActor, GpuView
from .grammars import GrammarTools
from .kvcache import KVCacheActor
from .loading import TokenizerSource, load_text, mlx_device, text_tools
from .mailbox import Mailbox
from .messages import CacheMessage, Clear, CloseSession, GpuCommand, SchedulerMessage
from .reply import Bell, Reply
from .request import RequestActor, TextTools
from .scheduler import SchedulerActor
from .spill_messages import Flush, FlushReport
from .streams import Streams
from .supervisor import Child, Supervisor
from .worker import ThreadWorker, Worker

STOP_SECONDS = 10.0
"""How long the device's thread may take to end at shutdown before it is left behind."""


class Runtime:
    """A running company. Made by :func:`open_runtime` only."""

    def __init__(
        self,
        settings: Settings,
        worker: Worker,
        nursery: trio.Nursery,
        disk: Disk | None = None,
    ) -> None:
        self.settings = settings
        self.started_at = time.time()
        self._nursery = nursery
        self._worker = worker
        self._tools: TextTools | None = None
        self._rows = count(1)
        self._snapshots = count(1)
        self._steps = count(0)
        self._draining = False
        self._active: set[RequestActor] = set()
        self._left = Bell()
        self.checkpoints = checkpoints_of(settings)
        self._streams = Streams(settings.stream_grace, nursery)
        self._bounds = Bounds(settings.batch, settings.queue)
        # Full: a client is refused with 429 before it has an actor.
        self._gate = Gate(self._bounds.places)
        # Never full: the gate bounds submits and cancels, everything else is few.
        self._scheduler = Mailbox[SchedulerMessage](self._bounds.scheduler)
        # Full: a lookup counts as a miss, a put is dropped. Returned leases have spare room.
        self._cache = Mailbox[CacheMessage](self._bounds.cache)
        # Full is a crash: two steps and the releases of one cache are all that is ever in it.
        self._gpu = Mailbox[GpuCommand](65_536)
        self.view = GpuView()
        self._adapters = AdapterDesk(settings.adapters, self.view)
        self._ssd = SpillDesk(settings, disk, self.view, self._new_snapshot, self._cache)
        self._explainer = Explainer(
            self._cache, self._bounds.cache_spare, self._adapters.table, self._ssd, self._copied
        )
        # Rebuilt by the supervisor; these two are read for figures before it has started.
        self.scheduler = self._build_scheduler()
        self.cache = self._build_cache()
        self.supervisor = Supervisor(
            (
                Child("gpu", self._build_gpu, restarts=1, window=600.0),
                Child("scheduler", self._build_scheduler),
                Child("kvcache", self._build_cache),
                Child("adapters", lambda: self._adapters.build(self._gpu)),
                *self._ssd.children(self._gpu),
            ),
            self.view.bell,
            self._fail_everyone,
        )

    # ---- the cast ------------------------------------------------------------------------

    def _build_gpu(self) -> GpuActor:
        return GpuActor(
            self._gpu,
            self._worker,
            self.view,
            scheduler=self._scheduler,
            cache=self._cache,
            step_timeout=self.settings.step_timeout,
            prefill_timeout=self.settings.prefill_timeout,
            mounts=self._adapters.table.wanted,
        )

    def _build_scheduler(self) -> SchedulerActor:
        core = SchedulerCore(
            batch=self.settings.batch,
            queue=self.settings.queue,
            cache=cache_bytes(self.settings) > 0,
            new_snapshot=self._new_snapshot,
            new_step=lambda: StepId(next(self._steps)),
            kv_limit=lambda model: budgets(self.settings, model).kv_bytes,
            resolve=self._adapters.table.resolve,
            checkpoint=self.settings.generation_checkpoint,
        )
        self.scheduler = SchedulerActor(
            self._scheduler,
            core,
            gpu=self._gpu,
            cache=self._cache,
            view=self.view,
            gate=self._gate,
            cache_spare=self._bounds.cache_spare,
            prefetches=self._ssd.is_there,
        )
        return self.scheduler

    def _build_cache(self) -> KVCacheActor:
        self.cache = KVCacheActor(
            self._cache,
            PrefixCore(cache_bytes(self.settings)),
            scheduler=self._scheduler,
            gpu=self._gpu,
            view=self.view,
            max_leases=self._bounds.leases,
            tier=self._ssd.tier(),
        )
        return self.cache

    def _new_snapshot(self) -> SnapshotId:
        return SnapshotId(next(self._snapshots))

    # ---- the front door ------------------------------------------------------------------

    @property
    def model(self) -> ModelInfo | None:
        """The loaded model; None while it loads or after it was lost."""
        return self.view.model

    async def wait_ready(self) -> ModelInfo:
        """Wait until the model is loaded and warm. Raises Unavailable when it never will be."""
        while True:
            if self.supervisor.failure is not None:
                raise Unavailable(f"the engine has failed: {self.supervisor.failure}")
            if self.view.model is not None and self._tools is not None and self._ssd.is_ready:
                return self.view.model
            await self.view.bell.wait()

    @asynccontextmanager
    async def generate(self, request: GenerationRequest) -> AsyncIterator[Generation]:
        """Run one generation; leaving the block, in whatever way, ends what is still running.

        The row of a request with a ticket goes on for ``Settings.stream_grace`` seconds, and what
        it says is there for the same request with the same ticket, from the beginning.

        Raises:
            RequestError: the request cannot be served; nothing was started.
            UnknownStream: its ticket is of a stream that nothing is known of.
            Overloaded: the queue is full.
            Unavailable: the engine is stopping or gone.
        """
        if self._draining:
            raise Unavailable("the server is stopping")
        model = await self.wait_ready()
        revisions = self._adapters.table.resolve(request.adapters)
        start = partial(self._start, request, model, revisions)
        async with self._streams.generation(request, start) as generation:
            yield generation

    def _start(
        self, request: GenerationRequest, model: ModelInfo, revisions: tuple[str, ...]
    ) -> RequestActor:
        if self._draining:
            raise Unavailable("the server is stopping")
        if not self._gate.try_enter():
            raise Overloaded(
                f"{self._gate.taken} requests are here already; try again later",
                retry_after=self.scheduler.core.retry_after(),
            )
        assert self._tools is not None
        actor = RequestActor(
            RowId(next(self._rows)),
            request,
            model=model,
            tools=self._tools,
            settings=self.settings,
            scheduler=self._scheduler,
            explainer=self._explainer,
            revisions=revisions,
            records=self.checkpoints,
        )
        self._active.add(actor)
        self._nursery.start_soon(self._run_request, actor)
        return actor

    async def _run_request(self, actor: RequestActor) -> None:
        try:
            await actor.run()
        finally:
            self._active.discard(actor)
            self._left.ring()

    def _fail_everyone(self, reason: str) -> None:
        for actor in tuple(self._active):
            actor.fail(Unavailable(f"the engine has failed: {reason}"))

    async def clear_cache(self) -> int:
        """Empty the prefix cache; returns how many entries it had. Lent ones follow later.

        Raises Overloaded (it has too much to do) or Unavailable (it crashed before it answered).
        """
        reply: Reply[int] = Reply()
        self._ask_cache(Clear(reply))
        return await reply.wait()

    async def close_session(self, session: str) -> bool:
        """What only this chat used goes first; False if nothing was. Raises as clear_cache does."""
        reply: Reply[bool] = Reply()
        self._ask_cache(CloseSession(session, reply))
        return await reply.wait()

    def _ask_cache(self, message: CacheMessage) -> None:
        try:
            self._cache.post(message, spare=self._bounds.cache_spare)
        except trio.WouldBlock:
            raise Overloaded("the prefix cache is busy", retry_after=1.0) from None

    async def _copied(self) -> None:
        await self.scheduler.copied()

    async def flush_cache(self, seconds: float) -> FlushReport:
        """Write every kept state that is not on the disk, for at most so many seconds.

        Raises Overloaded, or Unavailable (there is no SSD cache, too), as :meth:`clear_cache`.
        """
        until = trio.current_time() + seconds
        with trio.move_on_at(until):
            await self.scheduler.copied()
        reply: Reply[FlushReport] = Reply()
        self._ask_cache(Flush(reply, until))
        return await self.checkpoints.flushed(until, await reply.wait())

    async def drain_to_disk(self, seconds: float) -> FlushReport | None:
        """Stop admission, let what runs come to its end and make its state durable.

        None: there is no SSD cache, or time ran out before anything could be said.
        """
        until = trio.current_time() + seconds
        with trio.move_on_at(until), suppress(Overloaded, Unavailable):
            await self.drain(seconds)
            return await self.flush_cache(until - 1.0 - trio.current_time())  # and time to tell
        return None

    @property
    def adapters(self) -> tuple[AdapterInfo, ...]:
        """The adapters that requests may name, in the order in which they were mounted."""
        return self._adapters.mounted

    def check_adapter(self, adapter: AdapterDescription) -> None:
        """Raise AdapterError, with the reason, for one that the loaded model cannot take."""
        self._adapters.check(adapter)

    async def mount_adapter(self, adapter_id: str, folder: Path) -> AdapterInfo:
        """Mount a LoRA folder for requests that start from now on, or replace an adapter.

        Rows that run go on. Those that started with the replaced adapter keep it.

        Raises:
            AdapterError: it cannot be read, or does not fit the model; nothing has changed.
            Overloaded: too many such asks wait already.
            Unavailable: the engine is gone, or was lost meanwhile.
        """
        await self.wait_ready()
        return await self._adapters.mount(adapter_id, folder)

    async def unmount_adapter(self, adapter_id: str) -> int:
        """Take an adapter from requests that start from now on; how many modules it changed.

        Raises AdapterError (it is not mounted), or as :meth:`mount_adapter`.
        """
        await self.wait_ready()
        return await self._adapters.unmount(adapter_id)

    def health(self) -> Health:
        """The company's state, computed from its supervisor."""
        loaded = self._tools is not None
        return health(self.supervisor, self.view, loaded=loaded, draining=self._draining)

    def stats(self) -> dict[str, object]:
        """Live figures for people and dashboards; plain JSON types."""
        told = figures(
            self.settings,
            self.view,
            self.supervisor,
            self.scheduler.core.stats(),
            self.cache.core.stats(),
            self._adapters.table.stats(),
            active=len(self._active),
            started_at=self.started_at,
        )
        return {**told, **self._ssd.figures(self.checkpoints.stats())}

    def stop_admission(self) -> None:
        """Refuse new requests from now on; running ones go on, but for streams without a reader."""
        self._draining = True
        self._streams.close_left()

    async def drain(self, seconds: float) -> bool:
        """Stop admission and wait for the running requests; False when time ran out first."""
        self.stop_admission()
        with trio.move_on_after(seconds):
            while self._active:
                await self._left.wait()
        return not self._active

    async def load_text(self, source: Tokenizer | Callable[[], Tokenizer]) -> None:
        """Load the tokenizer on a worker thread, beside the weights, unless it is there already."""
        try:
            tokenizer, grammars = (
                await trio.to_thread.run_sync(load_text, source, abandon_on_cancel=True)
                if callable(source)
                else (source, GrammarTools(source))
            )
        except Exception as error:
            await self.supervisor.fail("tokenizer", error)
            raise
        self._tools = text_tools(self.settings, tokenizer, grammars)
        self.view.bell.ring()

    def close(self) -> None:
        """Close every request and stop the device's thread."""
        self.stop_admission()
        for actor in tuple(self._active):
            actor.close()
        self._worker.stop()


@asynccontextmanager
async def open_runtime(
    settings: Settings,
    *,
    device: Device | None = None,
    tokenizer: Tokenizer | Callable[[], Tokenizer] | None = None,
    worker: Worker | None = None,
    disk: Disk | None = None,
) -> AsyncIterator[Runtime]:
    """Open a runtime for one model; leaving the block stops it.

    Loading goes on in the background: :meth:`Runtime.wait_ready` waits for it, and so does the
    first request. ``device``, ``tokenizer`` (or a function that loads one) and ``worker`` replace
    the MLX ones, and ``disk`` the folder of the settings, for tests.

    Raises:
        ModelError and others, in a group, out of the block: what ended the company.
    """
    source = TokenizerSource(settings, tokenizer)
    if worker is None:
        worker = ThreadWorker(device or mlx_device(settings, source))
    async with trio.open_nursery() as nursery:
        runtime = Runtime(settings, worker, nursery, disk or folder_disk(settings))
        nursery.start_soon(runtime.supervisor.run)
        nursery.start_soon(runtime.checkpoints.run)
        nursery.start_soon(runtime.load_text, source.tokenizer or source.load)
        try:
            yield runtime
        finally:
            runtime.close()
            with trio.move_on_after(STOP_SECONDS, shield=True):
                await runtime.checkpoints.flush()
            with trio.CancelScope(shield=True, deadline=trio.current_time() + STOP_SECONDS):
                if isinstance(worker, ThreadWorker):
                    await trio.to_thread.run_sync(worker.join, STOP_SECONDS, abandon_on_cancel=True)
            nursery.cancel_scope.cancel()
