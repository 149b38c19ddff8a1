"""The queue of a layer-wise overlap on a GPU: an event set a pass, a side stream, and waits between the streams.

Strata, OSDI 2026, section 4, in the form of SGLang's HiCache controller: a start event on the caller's stream, the side
stream waits for it; for each layer the copy and that layer's event; the computation of layer l waits on event l in its
own stream. No host synchronisation. Event sets rotate, and a set is used again only when its finish event is reached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from kvbench.errors import KvbenchError, UsageError
from kvbench.memory.cuda.device import Device, Event, Stream
from kvbench.memory.cuda.entries import CONSTANTS
from kvbench.systems.strata.overlap import Pass, Recorder, Schedule, Words
from kvbench.transport.gpu_pieces import Mover

Enter = Callable[[AbstractContextManager[Any]], Any]
Submit = Callable[[Stream], None]
SETS = 3  # of events: a pass may be queued while two before it are still under way (LayerDoneCounter.num_counters)


class EventSet:
    """What one pass under way needs: its start, begin and end of every load and computation, and its finish."""

    def __init__(self, device: Device, loads: int, computes: int, enter: Enter) -> None:
        self.start, self.finish = (enter(Event(device)) for _ in range(2))
        pair = [tuple(enter(Event(device)) for _ in range(2)) for _ in range(loads + computes)]
        self.loads, self.computes = pair[:loads], pair[loads:]
        self.used = False

    def require_free(self, device: Device) -> None:
        """Raise KvbenchError when the pass that used this set last is still under way.

        Its events would be recorded anew, and a wait for the old pass would be a wait for this one.
        """
        if not self.used:
            return
        code = device.driver.code("cuEventQuery", self.finish.handle)
        if code == CONSTANTS["CUDA_ERROR_NOT_READY"]:
            raise KvbenchError(
                "the event set is still in use", where="overlap", got=f"{SETS} passes under way",
                mend="wait for the oldest pass before queuing another",
            )  # fmt: skip
        if code:
            raise device.driver.error("cuEventQuery", code)


class Layers:
    """Queues passes: ``copies[l]`` brings layer l in, ``computes[l]`` works on it; events and side stream go with
    ``enter``.

    ``ahead``: how many loads are queued before the computation they run beside; None: all of them before the first
    computation, as HiCache does, which is right where a load is one call and too late where it is many.
    """

    def __init__(
        self, device: Device, copies: Sequence[Mover], computes: Sequence[Submit], enter: Enter,
        ahead: int | None = None,
    ) -> None:  # fmt: skip
        if len(copies) != len(computes) or not copies:
            raise UsageError("layers", where="overlap", got=f"{len(copies)} copies, {len(computes)} computations")
        self.device, self.copies, self.computes = device, list(copies), list(computes)
        self.layers = len(copies)
        self.ahead = self.layers if ahead is None else ahead
        self.side: Stream = enter(Stream(device))
        self._sets = [EventSet(device, self.layers, self.layers, enter) for _ in range(SETS)]
        self._next = 0

    def submit(self, stream: Stream, schedule: Schedule | None = None, recorder: Recorder | None = None) -> EventSet:
        """Queue one pass by ``schedule`` (default: layer-wise) and return its events; never waits for the device.

        Raises KvbenchError when three passes are already under way, UsageError for a schedule in which a computation
        waits for an event that is not queued yet: to CUDA such an event has happened, so it would not wait at all.
        """
        chosen = Schedule.layerwise(self.layers) if schedule is None else schedule
        events = self._sets[self._next]
        events.require_free(self.device)
        self._next = (self._next + 1) % SETS
        stream.record(events.start)
        self.side.wait(events.start)
        computed = 0
        for layer, copy in enumerate(self.copies):
            held = chosen.holds[layer]
            while computed <= held or (computed < layer - self.ahead and chosen.waits[computed] < layer):
                self._compute(stream, events, chosen, computed, layer)
                computed += 1
            if held >= 0:
                self.side.wait(events.computes[held][1])
            begin, end = events.loads[layer]
            self.side.record(begin)
            copy.submit(self.side)
            self.side.record(end)
        if recorder is not None:
            recorder.mark("loads queued")
        for layer in range(computed, self.layers):
            self._compute(stream, events, chosen, layer, self.layers)
        stream.wait(events.loads[-1][1])  # the caller's stream has the whole cache when it goes on
        stream.record(events.finish)
        events.used = True
        if recorder is not None:
            recorder.mark("computations queued")
        return events

    def _compute(self, stream: Stream, events: EventSet, schedule: Schedule, layer: int, loaded: int) -> None:
        awaited = schedule.waits[layer]
        if awaited >= loaded:
            raise UsageError(
                "a wait for a load that is not queued yet would not wait", where=f"overlap layer {layer}",
                got=f"layer {awaited} of {loaded} queued", expected="a load that is held back by no later layer",
            )  # fmt: skip
        if awaited >= 0:
            stream.wait(events.loads[awaited][1])
        begin, end = events.computes[layer]
        stream.record(begin)
        self.computes[layer](stream)
        stream.record(end)

    def free(self, stream: Stream, loads: Sequence[int], computes: Sequence[int], events: EventSet) -> None:
        """Queue those loads and computations beside each other, nothing waiting for anything but the start."""
        stream.record(events.start)
        self.side.wait(events.start)
        for place in range(max(len(loads), len(computes))):  # in turns, so that neither queue runs dry first
            for run, on, pairs, work in (
                (loads, self.side, events.loads, [copy.submit for copy in self.copies]),
                (computes, stream, events.computes, self.computes),
            ):
                if place < len(run):
                    on.record(pairs[place][0])
                    work[run[place]](on)
                    on.record(pairs[place][1])
        self.side.record(events.finish)
        stream.wait(events.finish)
        stream.record(events.finish)


def stamps(events: EventSet, loads: int, computes: int) -> Pass:
    """Return begin and end of every piece of work in nanoseconds since the start of a pass that is done."""

    def table(pairs: Sequence[tuple[Event, ...]], count: int) -> Words:
        rows = [[round(event.since(events.start) * 1e9) for event in pair] for pair in pairs[:count]]
        return np.array(rows, np.int64).reshape(-1, 2)

    return Pass(events.finish.since(events.start), table(events.loads, loads), table(events.computes, computes))
