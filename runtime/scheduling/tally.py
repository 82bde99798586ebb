"""What a scheduler has counted since its start, and its live figures.

Part of the scheduler's core; the core counts, this only holds and adds up.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from .chunks import ChunkSizer
from .effects import SchedulerStats
from .planning import Planner
from .reserve import Reserve
from .rows import Phase, Row


@dataclass(slots=True)
class Tally:
    """Rows by how they came and went, tokens and steps."""

    submitted: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    refused: int = 0
    steps: int = 0
    generated: int = 0
    shortened: int = 0

    def stats(
        self, rows: Collection[Row], planner: Planner, sizer: ChunkSizer, reserve: Reserve
    ) -> SchedulerStats:
        """Everything for ``/stats``."""
        phases = [row.phase for row in rows]
        return SchedulerStats(
            waiting_rows=phases.count(Phase.WAITING)
            + phases.count(Phase.LOOKING)
            + phases.count(Phase.READY),
            prefill_rows=phases.count(Phase.PREFILL),
            decode_rows=phases.count(Phase.DECODE),
            ending_rows=phases.count(Phase.ENDING),
            submitted=self.submitted,
            finished=self.finished,
            cancelled=self.cancelled,
            failed=self.failed,
            refused=self.refused,
            generated_tokens=self.generated,
            prefilled_tokens=planner.prefilled_tokens,
            shared_tokens=planner.shared_tokens,
            steps=self.steps,
            prefill_chunk=sizer.chunk,
            decode_step_seconds=sizer.decode_seconds,
            reserved_bytes=reserve.reserved(rows),
            rows_without_room=sum(row.waits for row in rows if row.phase is Phase.DECODE),
            shortened=self.shortened,
        )
