"""Traps of the host that came with the GPU's: order, drift, tools, nodes."""

from __future__ import annotations

from kvbench.timing.traps import nodes, order
from kvbench.timing.traps.record import Trap
from kvbench.timing.traps.words import BUG, QUIET

MORE_TRAPS: tuple[Trap, ...] = (
    Trap("T13", "clocks or neighbours change while samples are taken", "the median is of no state that lasts", QUIET,
         lambda: order.drift()),
    Trap("T14", "throttled throughout, or no sample left", "a disturbed run passes for a good one", BUG,
         lambda: order.nothing_left()),
    Trap("T21", "a candidate that does nothing finds the old result", "work not done has the best number", BUG,
         lambda: order.lazy_candidate()),
    Trap("T22", "a profiler or tracer is attached", "every call it watches takes some 10 us longer",
         "end the tool, or measure without it", lambda: order.tools()),
    Trap("T28", "memory of another NUMA node is measured as local", "rates are 3 to 5 x too low, or labels are swapped",
         "numactl --hardware shows the nodes; report it with this output", lambda: nodes.remote_memory()),
    Trap("T30", "everything lies on node 0", "remote memory is measured in the name of local",
         "let this process call mbind (a container's filter may refuse it)", lambda: nodes.bound_memory()),
    Trap("T58", "the order of two pieces of work decides", "a warm or late place is taken for a difference", BUG,
         lambda: order.turns()),
)  # fmt: skip
