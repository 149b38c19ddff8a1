"""NEO's scheduler: which requests run in an iteration, in which batch, and where their KV lies.

NEO (MLSys 2025, arXiv 2411.01142), section 3.2, six steps per iteration, with the thresholds of its code:

1. two empty batches and a budget of requests and tokens;
2. near decodes to batch 0; too many of them: the latest are swapped out; else the first CPU requests are swapped in;
3. prompts, first come first served, to batch 0: near while they fit and no earlier one of the iteration went far;
4. CPU decodes: the first to batch 1, each further one to the batch with the larger slack; one that makes a slack
   negative is left out, and with it all that are as long;
5. prompts bound for host memory leave batch 0 again while the slacks and its least size allow it;
6. the same iteration without the CPU: what does more requests a second is taken.

A request's KV lies wholly near or wholly far. Everything is decided from the queues and a :class:`Cost`; no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

from kvbench.errors import KvbenchError, UsageError
from kvbench.systems.neo.halves import Cost, Job, SubBatch, spans
from kvbench.systems.neo.hide import Half

Offload = Literal["part", "none", "all"]
Order = Literal["pipelined", "near", "exposed", "simple", "symmetric"]


@dataclass(frozen=True, slots=True)
class Params:
    """Constants of the scheduler, by default those of NEO's code and its A10G configuration.

    ``near_blocks``, ``far_blocks``: what each tier holds, in blocks of ``page`` tokens. ``requests``, ``tokens``: most
    of an iteration. ``floor``: least tokens of batch 0 when prompts are taken off it. ``swap_in``: share of the near
    blocks up to which requests come back. ``offload``: ``part`` is NEO; ``none`` its GPU-only baseline, in which host
    memory only parks requests; ``all`` keeps every KV in host memory (FastDecode+). ``order``: how CPU decodes run
    beside the near side: ``pipelined``, or one of the strawmen of section 3.1, which take all of them every iteration.
    Raises UsageError for values out of range.
    """

    near_blocks: int = 1650
    far_blocks: int = 57_220
    page: int = 16
    requests: int = 1024
    tokens: int = 20_480
    floor: int = 128
    swap_in: float = 0.95
    offload: Offload = "part"
    order: Literal["pipelined", "simple", "symmetric"] = "pipelined"

    def __post_init__(self) -> None:
        for name, least in (
            ("near_blocks", 1), ("far_blocks", 0), ("page", 1), ("requests", 1), ("tokens", 1), ("floor", 0),
        ):  # fmt: skip
            if getattr(self, name) < least:
                raise UsageError("parameter", where=f"neo.{name}", got=getattr(self, name), expected=f"{least} or more")
        if not 0.0 < self.swap_in <= 1.0:
            raise UsageError("parameter", where="neo.swap_in", got=self.swap_in, expected="above 0, at most 1")
        if self.offload not in ("part", "none", "all"):
            raise UsageError("parameter", where="neo.offload", got=self.offload, expected="part, none or all")
        if self.order not in ("pipelined", "simple", "symmetric"):
            raise UsageError("parameter", where="neo.order", got=self.order, expected="pipelined, simple or symmetric")
        if self.order != "pipelined" and self.offload != "all":
            raise UsageError(
                "parameter", where="neo.order", got=f"{self.order} with offload {self.offload}",
                expected="offload all: the strawmen keep every KV in host memory",
            )  # fmt: skip
        if self.offload == "all" and not self.far_blocks:
            raise UsageError("parameter", where="neo.far_blocks", got=0, expected="1 or more with offload all")

    @property
    def near_room(self) -> int:
        """Blocks of KV that may lie near: none where all of it lies far."""
        return 0 if self.offload == "all" else self.near_blocks

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.page)


@dataclass(frozen=True, slots=True)
class Decision:
    """One iteration. ``prefills``: jobs with whether their KV goes far; ``near``: near decodes; ``far``: CPU decodes of
    batch 0 and of batch 1. ``swapped_out``, ``swapped_in``: jobs moved before it; ``dropped``: jobs whose KV was given
    up because neither tier had room to go on. ``halves``: what each half-stage of a layer takes, near and CPU.
    ``repeats``: how many iterations in a row are decided like this one while nobody arrives and nobody ends.

    ``mode`` ``pipelined``: both slacks are 0 or more. ``near``: no CPU decode runs. ``exposed``: CPU decodes run
    although they are not hidden. ``simple``, ``symmetric``: see :class:`Params`.
    """

    mode: Order
    prefills: tuple[tuple[Job, bool], ...]
    near: tuple[Job, ...]
    far: tuple[tuple[Job, ...], tuple[Job, ...]]
    halves: tuple[Half, ...]
    swapped_out: tuple[Job, ...] = ()
    swapped_in: tuple[Job, ...] = ()
    dropped: tuple[Job, ...] = ()
    repeats: int = 1

    @property
    def requests(self) -> int:
        return len(self.prefills) + len(self.near) + len(self.far[0]) + len(self.far[1])

    @property
    def layer_seconds(self) -> float:
        """Seconds of a layer: each half-stage ends with its longer side."""
        return sum(half.seconds for half in self.halves)


class Scheduler:
    """The queues and the six steps. Call :meth:`arrive` for each request, then :meth:`plan` and :meth:`done` in turns.

    ``waiting``: requests to prefill, in order; ``near``: decodes by age; ``far``: CPU decodes, those swapped out in
    front.
    """

    def __init__(self, params: Params, cost: Cost) -> None:
        self.params, self.cost = params, cost
        self.waiting: deque[Job] = deque()
        self.near: list[Job] = []
        self.far: deque[Job] = deque()
        self.near_used = self.far_used = 0  # blocks
        self._open: Decision | None = None

    def fits(self, job: Job) -> str:
        """Return why ``job`` can never be served, or nothing.

        Also what lies far in the end has to fit near: its prompt passes through there, and it may have to come back.
        """
        p = self.params
        room = min(p.near_blocks, p.far_blocks) if p.offload == "all" else p.near_blocks
        if job.prompt > p.tokens:
            return f"a prompt of {job.prompt} tokens, an iteration takes {p.tokens}; tokens={job.prompt} would admit it"
        if p.blocks(job.total) > room:
            return f"{p.blocks(job.total)} blocks of KV, there are {room}"
        return ""

    def arrive(self, job: Job) -> None:
        """Let ``job`` wait. Raises UsageError for one that can never be served (:meth:`fits`)."""
        if reason := self.fits(job):
            raise UsageError("request larger than memory", where=f"request {job.key}", got=reason)
        self.waiting.append(job)

    @property
    def idle(self) -> bool:
        """Whether no request is left."""
        return not (self.waiting or self.near or self.far)

    # -- the six steps ---------------------------------------------------------------------------------------------

    def plan(self) -> Decision | None:
        """Decide the next iteration, move what is swapped, and return it; None where no request is left.

        Raises KvbenchError while the previous iteration is not :meth:`done`.
        """
        if self._open is not None:
            raise KvbenchError("an iteration is under way", where="neo.scheduler", expected="done() before plan()")
        if self.idle:
            return None
        dropped: list[Job] = []
        out, back = self._swap(dropped)
        while (made := self._compose(self._admit(), out, back, dropped)) is None:
            if not self.far:
                raise KvbenchError("no request can go on", where="neo.scheduler", got=f"{len(self.waiting)} waiting")
            self._give_up(self.far.pop(), dropped, near=False)  # no room to grow anywhere: the youngest starts over
        self._take(made)
        made = replace(made, repeats=self._repeats(made))
        self._open = made
        return made

    def done(self, ended: Collection[int] = (), steps: int = 1) -> None:
        """Account for the iteration :meth:`plan` returned, run ``steps`` times: its tokens are cached, ``ended`` are
        the keys that leave.

        Raises KvbenchError without such an iteration, for more steps than it repeats, and for a key that was not part
        of it.
        """
        made = self._open
        if made is None:
            raise KvbenchError("no iteration to account for", where="neo.scheduler", expected="plan() before done()")
        if not 1 <= steps <= made.repeats:
            raise KvbenchError("steps", where="neo.scheduler", got=steps, expected=f"1..{made.repeats}")
        self._open = None
        gone = 0
        for job, far in made.prefills:
            job.cached = job.prompt
            (self.far if far else self.near).append(job)
            gone += job.key in ended
        for job in (*made.near, *made.far[0], *made.far[1]):
            job.cached += steps
            gone += job.key in ended
        for job in made.near if steps > 1 else ():
            grown = self.params.blocks(job.cached) - job.blocks
            job.blocks += grown
            self.near_used += grown
        if gone != len(ended):
            raise KvbenchError("ended without having run", where="neo.scheduler", got=f"{len(ended) - gone} requests")
        if gone:
            self.near_used -= sum(job.blocks for job in self.near if job.key in ended)
            self.far_used -= sum(job.blocks for job in self.far if job.key in ended)
            self.near = [job for job in self.near if job.key not in ended]
            self.far = deque(job for job in self.far if job.key not in ended)

    def _take(self, made: Decision) -> None:
        """Give the blocks the iteration writes to."""
        for job, far in made.prefills:
            self.waiting.popleft()
            job.blocks = self.params.blocks(job.prompt)
            if far:
                self.far_used += job.blocks
            else:
                self.near_used += job.blocks
        for job in made.near:
            grows = self._grows(job)
            job.blocks += grows
            self.near_used += grows
        for job in (*made.far[0], *made.far[1]):
            grows = self._grows(job)
            job.blocks += grows
            self.far_used += grows

    def _repeats(self, made: Decision) -> int:
        """Return how often in a row ``made`` is sure to be decided.

        Only near decodes without anybody who could join them: a prompt or a parked request that does not fit now fits
        even less while the others grow.
        """
        p = self.params
        alone = made.mode == "near" and not made.prefills and (p.offload == "none" or not (self.waiting or self.far))
        if not alone or made.swapped_out or made.swapped_in or made.dropped or not made.near:
            return 1
        # every request asks for one more block in any `page` steps at most
        return (p.near_room - self.near_used) // len(made.near) * p.page + 1

    def _grows(self, job: Job) -> int:
        """Return the blocks ``job`` needs further for its next token."""
        return self.params.blocks(job.cached + 1) - job.blocks

    def _swap(self, dropped: list[Job]) -> tuple[tuple[Job, ...], tuple[Job, ...]]:
        """Step 2: make the near decodes fit, or bring CPU requests back, never both."""
        p = self.params
        most = min(p.requests, p.tokens)
        need = self.near_used + sum(map(self._grows, self.near))
        out: list[Job] = []
        while self.near and (need > p.near_room or len(self.near) > most):
            job = self.near.pop()
            need -= job.blocks + self._grows(job)
            if self.far_used + job.blocks > p.far_blocks:
                self._give_up(job, dropped, near=True)
                continue
            self.near_used -= job.blocks
            self.far_used += job.blocks
            self.far.appendleft(job)
            out.append(job)
        back: list[Job] = []
        while not out and not dropped and self.far and len(self.near) < most:
            job = self.far[0]
            need += p.blocks(job.cached + 1)
            # a request alone may take the last blocks too, or one of that size could never come back
            if need > (p.swap_in * p.near_room if self.near else p.near_room):
                break
            self.far.popleft()
            self.far_used -= job.blocks
            self.near_used += job.blocks
            self.near.append(job)
            back.append(job)
        return tuple(out), tuple(back)

    def _give_up(self, job: Job, dropped: list[Job], *, near: bool) -> None:
        """Drop the KV of ``job``: its tokens are a prompt again, at the head of the queue."""
        if near:
            self.near_used -= job.blocks
        else:
            self.far_used -= job.blocks
        job.prompt, job.cached, job.blocks = job.cached + 1, 0, 0
        self.waiting.appendleft(job)
        dropped.append(job)

    def _admit(self) -> list[tuple[Job, bool]]:
        """Step 3: prompts in order of arrival, near while they fit; behind one that goes far all go far."""
        p = self.params
        if p.offload == "none" and self.far:
            return []  # parked requests come before new ones
        ids, tokens = p.requests - len(self.near), p.tokens - len(self.near)
        near_need = self.near_used + sum(map(self._grows, self.near))
        far_need, passing = self.far_used, 0
        far = p.offload == "all"
        found: list[tuple[Job, bool]] = []
        for job in self.waiting:
            need = p.blocks(job.prompt)
            # one that was dropped may have outgrown an iteration: it gets one of its own
            alone = job.prompt > p.tokens and not found and not self.near
            if ids < 1 or (job.prompt > tokens and not alone):
                break
            far = far or near_need + need > p.near_room
            if far:
                passing += need
                # all near blocks may have to be evicted; what goes far passes through one layer of near memory
                if p.offload == "none" or passing > p.near_blocks or far_need + need > p.far_blocks - p.near_room:
                    break
                far_need += need
            else:
                near_need += need
            ids, tokens = ids - 1, tokens - job.prompt
            found.append((job, far))
        return found

    def _compose(
        self, prefills: list[tuple[Job, bool]], out: tuple[Job, ...], back: tuple[Job, ...], dropped: list[Job]
    ) -> Decision | None:
        """Steps 4 to 6. None where nothing can run."""
        mode, first, second, halves = (self._all_far if self.params.offload == "all" else self._best)(prefills)
        decided = first.prefills if mode != "symmetric" else prefills
        if not decided and not first.requests and not second.requests:
            return None
        return Decision(
            mode, tuple(decided), tuple(first.near), (tuple(first.far), tuple(second.far)), halves, out, back,
            tuple(dropped),
        )  # fmt: skip

    def _best(
        self, prefills: list[tuple[Job, bool]]
    ) -> tuple[Order, SubBatch, SubBatch, tuple[Half, ...]]:  # fmt: skip
        """Steps 4 to 6 of NEO and of its GPU-only baseline."""
        alone = self._begin(prefills)
        self._trim(alone, None)
        first, second = self._begin(prefills), SubBatch(self.cost)
        if self.params.offload == "part" and first.tokens:
            self._decodes(first, second, prefills, hidden=True)
            if second.requests:
                self._trim(first, second)
                if _rate(first, second) > _rate(alone):
                    return "pipelined", first, second, spans(first, second)
        return "near", alone, SubBatch(self.cost), (Half(alone.linear + alone.attention, 0.0),)

    def _all_far(
        self, prefills: list[tuple[Job, bool]]
    ) -> tuple[Order, SubBatch, SubBatch, tuple[Half, ...]]:  # fmt: skip
        """Return the iteration in which every CPU decode runs that the budget and host memory have room for."""
        order = self.params.order
        first, second = self._begin(prefills if order != "symmetric" else []), SubBatch(self.cost)
        self._decodes(first, second, prefills, hidden=False)
        if order == "simple":
            return order, first, second, (Half(first.linear + first.attention, 0.0), Half(0.0, first.cpu))
        halves = spans(first, second)
        if order == "symmetric":
            prompts = self._begin(prefills)
            return order, first, second, (Half(prompts.linear + prompts.attention, 0.0), *halves)
        return "pipelined" if all(half.holds for half in halves) else "exposed", first, second, halves

    def _begin(self, prefills: list[tuple[Job, bool]]) -> SubBatch:
        """Steps 1 to 3: batch 0 with the near decodes and the prompts."""
        first = SubBatch(self.cost)
        for job in self.near:
            first.add_near(job)
        for job, far in prefills:
            first.add_prefill(job, far)
        return first

    def _decodes(
        self, first: SubBatch, second: SubBatch, prefills: list[tuple[Job, bool]], *, hidden: bool
    ) -> None:  # fmt: skip
        """Step 4: CPU decodes to the batch with the larger slack; ``hidden``: only those no slack suffers from.

        Simple offloading has one batch, symmetric pipelining deals them out in turns.
        """
        p = self.params
        ids = p.requests - len(self.near) - len(prefills)
        tokens = p.tokens - len(self.near) - sum(job.prompt for job, _ in prefills)
        room = p.far_blocks - self.far_used - sum(p.blocks(job.prompt) for job, far in prefills if far)
        shortest: int | None = None  # of those that were too long
        chosen = first if p.order == "simple" else second
        for job in self.far:
            if shortest is not None and job.cached >= shortest:
                continue
            if ids < 1 or tokens < 1:
                break
            grows = self._grows(job)
            if grows > room:
                continue
            chosen.add_far(job)
            ids, tokens, room = ids - 1, tokens - 1, room - grows
            if p.order == "symmetric":
                chosen = first if chosen is second else second
            elif p.order == "pipelined":
                long, short = spans(first, second)
                if hidden and not (long.holds and short.holds):
                    chosen.pop_far()
                    ids, tokens, room = ids + 1, tokens + 1, room + grows
                    shortest = job.cached
                    continue
                chosen = first if short.slack > long.slack else second

    def _trim(self, first: SubBatch, second: SubBatch | None) -> None:
        """Step 5: take prompts bound for host memory off while the slacks and the least size allow it."""
        while first.prefills and first.prefills[-1][1]:
            job, far = first.pop_prefill()
            if first.tokens < self.params.floor or not (
                second is None or all(half.holds for half in spans(first, second))
            ):
                first.add_prefill(job, far)
                return


def _rate(first: SubBatch, second: SubBatch | None = None) -> float:
    """Return requests a second of near time, a layer: the slacks see to it that the CPU adds none."""
    seconds = first.linear + first.attention + (second.linear + second.attention if second is not None else 0.0)
    requests = first.requests + (second.requests if second is not None else 0)
    return requests / seconds if seconds > 0.0 else 0.0
