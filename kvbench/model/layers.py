"""A plain decoder layer stack in torch: random weights, named shapes, in pieces that a pipeline can place apart.

A layer is norm, QKV projection (grouped heads), attention over given KV, output projection, norm, plain or gated MLP.
It has no biases and no position encoding: neither changes which tensors live, what they weigh or, by more than a
per mille, what the work costs. Tensors are freed as early as the code allows, by ``del``: which ones are alive when is
what :mod:`kvbench.systems.ellm.ledger` counts, so a change here is a change there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from kvbench.errors import MissingExtra, UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Norm = Literal["rms", "layer"]
EPS = 1e-5


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The sizes of a decoder: ``ffn`` is the MLP's inner width, ``gated`` whether it has a gate beside the up part.

    ``preset`` is ``full`` for the published shape; ``source`` names the config fields the numbers come from.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    gated: bool
    norm: Norm
    vocab: int
    source: str
    preset: str = "full"

    @property
    def group(self) -> int:
        """Query heads a KV head serves."""
        return self.heads // self.kv_heads

    @property
    def attended(self) -> int:
        """Width of the attention's output, elements a token."""
        return self.heads * self.head_dim

    @property
    def qkv(self) -> int:
        """Width of the QKV projection, elements a token."""
        return self.attended + 2 * self.kv_width

    @property
    def kv_width(self) -> int:
        """Width of the keys, and of the values, elements a token."""
        return self.kv_heads * self.head_dim

    @property
    def up(self) -> int:
        """Width of the MLP's first projection, elements a token."""
        return self.ffn * (2 if self.gated else 1)

    @property
    def layer_weights(self) -> int:
        """Elements of one layer's matrices."""
        return self.hidden * (self.qkv + self.up) + (self.attended + self.ffn) * self.hidden

    def kv_bytes(self, tokens: int, element_bytes: int) -> int:
        """Return the KV bytes of ``tokens`` in one layer."""
        return 2 * self.kv_width * tokens * element_bytes

    def layer_flops(self, tokens: int, past: int = 0) -> float:
        """Return the operations of one layer over ``tokens`` new tokens that also see ``past`` earlier ones."""
        pairs = tokens * past + tokens * (tokens + 1) / 2
        return 2.0 * self.layer_weights * tokens + 4.0 * self.attended * pairs


