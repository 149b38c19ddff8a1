"""Lengths of a batch's sequences: equal, as NEO's profiler takes them, and skewed, as traffic has them."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from kvbench.errors import UsageError

Skew = Literal["equal", "tail", "one_long"]
SKEWS: tuple[Skew, ...] = get_args(Skew)
LONG_SHARE = 0.8  # of all tokens: one sequence of 16k beside 15 of 256 has 0.81
SIGMA = 1.2  # of the logarithm: the longest of 16 then has about a third of all tokens


def lengths(skew: str, requests: int, tokens: int, seed: int = 0) -> list[int]:
    """Return the tokens of ``requests`` sequences, in no particular order, ``tokens`` in all and each at least 1.

    ``equal``; ``tail``: log-normal; ``one_long``: one sequence has four fifths of all. Raises UsageError for another
    word or fewer tokens than requests.
    """
    if skew not in SKEWS or not 1 <= requests <= tokens:
        raise UsageError(
            "lengths", where="neo.lengths", got=f"{skew}, {requests} requests, {tokens} tokens",
            expected=f"{', '.join(SKEWS)}; at least a token each",
        )  # fmt: skip
    if skew == "equal":
        weights = np.ones(requests)
    elif skew == "tail":
        # quantiles, not draws: the skew is the same in every run, only the order is random
        from scipy.special import ndtri

        weights = np.exp(SIGMA * ndtri((np.arange(requests) + 0.5) / requests))
    else:
        rest = (1.0 - LONG_SHARE) / max(1, requests - 1)
        weights = np.full(requests, rest)
        weights[0] = LONG_SHARE
    spare = tokens - requests
    shares = np.floor(weights / weights.sum() * spare).astype(np.int64) + 1
    shares[np.argsort(-weights, kind="stable")[: tokens - int(shares.sum())]] += 1
    found = np.random.default_rng(seed).permutation(shares)
    return [int(n) for n in found]
