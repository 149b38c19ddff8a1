"""Parameters of the eLLM policies: vLLM's rules, the CPU buffer and its controller, and how mapping is hidden.

What the paper leaves open is a parameter here: chunk size, victims and order of the buffer, its size, the update law,
what counts as unloaded.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvbench.errors import UsageError

WHERE = "eLLM policy"
BUFFER_GB = 64.0


@dataclass(frozen=True, slots=True)
class EngineParams:
    """What both policies have.

    ``context``: longest context in tokens, for which an isolated engine reserves. ``chunk``: tokens of an iteration
    with chunked prefill, 0: whole prompts, up to ``batched`` tokens together (0: vLLM 0.5.5's max(context, 2048)).
    ``sequences`` run at most; ``watermark``: share of memory kept free when a prompt is admitted.
    ``tokens_per_chunk``: tokens of the smallest piece of KV memory, 0: what a mapping chunk of the machine holds
    (isolated pools: a page of 16 tokens).

    ``cpu_buffer``: prompts without room leave to host memory: ``buffer_gb`` (10^9 bytes; the default at most what
    the host has, another size has to be there),
    ``victims`` newest or longest, ``order`` of return oldest or shortest, ``size`` the share of it used at first.
    ``controller``: that share follows violations of the objectives, ``slo`` times the unloaded TTFT of a prompt of
    ``slo_prompt`` tokens and the unloaded TPOT: ``threshold`` of the last ``window`` iterations, by ``alpha`` and
    ``law`` (:class:`kvbench.systems.ellm.slo.Params`). Raises UsageError for values out of range.
    """

    context: int = 32_768
    chunk: int = 0
    batched: int = 0
    sequences: int = 256
    watermark: float = 0.01
    tokens_per_chunk: int = 0
    cpu_buffer: bool = False
    buffer_gb: float = BUFFER_GB
    victims: str = "newest"
    order: str = "oldest"
    size: float = 1.0
    controller: bool = False
    slo: float = 25.0
    slo_prompt: int = 2048
    window: int = 5
    threshold: int = 3
    alpha: float = 2.0
    law: str = "multiply"

    def __post_init__(self) -> None:
        wrong = {
            "context": self.context < 2, "chunk": self.chunk < 0, "batched": self.batched < 0,
            "sequences": self.sequences < 1, "watermark": not 0.0 <= self.watermark < 1.0,
            "tokens_per_chunk": self.tokens_per_chunk < 0, "buffer_gb": not 0.0 < self.buffer_gb < 1e9,
            "size": not 0.0 < self.size <= 1.0, "slo": not 0.0 < self.slo < 1e9,
            "slo_prompt": not 1 <= self.slo_prompt < self.context,
            "controller": self.controller and not self.cpu_buffer, "cpu_buffer": self.cpu_buffer and self.chunk > 0,
        }  # fmt: skip
        for name, bad in wrong.items():
            if bad:
                raise UsageError(
                    f"{name} out of range", where=WHERE, got=getattr(self, name),
                    expected="context > slo_prompt >= 1; sequences, slo, buffer_gb above 0; 0 <= watermark < 1; "
                    "0 < size <= 1; a controller only with a cpu_buffer, that only with whole prompts (chunk 0)",
                )  # fmt: skip


@dataclass(frozen=True, slots=True)
class IsolatedParams(EngineParams):
    """Two static pools: activations of the longest prefill are set aside for good (vLLM 0.5.5)."""


@dataclass(frozen=True, slots=True)
class ElasticParams(EngineParams):
    """One pool. ``premap``: chunks of the next decode step are mapped beside this one. ``alias``: the old mapping of a
    chunk is taken away in the background (section 3.1)."""

    cpu_buffer: bool = True
    controller: bool = True
    size: float = field(default=0.25)
    premap: bool = True
    alias: bool = True
