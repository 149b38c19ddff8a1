"""Small traces in each format, made from one list of requests."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta

from kvbench.replay.request import Request, blocks_of
from kvbench.replay.traces.write import line_of

BLOCKS = {"mooncake": 512, "bailian": 16, "kvbench": 64}


def requests(number: int = 6, block: int | None = None, gap: float = 0.5) -> list[Request]:
    """Return turns of two sessions, each of which begins with the one before."""
    found = []
    for i in range(number):
        session, turn = i % 2, i // 2
        tokens = 100 + 700 * turn + i
        names = None if block is None else tuple(range(session * 10_000, session * 10_000 + blocks_of(tokens, block)))
        found.append(Request(
            i, i * gap, tokens, 10 + i, session, i - 2 if i >= 2 else None, None if names is None else block, names,
        ))  # fmt: skip
    return found


def mooncake(rows: Sequence[Request]) -> list[str]:
    return [
        json.dumps({
            "timestamp": round(r.arrival * 1000), "input_length": r.input_tokens, "output_length": r.output_tokens,
            "hash_ids": list(r.hash_ids or ()),
        }) for r in rows
    ]  # fmt: skip


def bailian(rows: Sequence[Request]) -> list[str]:
    return [
        json.dumps({
            "chat_id": 1000 + r.id, "parent_chat_id": -1 if r.parent is None else 1000 + r.parent, "type": "text",
            "timestamp": 5.0 + r.arrival, "input_length": r.input_tokens, "output_length": r.output_tokens, "turn": 1,
            "hash_ids": list(r.hash_ids or ()),
        }) for r in rows
    ]  # fmt: skip


def burstgpt(rows: Sequence[Request]) -> list[str]:
    head = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type,Session ID"
    return [
        head,
        *(
            f"{5 + r.arrival},ChatGPT,{r.input_tokens},{r.output_tokens},{r.total_tokens},Conversation log,s{r.session}"
            for r in rows
        ),
    ]


def azure(rows: Sequence[Request]) -> list[str]:
    begin = datetime(2023, 11, 16, 18, 15, 46)  # noqa: DTZ001 (the files have no zone)
    times = [(begin + timedelta(seconds=r.arrival)).strftime("%Y-%m-%d %H:%M:%S.%f") + "0" for r in rows]
    body = [f"{at},{r.input_tokens},{r.output_tokens}" for at, r in zip(times, rows, strict=True)]
    return ["TIMESTAMP,ContextTokens,GeneratedTokens", *body]


def kvbench(rows: Sequence[Request]) -> list[str]:
    return [line_of(r) for r in rows]


SAMPLES: dict[str, Callable[[Sequence[Request]], list[str]]] = {
    "mooncake": mooncake, "bailian": bailian, "burstgpt": burstgpt, "azure": azure, "kvbench": kvbench,
}  # fmt: skip


def text(name: str, rows: Sequence[Request]) -> str:
    """Return the file ``rows`` make in the format ``name``."""
    return "\n".join(SAMPLES[name](rows)) + "\n"
