"""Documents with questions: LooGLE, NarrativeQA, and ReviewMT's dialogues about one paper each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from kvbench.replay.generate.laws import Arrivals, Lengths, shares, stream
from kvbench.replay.generate.prefixes import Chain, Documents, Ids, shared_prefix
from kvbench.replay.request import Request

Distance = Literal["min", "shuffle", "max"]
DISTANCES: tuple[Distance, ...] = get_args(Distance)


@dataclass(frozen=True, slots=True)
class DocumentLaw:
    """What a dataset of documents and questions looks like.

    ``documents`` and ``questions`` of the dataset give how many questions a document gets; a trace of another length
    has documents in this proportion. ``input_mean`` and ``output_mean`` are tokens of a request. Not published and so
    ours: ``question_mean``, and the sigmas of the lognormal laws. ``dialogue``: each question comes with the ones
    before it and their answers.
    """

    documents: int
    questions: int
    input_mean: float
    output_mean: float
    question_mean: float
    document_sigma: float
    output_sigma: float
    dialogue: bool = False


def order(counts: list[int], distance: Distance, rng: np.random.Generator) -> np.ndarray:
    """Return which document each request asks: all its questions in a row (min), each document once before any comes
    back (max), or at random (shuffle); Strata, section 5.3."""
    owners = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    if distance == "min":
        return owners
    if distance == "shuffle":
        return rng.permutation(owners)
    turns = np.concatenate([np.arange(count, dtype=np.int32) for count in counts])
    return owners[np.lexsort((owners, turns))]


def documents(
    law: DocumentLaw, count: int, arrivals: Arrivals, seed: int, block_tokens: int, distance: Distance
) -> Iterator[Request]:  # fmt: skip
    """Yield ``count`` requests about the documents of ``law``; a session is a document."""
    number = max(1, round(count * law.documents / law.questions))
    counts = list(shares(count, number, stream(seed, "questions")))
    output = Lengths(law.output_mean, law.output_sigma)
    asked = Lengths(law.question_mean, 0.5)
    mean = law.input_mean - law.question_mean
    if law.dialogue:
        before = sum(each * (each - 1) // 2 for each in counts) / count
        mean -= before * (law.question_mean + law.output_mean)
    lengths = Lengths(max(1.0, mean), law.document_sigma).spread(number, stream(seed, "documents"))
    asks = order(counts, distance, stream(seed, "order"))
    times = arrivals.times(stream(seed, "arrivals"))
    questions, outputs = asked.draws(stream(seed, "asked")), output.draws(stream(seed, "outputs"))
    ids = Ids()
    held = Documents(lengths, block_tokens, ids)
    chains: dict[int, Chain] = {}
    last: dict[int, int] = {}
    left = counts
    for i, (document, at, new, out) in enumerate(zip(asks.tolist(), times, questions, outputs, strict=False)):
        if not law.dialogue:
            inputs = lengths[document] + new
            yield Request(i, at, inputs, out, document, None, block_tokens, held.request(document, inputs))
            continue
        chain = chains.get(document)
        if chain is None:
            begins = shared_prefix(lengths[document], block_tokens, ids)
            chain = chains[document] = Chain(begins, lengths[document], block_tokens, ids)
        inputs, names = chain.turn(new, out)
        yield Request(i, at, inputs, out, document, last.get(document), block_tokens, names)
        last[document] = i
        left[document] -= 1
        if not left[document]:
            del chains[document], last[document]
