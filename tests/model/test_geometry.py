"""Geometry against the models' published configurations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.errors import UsageError
from kvbench.model.geometry import KV_DTYPES, LAYOUTS, MODELS, KVGeometry, geometry
from kvbench.model.layout import Pool, moves

# Fields of each model's published config.json, as its card on the hub shows them.
CONFIGS: dict[str, dict[str, int]] = {
    "Llama-3.1-8B": {
        "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    },
    "Llama-3-70B": {
        "num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8,
    },
    "Qwen2.5-14B": {
        "num_hidden_layers": 48, "hidden_size": 5120, "num_attention_heads": 40, "num_key_value_heads": 8,
    },
    "Mistral-24B": {
        "num_hidden_layers": 40, "hidden_size": 5120, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "Llama-2-7B": {
        "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 32,
    },
    "DeepSeek-V3": {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
}  # fmt: skip
# Bytes a token at 16 bits as published: DeepSeek-V3 70.272 KB, 327.680 KB of a model of Llama-3-70B's shape (both in
# "Insights into DeepSeek-V3", ISCA 2025, table 1); Llama-3.1-8B: 8192 tokens are 1 GiB (Strata, OSDI 2026, 3.1).
TOKEN_BYTES = {
    "Llama-3.1-8B": 131072, "Llama-3-70B": 327680, "Qwen2.5-14B": 196608, "Mistral-24B": 163840, "Llama-2-7B": 524288,
    "DeepSeek-V3": 70272,
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_shapes_are_the_published_ones(name: str) -> None:
    config, shape = CONFIGS[name], geometry(name)
    assert shape.layers == config["num_hidden_layers"]
    if "kv_lora_rank" in config:
        assert (shape.planes, shape.kv_heads) == (1, 1)
        assert shape.head_dim == config["kv_lora_rank"] + config["qk_rope_head_dim"]
    else:
        assert shape.planes == 2
        assert shape.kv_heads == config["num_key_value_heads"]
        assert shape.head_dim == config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    assert shape.token_bytes() == TOKEN_BYTES[name]
    assert "config.json" in shape.source


def test_every_model_is_held_to_a_configuration() -> None:
    assert set(MODELS) == set(CONFIGS)


def test_the_reference_shape_of_strata() -> None:
    """Section 3.1: Llama-3.1-8B, page 32: 64 KiB fragments, 16384 of them in 8192 tokens, 1 GiB."""
    shape = geometry("Llama-3.1-8B")
    assert shape.item_bytes() == 2048
    assert shape.layer_token_bytes() == 4096
    assert shape.page_bytes(8192) == 1 << 30
    assert shape.fragment_bytes("layer_first", 32) == 64 << 10
    assert shape.fragments_per_page("layer_first", 32) * 8192 // 32 == 16384
    assert shape.fragment_bytes("page_first", 32) == 2048
    assert shape.fragment_bytes("page_head", 32) == 256


def test_the_size_follows_the_dtype_of_the_cache() -> None:
    assert {name: geometry("Qwen2.5-14B", name).token_bytes() // 98304 for name in KV_DTYPES} == KV_DTYPES


@pytest.mark.parametrize(
    ("name", "dtype", "words"),
    [
        ("llama-3.1-8b", "bfloat16", "did you mean 'Llama-3.1-8B'?"),
        ("Llama-3.1-8B", "int4", "expected one of float32"),
    ],
)
def test_unknown_names_are_refused_with_what_is_known(name: str, dtype: str, words: str) -> None:
    with pytest.raises(UsageError, match="unknown") as caught:
        geometry(name, dtype)
    assert words in str(caught.value)


@pytest.mark.parametrize(("planes", "heads"), [(3, 1), (2, 0)])
def test_impossible_shapes_are_refused(planes: int, heads: int) -> None:
    with pytest.raises(UsageError, match=r"x\.(planes|kv_heads)"):
        KVGeometry("x", 1, heads, 8, planes, 2, "")


def test_a_page_without_tokens_is_refused() -> None:
    with pytest.raises(UsageError, match="page_tokens"):
        geometry("Llama-2-7B").fragment_bytes("page_first", 0)
    with pytest.raises(UsageError, match="layer_first, page_first"):
        geometry("Llama-2-7B").fragment_bytes("paged", 1)


@given(
    layers=st.integers(1, 4), heads=st.integers(1, 3), planes=st.integers(1, 2), element=st.sampled_from([1, 2, 4]),
    page=st.integers(1, 5), layout=st.sampled_from(LAYOUTS),
)  # fmt: skip
def test_fragments_are_those_the_address_maps_give(
    layers: int, heads: int, planes: int, element: int, page: int, layout: str
) -> None:
    shape = KVGeometry("x", layers, heads, 8, planes, element, "")
    near, far = Pool(shape, "layer_first", page, 9), Pool(shape, layout, page, 9)
    found = moves(near, far, [2, 6], [7, 3])
    assert found.fragment == shape.fragment_bytes(layout, page)
    assert len(found) == 2 * shape.fragments_per_page(layout, page)
