"""The layer stack computes what a decoder computes, in pieces, chunks and steps alike."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from kvbench.errors import MissingExtra, UsageError
from kvbench.model import layers
from kvbench.model.layers import PRESETS, SHAPES, Stack, shape
from tests.needs import missing_module, require

NAMES = sorted(SHAPES)


@pytest.fixture
def torch() -> Iterator[Any]:
    require("torch", missing_module("torch"))
    module = pytest.importorskip("torch")
    threads = module.get_num_threads()
    module.set_num_threads(1)  # small tensors: a second thread that has to wait for its CPU costs more than it brings
    yield module
    module.set_num_threads(threads)


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("name", NAMES)
def test_presets_keep_the_proportions(name: str, preset: str) -> None:
    full, made = shape(name), shape(name, preset)
    by = full.hidden / made.hidden
    assert [full.ffn / made.ffn, full.qkv / made.qkv, full.attended / made.attended, full.vocab / made.vocab] == [
        by
    ] * 4
    assert made.group == full.group
    assert made.attended == made.hidden == made.heads * made.head_dim
    assert full.layer_weights / made.layer_weights == pytest.approx(by * by)


def test_shapes_are_the_published_ones() -> None:
    weights = {name: shape(name).layers * shape(name).layer_weights for name in NAMES}
    # 2 * vocab * hidden of embedding and head on top make the 29.95, 8.03, 12.85 (tied) and 14.77 billion of the cards
    assert weights["mpt-30b"] == 48 * 12 * 7168**2
    assert weights["llama-3-8b"] + 2 * 128256 * 4096 == pytest.approx(8.03e9, rel=1e-3)
    assert weights["opt-13b"] + 50272 * 5120 == pytest.approx(12.85e9, rel=2e-3)
    assert weights["qwen2.5-14b"] + 2 * 152064 * 5120 == pytest.approx(14.77e9, rel=1e-3)
    assert shape("llama-3-8b").kv_bytes(1, 2) == 4096
    assert shape("mpt-30b").layer_flops(2, 3) == 2 * 12 * 7168**2 * 2 + 4 * 7168 * (4 + 5)


@pytest.mark.parametrize("name", NAMES)
def test_one_layer_against_formulas(torch: Any, name: str) -> None:
    """Against double precision with an explicit mask and expanded KV heads: another way to the same numbers."""
    of = shape(name, "tiny")
    stack = Stack(of, layers=1)
    n, layer = 37, stack.layers[0]
    ids, kv = stack.ids(n), stack.make_kv(n)
    got = stack.prefill(ids, kv)

    def norm(x: Any) -> Any:
        if of.norm == "layer":
            x = x - x.mean(1, keepdim=True)
        return x / (x.square().mean(1, keepdim=True) + layers.EPS).sqrt()

    x = stack.embedding.double()[ids]
    qkv = norm(x) @ layer.w_qkv.double().T
    q, k, v = (
        part.view(n, -1, of.head_dim).transpose(0, 1) for part in qkv.split([of.attended, of.kv_width, of.kv_width], 1)
    )
    k, v = k.repeat_interleave(of.group, 0), v.repeat_interleave(of.group, 0)
    scores = (q @ k.transpose(1, 2)) / math.sqrt(of.head_dim)
    scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -math.inf)
    x = x + (scores.softmax(-1) @ v).transpose(0, 1).reshape(n, -1) @ layer.w_o.double().T
    up = norm(x) @ layer.w_up.double().T
    if of.gated:
        inner = up[:, : of.ffn] * up[:, : of.ffn].sigmoid() * up[:, of.ffn :]
    else:
        inner = 0.5 * up * (1.0 + torch.erf(up / math.sqrt(2.0)))
    x = x + inner @ layer.w_down.double().T
    want = (norm(x) @ stack.head.double().T)[-1]
    assert got.dtype == torch.float32
    assert float((got - want).abs().max() / want.abs().max()) < 1e-5
    assert float((kv[0][0, 0].double() - k[:: of.group]).abs().max()) < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_chunks_and_steps_give_what_the_whole_prompt_gives(torch: Any, name: str) -> None:
    stack = Stack(shape(name, "tiny"))
    n, ids = 48, stack.ids(48)
    whole_kv, kv = stack.make_kv(n), stack.make_kv(n)
    whole = stack.prefill(ids, whole_kv)
    for start, end in ((0, 20), (20, 21), (21, 47)):
        stack.prefill(ids[start:end], kv, start)
    assert torch.allclose(stack.decode(ids[47:], kv, 47)[0], whole, atol=1e-5)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(kv, whole_kv, strict=True))
    twice = [torch.cat([one, one], 1) for one in whole_kv]
    for both in twice:
        both[:, :, :, 47:] = 0.0
    assert torch.allclose(stack.decode(ids[47:].repeat(2), twice, 47), whole.expand(2, -1), atol=1e-5)


def test_the_pieces_make_the_layer(torch: Any) -> None:
    stack = Stack(shape("llama-3-8b", "tiny"), layers=1)
    n, layer, seen = 9, stack.layers[0], []
    ids, kv = stack.ids(n), stack.make_kv(n)
    whole = stack.prefill(
        ids, kv, before=lambda i: seen.append(("before", i)), after=lambda i: seen.append(("after", i))
    )
    with torch.no_grad():
        x = stack.embedding[ids]
        q, k, v = layer.pre_attention(x)
        assert (q.shape, k.shape) == ((n, 4, 32), (n, 1, 32))
        layer.post_attention(x, layers.attend_prefill(q, k.transpose(0, 1), v.transpose(0, 1)))
        assert torch.equal(stack._logits(x[-1:])[0], whole)
    assert seen == [("before", 0), ("after", 0)]


def test_seeds_and_dtypes(torch: Any) -> None:
    of = shape("opt-13b", "tiny")
    one, same, other = (Stack(of, layers=1, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.head, same.head)
    assert not torch.equal(one.head, other.head)
    half = Stack(of, layers=1, dtype="bfloat16")
    assert half.element_bytes == 2
    logits = half.prefill(half.ids(8), half.make_kv(8))
    assert logits.dtype == torch.float32
    assert bool(logits.isfinite().all())
    assert float(half.make_kv(64, seed=3)[0].std()) == pytest.approx(1.0, abs=0.1)


def test_what_is_refused(torch: Any) -> None:
    for words in (("gpt", "full"), ("opt-13b", "huge")):
        with pytest.raises(UsageError, match=r"unknown (model|preset), got '(gpt|huge)', expected one of"):
            shape(*words)
    stack = Stack(shape("opt-13b", "tiny"))
    with pytest.raises(UsageError, match="layer 0: this KV does not belong"):
        stack.prefill(stack.ids(9), stack.make_kv(8))
    with pytest.raises(UsageError, match="does not belong"):
        stack.decode(stack.ids(2), stack.make_kv(8), 1)
    with pytest.raises(UsageError, match="one KV tensor a layer, got 1, expected 2"):
        stack.prefill(stack.ids(2), stack.make_kv(8)[:1])
    q, kv = torch.zeros(3, 4, 8), torch.zeros(2, 2, 8)
    with pytest.raises(UsageError, match="more queries than keys"):
        layers.attend_prefill(q, kv, kv)
    for keys, values in ((kv, kv[:, :1]), (kv.bfloat16(), kv.bfloat16()), (torch.zeros(3, 3, 8), torch.zeros(3, 3, 8))):
        with pytest.raises(UsageError, match="do not belong together"):
            layers.attend_prefill(q, keys, values)
    with pytest.raises(UsageError, match="one sequence a query"):
        layers.attend_decode(q, torch.zeros(2, 2, 5, 8), torch.zeros(2, 2, 5, 8))


def test_without_torch_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtra, match=r"a layer stack needs the package torch; pip install 'kvbench\[torch\]'"):
        Stack(shape("opt-13b", "tiny"))


def test_shapes_are_known_without_loading_torch() -> None:
    code = "import sys, kvbench.systems.ellm.ledger as l; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