SHAPES: dict[str, LayerShape] = {
    shape.name: shape
    for shape in (
        LayerShape(
            "mpt-30b", 7168, 48, 64, 64, 112, 28672, False, "layer", 50432,
            "mosaicml/mpt-30b config.json: d_model, n_layers, n_heads, expansion_ratio 4, vocab_size",
        ),
        LayerShape(
            "llama-3-8b", 4096, 32, 32, 8, 128, 14336, True, "rms", 128256,
            "meta-llama/Meta-Llama-3-8B config.json: hidden_size, num_hidden_layers, num_attention_heads, "
            "num_key_value_heads, intermediate_size, vocab_size",
        ),
        LayerShape(
            "opt-13b", 5120, 40, 40, 40, 128, 20480, False, "layer", 50272,
            "facebook/opt-13b config.json: hidden_size, num_hidden_layers, num_attention_heads, ffn_dim, vocab_size",
        ),
        LayerShape(
            "qwen2.5-14b", 5120, 48, 40, 8, 128, 13824, True, "rms", 152064,
            "Qwen/Qwen2.5-14B config.json: hidden_size, num_hidden_layers, num_attention_heads, "
            "num_key_value_heads, intermediate_size, vocab_size",
        ),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Preset:
    """How a shape is made smaller: ``heads`` and ``head_dim`` are divided, widths by their product, layers set."""

    heads: int
    head_dim: int
    layers: int | None


# Eight divides the heads of every shape above and keeps query heads per KV head; so the bytes a token leaves in each
# tensor shrink by one factor, and their proportions stay those of the full shape.
PRESETS: dict[str, Preset] = {"full": Preset(1, 1, None), "small": Preset(8, 1, 4), "tiny": Preset(8, 4, 2)}


def shape(name: str, preset: str = "full") -> LayerShape:
    """Return the shape ``name``, made smaller by ``preset``.

    Raises UsageError for an unknown name or preset, and for a preset that does not divide the shape.
    """
    for what, word, known in (("model", name, SHAPES), ("preset", preset, PRESETS)):
        if word not in known:
            raise UsageError(f"unknown {what}", where="layer shape", got=word, expected=f"one of {' '.join(known)}")
    full, by = SHAPES[name], PRESETS[preset]
    both = by.heads * by.head_dim
    divided = (
        (full.heads, by.heads), (full.kv_heads, by.heads), (full.head_dim, by.head_dim), (full.hidden, both),
        (full.ffn, both), (full.vocab, both),
    )  # fmt: skip
    if any(number % divisor for number, divisor in divided):
        raise UsageError(
            f"preset {preset} does not divide the shape", where=name, got=[f"{n} / {d}" for n, d in divided if n % d]
        )
    heads, kv_heads, head_dim, hidden, ffn, vocab = (number // divisor for number, divisor in divided)
    return replace(
        full, heads=heads, kv_heads=kv_heads, head_dim=head_dim, hidden=hidden, ffn=ffn, vocab=vocab,
        layers=by.layers or full.layers, preset=preset,
    )  # fmt: skip


def load_torch(why: str) -> Any:
    """Return the module torch. Raises MissingExtra, naming the extra, where it is not installed."""
    try:
        import torch
    except ModuleNotFoundError as error:
        raise MissingExtra("torch", "torch", why) from error
    return torch


# -- attention over given KV -------------------------------------------------------------------------------------------


def attend_prefill(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Return causal attention of the last ``n`` of ``m`` tokens, shape (n, heads * head_dim).

    ``q``: (n, heads, head_dim); ``keys``, ``values``: (kv_heads, m, head_dim), m >= n, the last n those of ``q``.
    With earlier tokens (m > n) the two parts, all of the past and the causal square, are attended one by one and
    merged by their log-sum-exp (as in flash-decoding): a mask would cost n * m bytes that no engine spends.
    Raises UsageError for shapes that do not belong together.
    """
    n, heads, dim = q.shape
    kv_heads, m, _ = _checked(q, keys, values)
    grouped = q.view(n, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
    past = m - n
    if past < 0:
        raise UsageError("more queries than keys", where="attention", got=(n, m))
    own, own_lse = _flash(grouped, keys[:, past:], values[:, past:], causal=True)
    if not past:
        del own_lse
        return own.permute(2, 0, 1, 3).reshape(n, heads * dim)
    old, old_lse = _flash(grouped, keys[:, :past], values[:, :past], causal=False)
    # share of the past = 1 / (1 + exp(own - old)): sigmoid(old - own), exact and without a common maximum
    share = (old_lse - own_lse).sigmoid_().unsqueeze_(-1)
    del own_lse, old_lse
    old.mul_(share)
    own.mul_(share.neg_().add_(1.0)).add_(old)
    del old, share
    return own.permute(2, 0, 1, 3).reshape(n, heads * dim)


def attend_decode(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Return attention of one token of each of ``b`` sequences, shape (b, heads * head_dim).

    ``q``: (b, heads, head_dim); ``keys``, ``values``: (b, kv_heads, m, head_dim): the token sees all m.
    Raises UsageError for shapes that do not belong together.
    """
    b, heads, dim = q.shape
    kv_heads, _, _ = _checked(q, keys[0], values[0])
    if keys.shape[0] != b:
        raise UsageError("one sequence a query", where="attention", got=(b, int(keys.shape[0])))
    out, lse = _flash(q.view(b, kv_heads, heads // kv_heads, dim), keys, values, causal=False)
    del lse
    return out.reshape(b, heads * dim)


def _checked(q: Tensor, keys: Tensor, values: Tensor) -> tuple[int, int, int]:
    kv_heads, m, dim = keys.shape
    if keys.shape != values.shape or dim != q.shape[2] or q.shape[1] % kv_heads or keys.dtype != q.dtype:
        raise UsageError(
            "query, keys and values do not belong together", where="attention",
            got=[(tuple(t.shape), str(t.dtype)) for t in (q, keys, values)],
            expected="(n, heads, d) and twice (kv_heads, m, d) of one dtype, kv_heads dividing heads",
        )  # fmt: skip
    return kv_heads, m, dim


def _flash(q: Tensor, keys: Tensor, values: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of torch's fused attention. q: (b, h, n, d); keys, values: (b, m, d) or
    (b, h_kv, m, d). A group's query heads share their KV head by a stride of zero: nothing is expanded in memory."""
    torch = load_torch("attention")
    if keys.dim() == 3:
        keys = keys.unsqueeze(1).expand(-1, q.shape[1], -1, -1)
        values = values.unsqueeze(1).expand(-1, q.shape[1], -1, -1)
    if q.is_cuda:
        found = torch.ops.aten._scaled_dot_product_flash_attention(q, keys, values, 0.0, causal, False)
    else:
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, keys, values, 0.0, causal)
    return found[0], found[1]


# -- a layer -----------------------------------------------------------------------------------------------------------


class Layer:
    """One decoder layer on ``device``; weights normal, scaled so that activations keep their size.

    Pieces for a pipeline: :meth:`pre_attention`, attention by whoever holds the KV, :meth:`post_attention`.
    """

    def __init__(self, of: LayerShape, dtype: torch.dtype, device: str, generator: torch.Generator) -> None:
        self.shape = of

        def matrix(rows: int, columns: int) -> Tensor:
            return random_matrix(rows, columns, dtype, device, generator)

        self.w_qkv, self.w_o = matrix(of.qkv, of.hidden), matrix(of.hidden, of.attended)
        self.w_up, self.w_down = matrix(of.up, of.hidden), matrix(of.hidden, of.ffn)
        self.norm_1, self.norm_2 = self.w_o.new_ones(of.hidden), self.w_o.new_ones(of.hidden)

    def pre_attention(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q (n, heads, head_dim), k and v (n, kv_heads, head_dim) of ``x`` (n, hidden): views of one tensor."""
        of, n = self.shape, x.shape[0]
        qkv = _linear(normalised(x, self.norm_1, of.norm), self.w_qkv)
        q, k, v = qkv[:, : of.attended], qkv[:, of.attended : -of.kv_width], qkv[:, -of.kv_width :]
        return (
            q.view(n, of.heads, of.head_dim), k.view(n, of.kv_heads, of.head_dim), v.view(n, of.kv_heads, of.head_dim)
        )  # fmt: skip

    def post_attention(self, x: Tensor, attended: Tensor) -> None:
        """Add output projection and MLP to the residual ``x`` (n, hidden), in place. ``attended``: (n, heads * d)."""
        self.add_attention(x, attended)
        self.add_mlp(x)

    def add_attention(self, x: Tensor, attended: Tensor) -> None:
        """Add the output projection of ``attended`` to ``x``, in place."""
        x.add_(_linear(attended, self.w_o))

    def add_mlp(self, x: Tensor) -> None:
        """Add the MLP of ``x`` to ``x``, in place."""
        from torch.nn.functional import gelu, silu

        of = self.shape
        normed = normalised(x, self.norm_2, of.norm)
        up = _linear(normed, self.w_up)
        del normed
        if of.gated:
            inner = silu(up[:, : of.ffn])
            inner.mul_(up[:, of.ffn :])
        else:
            inner = gelu(up)
        del up
        x.add_(_linear(inner, self.w_down))


def random_matrix(rows: int, columns: int, dtype: torch.dtype, device: str, generator: torch.Generator) -> Tensor:
    """Return a (rows, columns) matrix of normal values with variance 1 / columns."""
    torch = load_torch("a layer stack")
    made: Tensor = torch.empty(rows, columns, dtype=dtype, device=device)
    return made.normal_(0.0, 1.0 / math.sqrt(columns), generator=generator)


def normalised(x: Tensor, weight: Tensor, norm: Norm) -> Tensor:
    """Return ``x`` (n, hidden) normalised row by row and scaled by ``weight`` (hidden)."""
    from torch.linalg import vector_norm
    from torch.nn.functional import layer_norm

    if norm == "layer":
        out: Tensor = layer_norm(x, (x.shape[1],), weight, None, EPS)
        return out
    # in place on one value a row: torch's own rms_norm makes two more tensors of the size of x on the CPU, none on GPUs
    scale = vector_norm(x, dim=1, keepdim=True).square_().div_(x.shape[1]).add_(EPS).rsqrt_()
    out = x * scale
    return out.mul_(weight)


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    from torch.nn.functional import linear

    out: Tensor = linear(x, weight)
    return out


# -- the stack ---------------------------------------------------------------------------------------------------------

Hook = Callable[[int], None]


def _nothing(_: int) -> None:
    return None


class Stack:
    """``layers`` decoder layers (default: the shape's), embedding and head, seeded; runs without gradients.

    KV is given by the caller, a tensor a layer: (2, b, kv_heads, capacity, head_dim), K then V, b sequences.
    Raises MissingExtra without torch.
    """

    def __init__(
        self, of: LayerShape, *, layers: int | None = None, dtype: str = "float32", device: str = "cpu", seed: int = 1
    ) -> None:
        torch = load_torch("a layer stack")
        self.shape, self.device, self.dtype = of, device, getattr(torch, dtype)
        generator = torch.Generator(device=device).manual_seed(seed)
        self.layers = [Layer(of, self.dtype, device, generator) for _ in range(layers or of.layers)]
        self.embedding = random_matrix(of.vocab, of.hidden, self.dtype, device, generator).mul_(math.sqrt(of.hidden))
        self.head = random_matrix(of.vocab, of.hidden, self.dtype, device, generator)
        self.norm = self.embedding.new_ones(of.hidden)
        self.element_bytes = int(self.embedding.element_size())

    def make_kv(self, capacity: int, batch: int = 1, *, seed: int | None = None) -> list[Tensor]:
        """Return KV for ``capacity`` tokens of ``batch`` sequences, a tensor a layer: zeros, or normal by ``seed``."""
        torch, of = load_torch("a layer stack"), self.shape
        form = (2, batch, of.kv_heads, capacity, of.head_dim)
        made = [torch.zeros(form, dtype=self.dtype, device=self.device) for _ in self.layers]
        if seed is not None:
            generator = torch.Generator(device=self.device).manual_seed(seed)
            for kv in made:
                kv.normal_(generator=generator)
        return made

    def ids(self, count: int, seed: int = 1) -> Tensor:
        """Return ``count`` random token ids, int64."""
        torch = load_torch("a layer stack")
        generator = torch.Generator(device=self.device).manual_seed(seed)
        made: Tensor = torch.randint(self.shape.vocab, (count,), device=self.device, generator=generator)
        return made

    def prefill(
        self, ids: Tensor, kv: Sequence[Tensor], past: int = 0, *, before: Hook = _nothing, after: Hook = _nothing
    ) -> Tensor:
        """Prefill ``ids`` (n) of one sequence behind ``past`` tokens of ``kv``; return the last token's logits (vocab).

        K and V of the new tokens are written into ``kv``. ``before`` and ``after`` are called with each layer's number.
        Raises UsageError when they do not fit into it.
        """
        n = int(ids.shape[0])
        self._fits(kv, 1, past + n)
        with load_torch("a layer stack").no_grad():
            x = self._embed(ids)
            for number, layer in enumerate(self.layers):
                before(number)
                keys, values = kv[number][0, 0], kv[number][1, 0]
                q, k, v = layer.pre_attention(x)
                keys[:, past : past + n].copy_(k.transpose(0, 1))
                values[:, past : past + n].copy_(v.transpose(0, 1))
                attended = attend_prefill(q, keys[:, : past + n], values[:, : past + n])
                del q, k, v
                layer.add_attention(x, attended)
                del attended
                layer.add_mlp(x)
                after(number)
            return self._logits(x[-1:])[0]

    def decode(
        self, ids: Tensor, kv: Sequence[Tensor], past: int, *, before: Hook = _nothing, after: Hook = _nothing
    ) -> Tensor:
        """Decode one token of each of ``ids`` (b), ``past`` tokens into its sequence; return logits (b, vocab).

        Otherwise like :meth:`prefill`.
        """
        b = int(ids.shape[0])
        self._fits(kv, b, past + 1)
        with load_torch("a layer stack").no_grad():
            x = self._embed(ids)
            for number, layer in enumerate(self.layers):
                before(number)
                keys, values = kv[number][0], kv[number][1]
                q, k, v = layer.pre_attention(x)
                keys[:, :, past].copy_(k)
                values[:, :, past].copy_(v)
                attended = attend_decode(q, keys[:, :, : past + 1], values[:, :, : past + 1])
                del q, k, v
                layer.add_attention(x, attended)
                del attended
                layer.add_mlp(x)
                after(number)
            return self._logits(x)

    def _embed(self, ids: Tensor) -> Tensor:
        return self.embedding.index_select(0, ids)

    def _logits(self, x: Tensor) -> Tensor:
        """Return the head's output in float32, as samplers take it."""
        normed = normalised(x, self.norm, self.shape.norm)
        logits = _linear(normed, self.head)
        del normed
        return logits.float()

    def _fits(self, kv: Sequence[Tensor], batch: int, tokens: int) -> None:
        of = self.shape
        for number, one in enumerate(kv):
            expected = (2, batch, of.kv_heads, int(one.shape[3]) if one.dim() == 5 else 0, of.head_dim)
            if tuple(one.shape) != expected or one.shape[3] < tokens or one.dtype != self.dtype:
                raise UsageError(
                    "this KV does not belong to the stack", where=f"layer {number}",
                    got=f"{tuple(one.shape)} {one.dtype}",
                    expected=f"(2, {batch}, {of.kv_heads}, at least {tokens}, {of.head_dim}) {self.dtype}",
                )  # fmt: skip
        if len(kv) != len(self.layers):
            raise UsageError("one KV tensor a layer", where="layer stack", got=len(kv), expected=str(len(self.layers)))
