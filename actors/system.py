"""The library's front door: a runtime for one model, and what its clients ask of it.

``open_runtime`` starts the permanent actors (``cast.py``) and hands out a :class:`Runtime`; each
generation adds one Request actor to the same nursery. Everything runs on the caller's trio loop
but for the device's own thread.
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
from mlx_troupe.runtime.device import Device
from mlx_troupe.runtime.errors import Overloaded, Unavailable
from mlx_troupe.runtime.model_info import ModelInfo
from mlx_troupe.runtime.plans import RowId
from mlx_troupe.runtime.requests import GenerationRequest
from mlx_troupe.runtime.settings import Settings
from mlx_troupe.runtime.text.tokenizer import Tokenizer

from .cast import Cast
from .checkpoints import checkpoints_of
from .disk import Disk, folder_disk
from .figures import figures, health
from .generation import Generation, Health
from .grammars import GrammarTools
from .loading import TokenizerSource, load_text, mlx_device, text_tools
from .messages import Clear, CloseSession
from .reply import Bell, Reply
from .request import RequestActor
from .spill_messages import Flush, FlushReport
from .streams import Streams
from .text_tools import TextTools
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
        self._draining = False
        self._active: set[RequestActor] = set()
        self._left = Bell()
        self.checkpoints = checkpoints_of(settings)
        self._streams = Streams(settings.stream_grace, nursery)
        self.cast = Cast(settings, worker, disk, self._fail_everyone)

    @property
    def model(self) -> ModelInfo | None:
        """The loaded model; None while it loads or after it was lost."""
        return self.cast.view.model

    async def wait_ready(self) -> ModelInfo:
        """Wait until the model is loaded and warm. Raises Unavailable when it never will be."""
        view, supervisor = self.cast.view, self.cast.supervisor
        while True:
            if supervisor.failure is not None:
                raise Unavailable(f"the engine has failed: {supervisor.failure}")
            if view.model is not None and self._tools is not None and self.cast.ssd.is_ready:
                return view.model
            await view.bell.wait()

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
        revisions = self.cast.adapters.table.resolve(request.adapters)
        start = partial(self._start, request, model, revisions)
        async with self._streams.generation(request, start) as generation:
            yield generation

    def _start(
        self, request: GenerationRequest, model: ModelInfo, revisions: tuple[str, ...]
    ) -> RequestActor:
        if self._draining:
            raise Unavailable("the server is stopping")
        if not self.cast.gate.try_enter():
            raise Overloaded(
                f"{self.cast.gate.taken} requests are here already; try again later",
                retry_after=self.cast.scheduler.core.retry_after(),
            )
        assert self._tools is not None
        actor = RequestActor(
            RowId(next(self._rows)),
            request,
            model=model,
            tools=self._tools,
            settings=self.settings,
            scheduler=self.cast.to_scheduler,
            explainer=self.cast.explainer,
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
        self.cast.ask_cache(Clear(reply))
        return await reply.wait()

    async def close_session(self, session: str) -> bool:
        """What only this chat used goes first; False if nothing was. Raises as clear_cache does."""
        reply: Reply[bool] = Reply()
        self.cast.ask_cache(CloseSession(session, reply))
        return await reply.wait()

    async def flush_cache(self, seconds: float) -> FlushReport:
        """Write every kept state that is not on the disk, for at most so many seconds.

        Raises Overloaded, or Unavailable (there is no SSD cache, too), as :meth:`clear_cache`.
        """
        until = trio.current_time() + seconds
        with trio.move_on_at(until):
            await self.cast.copied()
        reply: Reply[FlushReport] = Reply()
        self.cast.ask_cache(Flush(reply, until))
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
        return self.cast.adapters.mounted

    def check_adapter(self, adapter: AdapterDescription) -> None:
        """Raise AdapterError, with the reason, for one that the loaded model cannot take."""
        self.cast.adapters.check(adapter)

    async def mount_adapter(self, adapter_id: str, folder: Path) -> AdapterInfo:
        """Mount a LoRA folder for requests that start from now on, or replace an adapter.

        Rows that run go on. Those that started with the replaced adapter keep it.

        Raises:
            AdapterError: it cannot be read, or does not fit the model; nothing has changed.
            Overloaded: too many such asks wait already.
            Unavailable: the engine is gone, or was lost meanwhile.
        """
        await self.wait_ready()
        return await self.cast.adapters.mount(adapter_id, folder)

    async def unmount_adapter(self, adapter_id: str) -> int:
        """Take an adapter from requests that start from now on; how many modules it changed.

        Raises AdapterError (it is not mounted), or as :meth:`mount_adapter`.
        """
        await self.wait_ready()
        return await self.cast.adapters.unmount(adapter_id)

    def health(self) -> Health:
        """The company's state, computed from its supervisor."""
        loaded = self._tools is not None
        return health(self.cast.supervisor, self.cast.view, loaded=loaded, draining=self._draining)

    def stats(self) -> dict[str, object]:
        """Live figures for people and dashboards; plain JSON types."""
        told = figures(
            self.settings,
            self.cast.view,
            self.cast.supervisor,
            self.cast.scheduler.core.stats(),
            self.cast.cache.core.stats(),
            self.cast.adapters.table.stats(),
            active=len(self._active),
            started_at=self.started_at,
        )
        return {**told, **self.cast.ssd.figures(self.checkpoints.stats())}

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
            await self.cast.supervisor.fail("tokenizer", error)
            raise
        self._tools = text_tools(self.settings, tokenizer, grammars)
        self.cast.view.bell.ring()

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
        nursery.start_soon(runtime.cast.supervisor.run)
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
