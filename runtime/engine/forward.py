"""The forward passes of a step: prefill chunks, and decode of lone and batched rows.

Owns the batches and decides which rows stand in which: rows decode together when the model allows
it and there are at least two of them; otherwise each keeps mlx-lm's own caches, which makes a lone
row bit-exact with mlx-lm. Where steps are replayed (a GPU, see ``compiled``) a lone row stands in
the batch too: faster, and equal within the arithmetic's precision. Short rows that are prefilled
together stand in a batch of their own from then on to their first decode. Runs on the device thread
and never waits. Knows no plans and no steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx
from mlx.nn import Module

from ..plans import RowId
from .adapters import Adapters
from .batch import RowBatch
from .compiled import CompiledDecode, can_replay
from .drawing import Drawing, Drawn, Fault
from .kvplan import KVPlan
from .lazy import fence, start
from .masks import MaskMaker
from .rows import Row, next_inputs
from .sampling import Sampler
from .snapshots import CannotCut, arrays_of, compact

PASS_IN_TOKENS = 32
"""Padding that costs no more than another pass over the weights would."""

SHORT_CHUNK, SHORT_ROW = 256, 1024
"""Rows with more new tokens, or more tokens after them, stay alone: scores grow with both."""


class Forward:
    """Runs the model for the executor's rows.

    ``together`` says that rows may share a decode, ``ragged`` that they may share a prefill, and
    ``replay`` that decode steps are compiled; a lone row then stands in the batch too. ``plan`` is
    how their keys and values are kept.
    """

    def __init__(
        self,
        model: Module,
        sampler: Sampler,
        masks: MaskMaker,
        adapters: Adapters,
        plan: KVPlan,
        *,
        together: bool,
        ragged: bool,
        replay: bool = False,
        spare: bool = True,
    ) -> None:
        self._model: Any = model
        self._adapters = adapters
        self._plan = plan
        self._drawing = Drawing(sampler, masks)
        self._together = together
        self._ragged = ragged
        self._new_batch = partial(RowBatch, model, plan, spare=spare)
        self._batch: Any = self._new_batch() if together else None
        self._compiled: CompiledDecode | None = None
        if replay and self._batch is not None and can_replay(self._batch):
            self._compiled = CompiledDecode(model, self._batch, adapters)
        self._batched: dict[RowId, Row] = {}
        self._homes: dict[RowId, Any] = {}

    @property
    def num_batched(self) -> int:
        """Rows that stand in the batch that decodes."""
        return len(self._batched)

    @property
    def batch_bytes(self) -> int:
        """Bytes of all batches' states."""
        return sum(home.nbytes for home in set(self._homes.values()))

    def drop(self, row: Row) -> None:
        """Forget a row's state; a failed row's slot is cleaned before anyone uses it again."""
        if (home := self._homes.pop(row.id, None)) is not None:
            home.leave(row.id, poisoned=row.failed or home is not self._batch)
        self._batched.pop(row.id, None)
        row.caches = None
        if row.adapters:
            row.adapters = ()
            self.forget_adapters()

    def forget_adapters(self) -> None:
        """A row with adapters is gone, or an adapter is: keep nothing that only they needed."""
        self._adapters.forget()
        if self._compiled is not None and self._adapters.are_gone:
            self._compiled.forget_adapters()

    def copy(self, row: Row, length: int) -> list[Any]:
        """A compact copy (lazy) of a row's first ``length`` tokens. Raises CannotCut."""
        self._plan.check_cut(row.processed, length)
        if (home := self._homes.get(row.id)) is None:
            return compact(row.state(length))
        if not 0 < length <= row.processed:
            raise CannotCut(f"the row holds {row.processed} tokens, not {length}")
        exported: list[Any] = home.export(row.id, length)
        return exported

    def held(self, row: Row) -> tuple[list[Any], int]:
        """A compact copy of all that a row holds, and how many tokens that is."""
        return self.copy(row, row.processed), row.processed

    def prefill(self, chunks: Sequence[tuple[Row, int]]) -> tuple[list[mx.array], list[Fault]]:
        """Process prompt tokens. Returns small arrays to wait for, and the rows that failed."""
        fences: list[mx.array] = []
        faults = [
            Fault(row, f"{n} tokens to prefill of {row.unprefilled}")
            for row, n in chunks
            if not 0 < n <= row.unprefilled
        ]
        lost = {fault.row.id for fault in faults}
        for group in self._prefill_groups([c for c in chunks if c[0].id not in lost]):
            if len(group) > 1:
                fence, failed = self._prefill_together(group)
                fences += fence
                faults += failed
                continue
            row, count = group[0]
            try:
                fences.append(self._prefill_alone(row, count))
            except Exception as error:
                faults.append(Fault(row, f"prefill failed: {error}"))
        return fences, faults

    def decode(self, rows: Sequence[Row]) -> tuple[list[Drawn], list[Fault]]:
        """One token for each row."""
        together = self._together and (len(rows) > 1 or self._compiled is not None)
        faults = self._arrange(rows if together else ())
        lost = {fault.row.id for fault in faults}
        rows = [row for row in rows if row.id not in lost]
        if together and rows:
            drawn, failed = self._decode_batch()
            return [drawn], faults + failed
        done: list[Drawn] = []
        for row in rows:
            try:
                drawn, failed = self._decode_alone(row)
            except Exception as error:
                faults.append(Fault(row, f"decode failed: {error}"))
                continue
            done.append(drawn)
            faults += failed
        return done, faults

    def push(self) -> list[Fault]:
        """Start the draws; the tokens of the step before are known. Returns rows that failed."""
        return self._drawing.push()

    def rest(self) -> None:
        """No rows are left: keep nothing of the last ones."""
        self._drawing.rest()

    def _prefill_groups(self, chunks: Sequence[tuple[Row, int]]) -> list[list[tuple[Row, int]]]:
        if not self._ragged or len(chunks) < 2:
            return [[chunk] for chunk in chunks]
        groups = [[chunk] for chunk in chunks if not _is_short(*chunk)]
        longest = useful = padding = 0
        short = [chunk for chunk in chunks if _is_short(*chunk)]
        for row, count in sorted(short, key=lambda chunk: -chunk[1]):
            missing = longest - count
            if useful and padding + missing <= max(PASS_IN_TOKENS, useful // 2):
                groups[-1].append((row, count))
                useful, padding = useful + count, padding + missing
            else:
                groups.append([(row, count)])
                longest, useful, padding = count, count, 0
        return groups

    def _prefill_alone(self, row: Row, count: int) -> mx.array:
        self._park(row)
        tokens = mx.array(row.next_prompt_tokens(count))
        self._run([row], tokens[None], _lone_caches(row))
        row.caches = self._plan.converted(_lone_caches(row), row.processed + count)
        return _launch_state([(row, count)], arrays_of(_lone_caches(row)))

    def _prefill_together(
        self, group: Sequence[tuple[Row, int]]
    ) -> tuple[list[mx.array], list[Fault]]:
        nursery = self._nursery_of([row for row, _ in group])
        faults = [fault for row, _ in group for fault in self._move(row, nursery)]
        lost = {fault.row.id for fault in faults}
        chunks = {row.id: (row, count) for row, count in group if row.id not in lost}
        if not chunks:
            return [], faults
        longest = max(count for _, count in chunks.values())
        counts = {row_id: count for row_id, (_, count) in chunks.items()}
        caches = nursery.begin(longest, counts)
        ordered = [chunks[row_id] for row_id in nursery.rows]
        padded = [
            row.next_prompt_tokens(count) + (0,) * (longest - count) for row, count in ordered
        ]
        self._run([row for row, _ in ordered], mx.array(padded), caches)
        nursery.commit([count for _, count in ordered])
        return [_launch_state(ordered, nursery.arrays)], faults

    def _nursery_of(self, rows: Sequence[Row]) -> Any:
        """The batch in which exactly these rows stand, or a new one."""
        home = self._homes.get(rows[0].id)
        if home is not None and {row.id for row in rows} == set(home.rows):
            return home
        return self._new_batch()

    def _arrange(self, wanted: Sequence[Row]) -> list[Fault]:
        """Bring exactly the rows wanted into the batch; the others go back to their own caches."""
        faults: list[Fault] = []
        staying = {row.id for row in wanted}
        for row in [r for r in self._batched.values() if r.id not in staying]:
            try:
                self._park(row)
            except Exception as error:
                faults.append(Fault(row, f"the row could not leave the batch: {error}"))
        for row in wanted:
            if row.id not in self._batched:
                failed = self._move(row, self._batch)
                faults += failed
                if not failed:
                    self._batched[row.id] = row
        return faults

    def _move(self, row: Row, home: Any) -> list[Fault]:
        """Bring a row into a batch, from its own caches or out of another batch."""
        before = self._homes.get(row.id)
        if before is home:
            return []
        try:
            if before is None:
                home.join(row.id, _lone_caches(row), row.processed)
            else:
                home.adopt(row.id, before)
        except Exception as error:
            return [Fault(row, f"the row could not join the batch: {error}")]
        self._homes[row.id] = home
        row.caches = None
        row.forget_before()
        return []

    def _park(self, row: Row) -> None:
        """Give a row that stands in a batch caches of its own."""
        if (home := self._homes.get(row.id)) is None:
            return
        caches = home.export(row.id, row.processed)
        start(arrays_of(caches))
        home.leave(row.id, poisoned=home is not self._batch)
        del self._homes[row.id]
        self._batched.pop(row.id, None)
        row.caches = caches
        row.forget_before()

    def _decode_batch(self) -> tuple[Drawn, list[Fault]]:
        caches = self._batch.begin(1)
        rows = [self._batched[i] for i in self._batch.rows]
        inputs = next_inputs(rows)
        logits = None
        if self._compiled is not None:
            logits = self._compiled.logits(inputs, [row.adapters for row in rows])
        if logits is None:
            logits = self._run(rows, inputs[:, None], caches)
        self._batch.commit(1)
        return self._draw(rows, inputs, logits, self._batch.arrays)

    def _decode_alone(self, row: Row) -> tuple[Drawn, list[Fault]]:
        self._park(row)
        inputs = next_inputs([row])
        row.remember()
        logits = self._run([row], inputs[None], _lone_caches(row))
        row.caches = self._plan.converted(_lone_caches(row), row.processed + 1)
        return self._draw([row], inputs, logits, [])

    def _run(self, rows: Sequence[Row], tokens: mx.array, caches: list[Any]) -> mx.array:
        """One pass of the model over ``tokens`` [rows, columns], with each row's adapters."""
        with self._adapters.shown([row.adapters for row in rows]):
            logits: mx.array = self._model(tokens, cache=caches)
        return logits

    def _draw(
        self, rows: list[Row], inputs: mx.array, logits: mx.array, state: list[mx.array]
    ) -> tuple[Drawn, list[Fault]]:
        for row in rows:
            row.advance(1)
        return self._drawing.draw(rows, inputs, logits[:, -1, :], state)


def _lone_caches(row: Row) -> list[Any]:
    if row.caches is None:
        raise RuntimeError(f"row {row.id} has no caches of its own")
    return row.caches


def _is_short(row: Row, count: int) -> bool:
    return count <= SHORT_CHUNK and row.processed + count <= SHORT_ROW


def _launch_state(chunks: Sequence[tuple[Row, int]], state: list[mx.array]) -> mx.array:
    """Start what is lazy in the rows' states; the logits of a prefill are never computed."""
    start(state)
    for row, count in chunks:
        row.advance(count)
        row.forget_before()
    return fence(state[-1]) if state else mx.zeros(())
