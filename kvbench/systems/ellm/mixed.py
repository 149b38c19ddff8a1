"""A mixed stream of what a serving engine asks a pool for: prompts, activations, growing and finished requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Kind = Literal["open", "act", "free", "grow", "ahead", "step", "close"]
TOKENS_PER_CHUNK = 64
PROMPT, OUTPUT = (300.0, 0.8), (100.0, 0.5)  # median tokens and sigma of the logarithm
LONGEST_PROMPT, LONGEST_OUTPUT = 1024, 256
ACT_PER_KV = 0.8  # bytes of activations to bytes of KV cache of a token, the proportion of Llama-3-8B


@dataclass(frozen=True, slots=True)
class Event:
    """``key`` names the request; ``tokens`` it has after the event, or whose activations are meant.

    ``ahead``: the next step will need room for ``tokens``; ``step``: one decode step is computed.
    """

    kind: Kind
    key: int = -1
    tokens: int = 0


def stream(steps: int, sequences: int, seed: int) -> list[Event]:
    """Return the events of ``steps`` decode steps with ``sequences`` requests running; none is left open at the end.

    A finished request is followed at once by a new one, whose prefill needs activations. ``grow`` and ``ahead`` stand
    only where a request crosses into its next chunk.
    """
    rng = np.random.default_rng(seed)
    events: list[Event] = []
    running: dict[int, list[int]] = {}  # tokens, tokens at its end
    made = 0
    for _ in range(steps):
        for key in [k for k, (tokens, end) in running.items() if tokens >= end]:
            events.append(Event("close", key))
            del running[key]
        while len(running) < sequences:
            prompt = _length(rng, PROMPT, LONGEST_PROMPT)
            running[made] = [prompt, prompt + _length(rng, OUTPUT, LONGEST_OUTPUT)]
            events += [Event("open", made, prompt), Event("act", made, prompt), Event("free", made)]
            made += 1
        for key, state in running.items():
            state[0] += 1
            if state[0] % TOKENS_PER_CHUNK == 1:
                events.append(Event("grow", key, state[0]))
        events += [
            Event("ahead", key, tokens + 1)
            for key, (tokens, end) in running.items()
            if tokens % TOKENS_PER_CHUNK == 0 and tokens < end
        ]
        events.append(Event("step"))
    return events + [Event("close", key) for key in running]


def _length(rng: np.random.Generator, law: tuple[float, float], longest: int) -> int:
    return int(np.clip(rng.lognormal(np.log(law[0]), law[1]), 8, longest))


def kv_bytes(tokens: int, chunk_bytes: int) -> int:
    """Return the bytes of the KV cache of ``tokens``."""
    return -(-tokens * chunk_bytes // TOKENS_PER_CHUNK)


def act_bytes(tokens: int, chunk_bytes: int) -> int:
    """Return the bytes of the activations of a prefill of ``tokens``."""
    return max(1, round(tokens * ACT_PER_KV * chunk_bytes / TOKENS_PER_CHUNK))


def peak_chunks(events: Sequence[Event], chunk_bytes: int) -> tuple[int, int]:
    """Return the most chunks that KV caches and that activations need at one time."""
    held: dict[int, int] = {}
    kv = act = now = 0
    for event in events:
        if event.kind in ("open", "grow"):
            chunks = -(-kv_bytes(event.tokens, chunk_bytes) // chunk_bytes)
            now += chunks - held.get(event.key, 0)
            held[event.key] = chunks
            kv = max(kv, now)
        elif event.kind == "close":
            now -= held.pop(event.key)
        elif event.kind == "act":
            act = max(act, -(-act_bytes(event.tokens, chunk_bytes) // chunk_bytes))
    return kv, act
