"""When KV is copied to the far tier: on eviction, on its first use, or once it has been used often enough.

After Strata (OSDI 2026, section 4.1) and SGLang's HiCache controller: write_back writes when a page leaves the near
tier, which then waits for the write; write_through writes at once (threshold 1); write_through_selective once a page
has been used ``threshold`` times (2 in the paper), so that what is never asked for again is never written. What has no
copy when it leaves under the last two is lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from kvbench.errors import UsageError

WritePolicy = Literal["write_back", "write_through", "write_through_selective"]
POLICIES: tuple[WritePolicy, ...] = get_args(WritePolicy)


@dataclass(frozen=True, slots=True)
class Writes:
    """A write policy; ``threshold`` is the number of uses that write_through_selective waits for.

    Raises UsageError for an unknown policy or a threshold below 1.
    """

    policy: WritePolicy = "write_through_selective"
    threshold: int = 2

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            expected = f"one of {', '.join(POLICIES)}"
            raise UsageError("unknown write policy", where="strata", got=self.policy, expected=expected)
        if self.threshold < 1:
            raise UsageError("write threshold", where="strata", got=self.threshold, expected="1 use or more")

    def after_use(self, uses: int, backed: bool) -> bool:
        """Return whether KV used ``uses`` times is written now, in the background."""
        if backed or self.policy == "write_back":
            return False
        return uses >= (1 if self.policy == "write_through" else self.threshold)

    def at_eviction(self, backed: bool) -> bool:
        """Return whether KV that leaves the near tier is written first, and the eviction waits for it."""
        return self.policy == "write_back" and not backed
