"""How many tokens of KV a policy may use of a tier: what is given, as far as the machine holds it."""

from __future__ import annotations

from typing import Literal

from kvbench.errors import UsageError
from kvbench.replay.costs import Costs


def capacity(costs: Costs, tier: Literal["near", "far"], given: int | None, policy: str) -> int:
    """Return ``given`` tokens of ``tier``; what the machine leaves for None.

    Raises UsageError for more than that: such memory is not there.
    """
    held = costs.near_tokens if tier == "near" else costs.far_tokens
    if given is None:
        return held
    if given > held:
        number = "memory" if tier == "near" else "host_memory"
        raise UsageError(
            "more KV than the machine holds", where=f"policy {policy}, {tier}_tokens", got=given,
            expected=f"at most {held}, what {costs.machine.name} leaves for {costs.shape.name}",
            mend=f"give fewer, or take a machine with more {number}",
        )  # fmt: skip
    return given
