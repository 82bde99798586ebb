"""Kept states leave and come back through the GPU actor and its worker, between steps."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import cast

import pytest
import trio

from mlx_troupe.actors.device_messages import (
    Answered,
    Export,
    GpuCommand,
    Import,
    Launch,
    Open,
    Opened,
    Refused,
    Settle,
    Settled,
    WorkerEvent,
)
from mlx_troupe.actors.gpu import GpuActor, GpuView
from mlx_troupe.actors.inline_worker import InlineWorker
from mlx_troupe.actors.mailbox import Mailbox
from mlx_troupe.actors.messages import CacheMessage, SchedulerMessage
from mlx_troupe.actors.reply import Reply
from mlx_troupe.actors.testing import ScriptedDevice
from mlx_troupe.actors.worker import Conductor
from mlx_troupe.runtime.device import StateSlice
from mlx_troupe.runtime.errors import NoRoom, StateRefused, Unavailable
from mlx_troupe.runtime.model_info import ModelInfo
from mlx_troupe.runtime.plans import (
    Cold,
    FromSnapshot,
    KeepRow,
    PrefillRow,
    RowId,
    SnapshotId,
    SnapshotMade,
    StartRow,
    StepId,
    StepPlan,
)
from mlx_troupe.runtime.requests import Sampling
from mlx_troupe.runtime.spill.state import HostLayer, HostState

A, B = RowId(1), RowId(2)
KEPT, BACK = SnapshotId(1), SnapshotId(2)
IDS = (5, 6, 7, 8)


def kept(step: int = 0) -> tuple[Launch, Launch]:
    """Two steps: a row of four ids is prefilled, and its first three are kept."""
    start = StartRow(A, IDS, Sampling(), Cold())
    return (
        Launch(StepPlan(StepId(step), start=(start,), prefill=(PrefillRow(A, 3),))),
        Launch(StepPlan(StepId(step + 1), keep=(KeepRow(A, 3, KEPT),), decode=(A,))),
    )


@dataclass
class Rig:
    """A conductor and everything that it said."""

    device: ScriptedDevice = field(default_factory=ScriptedDevice)
    events: list[WorkerEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.conductor = Conductor(self.device, self.events.append)
        for command in (Open(), *kept(), Settle()):
            self.conductor.perform(command)
        assert isinstance(self.events.pop(0), Opened)

    def export(self, snapshot: SnapshotId, first: int, count: int) -> WorkerEvent:
        """What the worker says to an export."""
        self.conductor.perform(Export(snapshot, first, count, Reply()))
        return self.events.pop()

    def exported(self, first: int, count: int) -> tuple[HostLayer, ...]:
        """What it says to one of the kept state."""
        event = self.export(KEPT, first, count)
        assert isinstance(event, Answered)
        # What was asked for is not in its type.
        return cast("tuple[HostLayer, ...]", event.value)


async def test_a_state_leaves_in_slices_and_comes_back() -> None:
    """Two slices of a layer each are the whole; a row goes on from what was imported."""
    rig = Rig()
    layers: tuple[HostLayer, ...] = ()
    for first in (0, 1):
        layers += rig.exported(first, 1)
    assert rig.exported(2, 1) == ()
    reply: Reply[SnapshotMade | None] = Reply()
    rig.conductor.perform(Import(StateSlice(BACK, HostState(3, layers)), reply))
    event = rig.events.pop()
    assert isinstance(event, Answered)
    assert event.value == SnapshotMade(BACK, 3, 3)
    assert event.stats.snapshots == 2
    assert not reply.settled
    start = StartRow(B, IDS, Sampling(), FromSnapshot(BACK, 3))
    rig.conductor.perform(Launch(StepPlan(StepId(9), start=(start,), decode=(B,))))
    rig.conductor.perform(Settle())
    settled = rig.events.pop()
    assert isinstance(settled, Settled)
    assert [(s.row, s.token) for s in settled.done.sampled] == [(B, 9)]


@pytest.mark.parametrize("window", [None, 0, 2])
async def test_what_is_refused_breaks_nothing(window: int | None) -> None:
    """Unknown ids, used ids and states of another kind are told apart from a broken device."""
    rig = Rig(ScriptedDevice(ModelInfo("m", 100, 100, frozenset({0}), trim_window=window)))
    layers = rig.exported(0, 9)
    good = HostState(3, layers)
    assert isinstance(rig.export(BACK, 0, 9), Refused)
    layer = replace(layers[0], kind="other")
    for snapshot, state in (
        (KEPT, good),
        (BACK, HostState(3, layers[:1])),
        (BACK, HostState(3, (layer, layer))),
        (BACK, HostState(3, ())),
    ):
        rig.conductor.perform(Import(StateSlice(snapshot, state), Reply()))
        refused = rig.events.pop()
        assert isinstance(refused, Refused)
        assert isinstance(refused.error, StateRefused)
    assert set(rig.device.snapshots) == {KEPT}
    rig.conductor.perform(Import(StateSlice(BACK, good), Reply()))
    assert isinstance(rig.events.pop(), Answered)


class Poor(ScriptedDevice):
    """A device without memory for bytes that come or go; some of a state may be there by then."""

    def export(
        self, snapshot: SnapshotId, first_layer: int, count: int, since: int = 0
    ) -> tuple[HostLayer, ...]:
        raise MemoryError("no memory")

    def import_state(self, part: StateSlice) -> SnapshotMade | None:
        self.arriving[part.snapshot] = part.state, part.first_layer
        raise RuntimeError("no memory")


async def test_a_move_that_fails_costs_no_row(caplog: pytest.LogCaptureFixture) -> None:
    """Nor the file that a state came from; the rows' next step is made, and all of it is told."""
    rig = Rig(Poor())
    refused = rig.export(KEPT, 0, 9)
    assert isinstance(refused, Refused)
    assert type(refused.error) is StateRefused
    rig.conductor.perform(Import(StateSlice(BACK, HostState(3, ())), Reply()))
    refused = rig.events.pop()
    assert isinstance(refused, Refused)
    assert isinstance(refused.error, NoRoom)
    assert not rig.device.arriving
    rig.conductor.perform(Launch(StepPlan(StepId(9), decode=(A,))))
    rig.conductor.perform(Settle())
    settled = rig.events.pop()
    assert isinstance(settled, Settled)
    assert settled.done.sampled
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2


