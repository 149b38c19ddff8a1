"""Seconds of what a policy can ask a machine to do for a model: stages of a layer, transfers, remapping.

A stage takes the longer of its arithmetic at the machine's FLOP rate and its bytes at the memory's rate (a roofline),
or what NEO's cost tables say where they are given. **All times are those of one layer**, except :meth:`Costs.head`,
``launch`` and remapping; ``Phase.repeat`` counts layers. Stages of one batch follow each other, so their seconds add.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from kvbench.errors import NoData, UsageError
from kvbench.replay.contention import NO_SOURCE, Contention
from kvbench.replay.machine import Machine
from kvbench.replay.models import ELEMENT, token_bytes, weight_bytes
from kvbench.replay.protocol import Phase

if TYPE_CHECKING:
    from kvbench.model.layers import LayerShape
    from kvbench.systems.neo.costs import Estimate, Tables

Transport = Literal["ce", "batch", "sm", "ideal"]
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)
OUTPUT = 4  # bytes of an element of attention output that comes back from the CPU: float32, as NEO's code has it
MEMO = 1 << 16  # answers of the tables kept


class Work(NamedTuple):
    """Seconds of the near side, one stage after the other: those bound by arithmetic and those bound by memory."""

    compute: float
    hbm: float

    @property
    def seconds(self) -> float:
        """Seconds of all stages."""
        return self.compute + self.hbm

    def then(self, other: Work) -> Work:
        """Return both, one after the other."""
        return Work(self.compute + other.compute, self.hbm + other.hbm)


NOTHING = Work(0.0, 0.0)


class Costs:
    """What ``shape`` costs on ``machine``. ``contention``: how resources disturb each other, as measured or as none.

    ``tables``: NEO's tables of this model, which then answer for linear operations, attention and the CPU. What lies
    outside their grids is extrapolated and named in ``notes``. Raises UsageError when the weights do not fit, or the
    tables are another model's.
    """

    def __init__(
        self, machine: Machine, shape: LayerShape, *, contention: Contention | None = None,
        tables: Tables | None = None,
    ) -> None:  # fmt: skip
        if tables is not None and tables.model != shape.name:
            raise UsageError("tables of another model", where="costs", got=tables.model, expected=shape.name)
        self.machine, self.shape, self.tables = machine, shape, tables
        self.contention = contention or Contention(
            link_duplex=machine["link_duplex"],
            sources={
                "compute_link": NO_SOURCE, "hbm_link": NO_SOURCE, "cpu_link": NO_SOURCE,
                "link_duplex": machine.numbers["link_duplex"].source,
            },
        )  # fmt: skip
        n = machine.devices
        self.layers = shape.layers
        self.token_bytes = token_bytes(shape)
        self.layer_token_bytes = shape.kv_bytes(1, ELEMENT)
        self.weight_bytes = weight_bytes(shape)
        self.launch = machine["launch"] if tables is None else tables.lnch
        self.notes: dict[str, None] = {}
        self._flops = n * machine["flops"] * machine["flops_share"]
        self._attention_flops = n * machine["flops"] * machine["attention_share"]
        self._hbm = n * machine["hbm"] * machine["hbm_share"]
        self._cpu = machine["host_bandwidth"] * machine["cpu_share"]
        self._cpu_flops = machine["cpu_flops"]
        self._in, self._out = n * machine["link_in"], n * machine["link_out"]
        self._sm, self._direct = n * machine["sm_copy"], n * machine["direct_read"]
        self._calls = {"ce": machine["ce_call"], "batch": machine["batch_call"]}
        self._layer_weights = ELEMENT * shape.layer_weights
        self._memo: dict[tuple[str, int, int], float] = {}
        #: bytes of near memory for KV (and whatever else a policy puts there): what the reserve and weights leave
        self.near_bytes = int(n * machine["memory"] * (1.0 - machine["reserve_share"])) - self.weight_bytes
        self.far_bytes = int(machine["host_memory"])
        if self.near_bytes < self.token_bytes:
            raise UsageError(
                "the model leaves no memory for KV", where=f"machine {machine.name}",
                got=f"{shape.name} with {self.weight_bytes / 1e9:.1f} GB of weights",
                expected=f"less than {n * machine['memory'] / 1e9:.0f} GB less a reserve of "
                f"{machine['reserve_share']:.0%}", mend="take a smaller model or more devices",
            )  # fmt: skip

    @property
    def near_tokens(self) -> int:
        """Tokens of KV the near side holds."""
        return self.near_bytes // self.token_bytes

    @property
    def far_tokens(self) -> int:
        """Tokens of KV the far side holds."""
        return self.far_bytes // self.token_bytes

    # -- stages of one layer ---------------------------------------------------------------------------------------

    def linear(self, tokens: int) -> Work:
        """Return projections and MLP of one layer over ``tokens`` tokens."""
        if tokens <= 0:
            return NOTHING
        if self.tables is not None:
            return Work(self._line("linr", tokens), 0.0)
        flops = 2.0 * self.shape.layer_weights * tokens
        return _bound(flops / self._flops, self._layer_weights / self._hbm)

    def prefill_attention(self, new: int, context: int) -> Work:
        """Return causal attention of ``new`` tokens over ``context`` earlier ones and themselves, one layer."""
        if new <= 0:
            return NOTHING
        if self.tables is not None:
            return Work(max(0.0, self._line("pref", context + new) - self._line("pref", context)), 0.0)
        pairs = new * context + new * (new + 1) / 2
        kv = (context + new) * self.layer_token_bytes
        return _bound(self.attention_compute(pairs), self.near_seconds(kv))

    def decode_attention(self, requests: int, kv_tokens: int) -> Work:
        """Return attention of one token of each of ``requests`` over ``kv_tokens`` in all, KV near, one layer."""
        if requests <= 0 or kv_tokens <= 0:
            return NOTHING
        if self.tables is not None:
            return Work(0.0, self._line("gdec", kv_tokens))
        nbytes = kv_tokens * self.layer_token_bytes
        return _bound(self.attention_compute(kv_tokens), self.near_seconds(nbytes))

    def cpu_attention(self, requests: int, kv_tokens: int) -> float:
        """Return seconds of decode attention on the CPU, KV far, one layer; without :attr:`launch`."""
        if requests <= 0 or kv_tokens <= 0:
            return 0.0
        if self.tables is not None:
            return self._answer("cdec", requests, kv_tokens)
        flops = 4.0 * self.shape.attended * kv_tokens
        return max(flops / self._cpu_flops, kv_tokens * self.layer_token_bytes / self._cpu)

    def attention_compute(self, pairs: float) -> float:
        """Return seconds of the arithmetic of attention alone over ``pairs`` of a query and a key, one layer."""
        return 4.0 * self.shape.attended * pairs / self._attention_flops

    def near_seconds(self, nbytes: float) -> float:
        """Return seconds in which near memory reads or writes ``nbytes``."""
        return nbytes / self._hbm

    def head(self, rows: int) -> Work:
        """Return the output head over ``rows`` tokens, once an iteration."""
        if rows <= 0:
            return NOTHING
        elements = self.shape.vocab * self.shape.hidden
        return _bound(2.0 * elements * rows / self._flops, ELEMENT * elements / self._hbm)

    def layer(
        self, prefill: Iterable[tuple[int, int]] = (), requests: int = 0, kv_tokens: int = 0, also: int = 0
    ) -> Work:
        """Return one layer of a batch: ``prefill`` pairs of (new, context), and decodes with KV near.

        ``also``: further tokens in the linear operations only (decodes whose attention is elsewhere).
        """
        tokens, attention = requests + also, self.decode_attention(requests, kv_tokens)
        for new, context in prefill:
            tokens += new
            attention = attention.then(self.prefill_attention(new, context))
        return self.linear(tokens).then(attention)

    def iteration(
        self, prefill: Iterable[tuple[int, int]] = (), requests: int = 0, kv_tokens: int = 0, *, also: int = 0,
        link_in: float = 0.0, link_out: float = 0.0, until: float = 0.0,
    ) -> tuple[Phase, ...]:  # fmt: skip
        """Return the phases of a whole iteration: all layers, then the head over one row a request.

        ``kv_tokens`` counts the token being decoded. ``link_in``, ``link_out``: seconds a layer beside the computation;
        ``until`` belongs to the layers.
        """
        chunks = list(prefill)
        work = self.layer(chunks, requests, kv_tokens, also)
        return (
            self.phase(work, repeat=self.layers, link_in=link_in, link_out=link_out, until=until),
            self.phase(self.head(len(chunks) + requests + also)),
        )

    @staticmethod
    def phase(
        work: Work = NOTHING, *, repeat: int = 1, link_in: float = 0.0, link_out: float = 0.0, cpu: float = 0.0,
        serial: float = 0.0, until: float = 0.0,
    ) -> Phase:  # fmt: skip
        """Return a phase in which ``work`` runs beside the other resources.

        All of its seconds stand under the resource that bounds the larger part of them: that one's contention holds.
        """
        seconds = work.compute + work.hbm
        if work.compute >= work.hbm:
            return Phase(seconds, 0.0, link_in, link_out, cpu, serial, until, repeat)
        return Phase(0.0, seconds, link_in, link_out, cpu, serial, until, repeat)

    # -- the link --------------------------------------------------------------------------------------------------

    def load(self, tokens: int, fragment_bytes: int | None = None, transport: Transport = "sm") -> float:
        """Return seconds to bring one layer's KV of ``tokens`` tokens from far to near.

        ``fragment_bytes``: what is contiguous on both sides (None: everything). ``ce`` and ``batch`` pay a fixed time a
        fragment (Strata's law S / (c + S/B)), ``sm`` has a rate of its own and none, ``ideal`` is the link's rate.
        """
        return self._moved(tokens, fragment_bytes, transport, self._in)

    def evict(self, tokens: int, fragment_bytes: int | None = None, transport: Transport = "sm") -> float:
        """Return seconds to bring one layer's KV of ``tokens`` tokens from near to far; see :meth:`load`."""
        return self._moved(tokens, fragment_bytes, transport, self._out)

    def read_in_place(self, tokens: int) -> float:
        """Return link seconds of reading one layer's KV of ``tokens`` tokens where it lies, each byte once."""
        return max(tokens, 0) * self.layer_token_bytes / min(self._in, self._direct)

    def ship(self, requests: int) -> tuple[float, float]:
        """Return link seconds of one layer's CPU decodes: outputs in (fp32), and q, k, v of a token out."""
        out = ELEMENT * max(requests, 0) * self.shape.qkv
        return OUTPUT * max(requests, 0) * self.shape.attended / self._in, out / self._out

    def shipped_bytes(self, requests: int) -> tuple[int, int]:
        """Return the bytes of :meth:`ship` in all layers: in and out."""
        layers = self.layers * max(requests, 0)
        return OUTPUT * layers * self.shape.attended, ELEMENT * layers * self.shape.qkv

    def _moved(self, tokens: int, fragment_bytes: int | None, transport: str, rate: float) -> float:
        if transport not in TRANSPORTS:
            raise UsageError("unknown transport", where="costs", got=transport, expected=", ".join(TRANSPORTS))
        nbytes = max(tokens, 0) * self.layer_token_bytes
        if not nbytes:
            return 0.0
        if transport == "sm":
            return nbytes / min(rate, self._sm)
        if transport == "ideal":
            return nbytes / rate
        if fragment_bytes is not None and fragment_bytes < 1:
            raise UsageError("an empty fragment", where="costs", got=fragment_bytes, expected="1 B or more")
        fragments = 1 if fragment_bytes is None else -(-nbytes // fragment_bytes)
        return fragments * self._calls[transport] + nbytes / rate

    # -- mapping ---------------------------------------------------------------------------------------------------

    @property
    def chunk_tokens(self) -> int:
        """Whole tokens of KV (all layers) in a chunk of the machine's mapping granularity, at least 1."""
        return max(1, int(self.machine["chunk_bytes"]) // self.token_bytes)

    def remap(self, chunks: int, *, unmap: bool = True) -> float:
        """Return seconds to map ``chunks`` chunks elsewhere: map and set access, and unmap where they were."""
        each = self.machine["map_chunk"] + (self.machine["unmap_chunk"] if unmap else 0.0)
        return max(chunks, 0) * each

    # -- what it rests on ------------------------------------------------------------------------------------------

    def sources(self) -> Mapping[str, str]:
        """Return where each number comes from, by name: ``kind: source`` of the machine's, factors', tables' bases."""
        found = {name: f"{number.kind}: {number.source}" for name, number in self.machine.numbers.items()}
        found.update({f"contention {name}": source for name, source in self.contention.sources.items()})
        if self.tables is not None:
            found.update({f"table {name}": basis for name, basis in self.tables.basis.items()})
        return found

    def _line(self, name: str, x: int) -> float:
        return self._answer(name, x, 0)

    def _answer(self, name: str, x: int, y: int) -> float:
        """Ask a table, once for each question."""
        key = (name, x, y)
        known = self._memo.get(key)
        if known is not None:
            return known
        assert self.tables is not None
        told: Estimate
        if name == "cdec":
            told = self.tables.cdec.at(x, y)
        else:
            told = {"linr": self.tables.linr, "pref": self.tables.pref, "gdec": self.tables.gdec}[name].at(x)
        if told.seconds is None:
            raise NoData(
                "the cost tables cannot tell", where=f"table {name}", got=told.reason, expected="a measured cell"
            )
        if told.extrapolated:
            self.notes[f"table {name} was extrapolated"] = None
        if len(self._memo) < MEMO:
            self._memo[key] = told.seconds
        return told.seconds


def _bound(compute: float, hbm: float) -> Work:
    """Return one stage: the longer of the two, under its name."""
    return Work(compute, 0.0) if compute >= hbm else Work(0.0, hbm)


def costs(machine: Machine, model_name: str) -> Costs:
    """Return the costs of the model called ``model_name`` on ``machine``; UsageError as :func:`models.model`."""
    from kvbench.replay.models import model

    return Costs(machine, model(model_name))
