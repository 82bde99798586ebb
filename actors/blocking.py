"""The blocking twin of the front door, for callers that are not async.

A thread of its own runs trio and the whole company in it; the caller's thread only waits. Made for
scripts, notebooks without a running loop, and worker threads. Inside a running event loop it would
block that loop, so it refuses to open there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import sniffio
from anyio.from_thread import BlockingPortal, start_blocking_portal

from mlx_troupe.runtime.adapters import AdapterInfo
from mlx_troupe.runtime.device import Device
from mlx_troupe.runtime.model_info import ModelInfo
from mlx_troupe.runtime.requests import Failed, Finished, GenerationEvent, GenerationRequest
from mlx_troupe.runtime.settings import Settings
from mlx_troupe.runtime.text.tokenizer import Tokenizer

from .generation import Generation, Health
from .loading import import_engine
from .spill_messages import FlushReport
from .system import Runtime, open_runtime
from .worker import Worker


class BlockingGeneration:
    """Iterates over the events of one generation, up to and with its terminal one.

    Leaving the loop early, :meth:`close`, or simply dropping it ends what is still running.
    """

    def __init__(self, portal: BlockingPortal, scope: AbstractContextManager[Generation]) -> None:
        self._portal = portal
        self._generation = scope.__enter__()
        self._scope: AbstractContextManager[Generation] | None = scope

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self._generation.prompt_tokens

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that were not computed again; None until the row has started."""
        return self._generation.cached_tokens

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was asked for and is not given, in words."""
        return self._generation.warnings

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> GenerationEvent:
        if self._scope is None:
            raise StopIteration
        event = self._portal.call(self._generation.next_event)
        if isinstance(event, Finished | Failed):
            self.close()
        return event

    def close(self) -> None:
        """End the generation; nothing happens when it, or its runtime, has ended."""
        scope, self._scope = self._scope, None
        if scope is not None:
            # Raised by a portal that has stopped, and by one that is called in its own thread, as
            # the garbage collector may do: what is left there ends with the runtime.
            with suppress(RuntimeError):
                scope.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_scope", None) is not None:
            self.close()


class BlockingRuntime:
    """A running company in another thread. Made by :func:`open_blocking_runtime` only.

    Any thread may call it, several at a time; their requests share the batch.
    """

    def __init__(self, portal: BlockingPortal, runtime: Runtime) -> None:
        self._portal = portal
        self._runtime = runtime

    def wait_ready(self) -> ModelInfo:
        """Wait until the model is loaded. Raises Unavailable when it never will be."""
        return self._portal.call(self._runtime.wait_ready)

    def generate(self, request: GenerationRequest) -> BlockingGeneration:
        """Start one generation and return its events.

        Raises:
            RequestError: the request cannot be served; nothing was started.
            Overloaded: the queue is full.
            Unavailable: the engine is stopping or gone.
        """
        scope = self._portal.wrap_async_context_manager(self._runtime.generate(request))
        return BlockingGeneration(self._portal, scope)

    def clear_cache(self) -> int:
        """Empty the prefix cache; returns how many entries it had."""
        return self._portal.call(self._runtime.clear_cache)

    def close_session(self, session: str) -> bool:
        """What only this chat used goes first; False if nothing was."""
        return self._portal.call(self._runtime.close_session, session)

    def flush_cache(self, seconds: float) -> FlushReport:
        """Write every kept state that is not on the disk, for at most so many seconds.

        Raises Unavailable: there is no SSD cache.
        """
        return self._portal.call(self._runtime.flush_cache, seconds)

    def adapters(self) -> tuple[AdapterInfo, ...]:
        """The adapters that requests may name, in the order in which they were mounted."""
        return self._portal.call(lambda: self._runtime.adapters)

    def mount_adapter(self, adapter_id: str, folder: Path) -> AdapterInfo:
        """Mount a LoRA folder, or replace one; see :meth:`Runtime.mount_adapter`."""
        return self._portal.call(self._runtime.mount_adapter, adapter_id, folder)

    def unmount_adapter(self, adapter_id: str) -> int:
        """Take an adapter from requests that start from now on; how many modules it changed."""
        return self._portal.call(self._runtime.unmount_adapter, adapter_id)

    def health(self) -> Health:
        """The company's state, computed from its supervisor."""
        return self._portal.call(self._runtime.health)

    def stats(self) -> dict[str, object]:
        """Live figures for people and dashboards; plain JSON types."""
        return self._portal.call(self._runtime.stats)


@contextmanager
def open_blocking_runtime(
    settings: Settings,
    *,
    device: Device | None = None,
    tokenizer: Tokenizer | Callable[[], Tokenizer] | None = None,
    worker: Worker | None = None,
) -> Iterator[BlockingRuntime]:
    """Open a runtime for callers that are not async; see :func:`open_runtime`.

    Raises:
        RuntimeError: called inside a running event loop; use :func:`open_runtime` there.
        ModelError and others, in a group, out of the block: what ended the company.
    """
    _refuse_inside_a_loop()
    if device is None and worker is None:
        # The portal's thread ends with the runtime, so it must not be the one that imports MLX.
        import_engine()
    with start_blocking_portal(backend="trio") as portal:
        opened = open_runtime(settings, device=device, tokenizer=tokenizer, worker=worker)
        try:
            with portal.wrap_async_context_manager(opened) as runtime:
                yield BlockingRuntime(portal, runtime)
        finally:
            # Generations that their owners still hold would be waited for.
            portal.call(portal.stop, True)


def _refuse_inside_a_loop() -> None:
    try:
        library = sniffio.current_async_library()
    except sniffio.AsyncLibraryNotFoundError:
        return
    raise RuntimeError(
        f"a blocking runtime cannot be opened inside a running {library} loop, which it would"
        " block; use open_runtime there, or a thread"
    )
