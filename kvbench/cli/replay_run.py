"""Replays one after the other in this process: nothing is timed, so there is no worker, no canary and no lock."""

from __future__ import annotations

import time

from kvbench.contract.axis import PROFILES, Profile
from kvbench.contract.result import Result, RunInfo
from kvbench.runner import Runner
from kvbench.worker_handle import Stopped

REDRAWN_S = 0.2


class ReplayRunner(Runner):
    """A :class:`Runner` whose cases are replays. Each is committed before the next one starts; a signal stops within
    one, and what was finished stays."""

    def _one(self, run: RunInfo, seconds: float, done: set[str], rows: list[Result]) -> None:
        from kvbench.context import Context
        from kvbench.replay.watch import watching
        from kvbench.worker import measure_case

        profile: Profile = next(p for p in PROFILES if p == run.profile)
        context = Context.create(profile=profile, scratch=None, seed=run.seed)
        todo = [planned for planned in run.plan if planned.digest not in done]
        total, begun = len(run.plan), time.monotonic()
        for position, planned in enumerate(todo):
            member = self._suites.find(planned.suite, planned.bench)
            finished = total - len(todo) + position
            text = f"{planned.axes['policy']} {_rate(planned.axes['rate_milli'])}"
            pace = (time.monotonic() - begun) / position if position else seconds / max(1, len(todo))
            drawn = 0.0

            def told(
                number: int, text: str = text, finished: int = finished, left: float = pace * (len(todo) - position)
            ) -> None:
                nonlocal drawn
                if self._stop():
                    # no Exception: measure_case would make a failed row of it, and this case was not replayed
                    raise KeyboardInterrupt
                if time.monotonic() - drawn > REDRAWN_S:
                    drawn = time.monotonic()
                    self._ui.case(finished, total, f"{text} request {number}" if number > 0 else text, left)

            try:
                told(0)
                with watching(told):
                    found = measure_case(member, dict(planned.axes), context)
            except KeyboardInterrupt:
                raise Stopped from None
            for sink in self._sinks:
                sink.add_results(run.uuid, found, len(done) + position)
            rows.extend(found)
            self._ui.stored(finished + 1, total, f"{text} {planned.axes['params']}", found[0])


def _rate(milli: object) -> str:
    return f"at {milli / 1e3:g}/s" if isinstance(milli, int) and milli else "at its own rate"