@dataclass
class Stage:
    """A GPU actor over a scripted device, its neighbours' mailboxes at hand."""

    gpu: Mailbox[GpuCommand] = field(default_factory=lambda: Mailbox(99))
    view: GpuView = field(default_factory=GpuView)
    device: ScriptedDevice = field(default_factory=ScriptedDevice)

    def __post_init__(self) -> None:
        self.actor = GpuActor(
            self.gpu,
            InlineWorker(self.device),
            self.view,
            scheduler=Mailbox[SchedulerMessage](99),
            cache=Mailbox[CacheMessage](99),
            step_timeout=60.0,
            prefill_timeout=600.0,
        )


async def test_the_gpu_actor_answers_whoever_asked(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """Layers, a kept state and a refusal come through replies; figures follow."""
    stage = Stage()
    nursery.start_soon(stage.actor.run)
    for command in (*kept(), Settle()):
        stage.gpu.post(command)
    layers: Reply[tuple[HostLayer, ...]] = Reply()
    stage.gpu.post(Export(KEPT, 0, 99, layers))
    made: Reply[SnapshotMade | None] = Reply()
    part = StateSlice(BACK, HostState(3, await layers.wait()), ("revision",))
    stage.gpu.post(Import(part, made))
    assert (await made.wait()).length == 3
    assert stage.view.stats.snapshots == 2
    assert stage.device.made_with[BACK] == ("revision",)
    unknown: Reply[tuple[HostLayer, ...]] = Reply()
    stage.gpu.post(Export(SnapshotId(77), 0, 1, unknown))
    with pytest.raises(StateRefused):
        await unknown.wait()


async def test_nobody_waits_on_a_lost_device(autojump_clock: trio.testing.MockClock) -> None:
    """Asks that wait in the mailbox or on the worker are failed when the actor is given up."""
    stage = Stage()
    replies: list[Reply[tuple[HostLayer, ...]]] = [Reply(), Reply()]
    stage.actor._pass_on(Export(KEPT, 0, 1, replies[0]))
    stage.gpu.post(Export(KEPT, 0, 1, replies[1]))
    stage.actor.abandon("lost")
    for reply in replies:
        with pytest.raises(Unavailable, match="lost"):
            await reply.wait()
