"""Where records of interrupted answers are kept: in memory, and in a folder if there is one.

Lives on trio's thread, shared by all requests of a runtime. Nobody waits for a write: what is to be
written stands here, newest only, one for each request, until the one task that writes comes to it.
A folder that fails is told once and counted; answers then outlive no crash, and nothing else
changes.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace

import trio

from mlx_troupe.runtime.resume.files import RecordFiles, answers_in
from mlx_troupe.runtime.resume.records import Record, Records
from mlx_troupe.runtime.settings import Settings

from .reply import Bell
from .spill_messages import FlushReport

log = logging.getLogger(__name__)

RECORD_BYTES = 32 << 20
"""What interrupted answers may take in memory, as ids and figures."""


class Checkpoints:
    """Records by the identity of their request.

    ``every`` is after how many tokens an answer is written down; 0 = only when it is interrupted,
    and only where its client asked for that.
    """

    def __init__(self, every: int = 0, files: RecordFiles | None = None) -> None:
        self.every = every
        self._files = files
        self._records = Records(RECORD_BYTES)
        # Bounded by the requests that run or ended since the task last looked: one each, and those
        # have places in the gate. None = to be removed.
        self._pending: dict[str, Record | None] = {}
        # Records whose last write failed; a flush tries them again.
        self._unsaved: set[str] = set()
        self._bell = Bell()
        self._writing = False
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        """Records in memory."""
        return len(self._records)

    def keep(self, record: Record) -> None:
        """Remember how far an answer came, unless more of it is known already."""
        if self._records.keep(record) and self._files is not None:
            self._pending[record.identity] = record
            self._bell.ring()

    def remove(self, identity: str) -> None:
        """The answer was given to its end."""
        self._records.remove(identity)
        self._unsaved.discard(identity)
        if self._files is not None:
            self._pending[identity] = None
            self._bell.ring()

    async def find(self, identity: str) -> Record | None:
        """How far an answer came, in this process or in one before it."""
        record = self._records.find(identity)
        if record is None and self._files is not None and identity not in self._pending:
            record = await trio.to_thread.run_sync(self._files.read, identity)
        self._counts["found"] += record is not None
        return record

    async def run(self) -> None:
        """Write until cancelled."""
        if self._files is None:
            return
        await self._do("open", self._files)
        while True:
            await self._write_all(self._files)
            await self._bell.wait()

    async def flush(self) -> None:
        """Wait until nothing stands here to be written."""
        while self._pending or self._writing:
            await self._bell.wait()

    async def flushed(self, until: float, report: FlushReport) -> FlushReport:
        """A report on kept states, with what is to be said of records; by ``until``."""
        began = trio.current_time()
        for identity in self._unsaved & self._records.identities:
            self._pending.setdefault(identity, self._records.find(identity))
        self._unsaved.clear()
        self._bell.ring()
        with trio.move_on_at(until):
            await self.flush()
        waiting, unsaved = len(self._pending) + self._writing, len(self._unsaved)
        return replace(
            report,
            durable=report.durable and not waiting and not unsaved,
            missing=report.missing + unsaved,
            pending=report.pending + waiting,
            seconds=report.seconds + trio.current_time() - began,
        )

    def stats(self) -> dict[str, int]:
        """Counts for ``/stats``."""
        return {
            "every": self.every,
            "records": len(self._records),
            "pending": len(self._pending) + self._writing,
            "found": self._counts["found"],
            "written": self._counts["write"],
            "removed": self._counts["remove"],
            "failed": self._counts["failed"],
        }

    async def _write_all(self, files: RecordFiles) -> None:
        while self._pending:
            identity = next(iter(self._pending))
            record = self._pending.pop(identity)
            self._writing = True
            try:
                if record is None:
                    await self._do("remove", files, identity)
                elif await self._do("write", files, record):
                    self._unsaved.discard(identity)
                elif identity in self._records.identities:
                    self._unsaved.add(identity)
            finally:
                self._writing = False
                self._bell.ring()

    async def _do(self, what: str, files: RecordFiles, *arguments: object) -> bool:
        try:
            await trio.to_thread.run_sync(getattr(files, what), *arguments)
        except OSError as error:
            if not self._counts["failed"]:
                log.warning(
                    "interrupted answers cannot be written down, so they outlive no crash until "
                    "they can: %s",
                    error,
                )
            self._counts["failed"] += 1
            return False
        self._counts[what] += 1
        return True


def checkpoints_of(settings: Settings) -> Checkpoints:
    """The records of a runtime; on disk beside the kept states, if answers are written down."""
    if settings.ssd_cache is None or not settings.generation_checkpoint:
        return Checkpoints()
    files = RecordFiles(answers_in(settings.ssd_cache))
    return Checkpoints(settings.generation_checkpoint, files)
