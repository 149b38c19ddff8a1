"""Bytes of a model's KV cache: of a token, a layer, a page, and of the fragments a page falls into when it moves.

Sizes follow from the dtype of the *cache*; the dtype of the weights has no say (a model quantised to 4-bit weights
still writes 16-bit keys).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

from kvbench.errors import UsageError, nearest

Layout = Literal["layer_first", "page_first", "page_first_direct", "page_head"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)

KV_DTYPES: Mapping[str, int] = MappingProxyType(
    {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1}
)


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """Shape of one model's KV cache.

    ``planes``: 2 = keys and values, 1 = one latent row (MLA). ``head_dim`` elements of ``kv_bytes_per_element`` bytes
    a head, ``kv_heads`` a token, layer and plane. ``source`` names the published configuration and its fields.
    Raises UsageError for a count below 1 or planes other than 1 and 2.
    """

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    planes: int
    kv_bytes_per_element: int
    source: str

    def __post_init__(self) -> None:
        for field in ("layers", "kv_heads", "head_dim", "kv_bytes_per_element"):
            if getattr(self, field) < 1:
                raise UsageError(
                    "KV geometry", where=f"{self.name}.{field}", got=getattr(self, field), expected="1 or more"
                )
        if self.planes not in (1, 2):
            raise UsageError(
                "KV geometry", where=f"{self.name}.planes", got=self.planes, expected="2 (K and V) or 1 (a latent)"
            )

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one token in one layer and plane."""
        return self.head_dim * self.kv_bytes_per_element

    def item_bytes(self) -> int:
        """Return the bytes of one token in one layer and plane."""
        return self.kv_heads * self.head_bytes

    def layer_token_bytes(self) -> int:
        """Return the bytes of one token in one layer, all planes."""
        return self.planes * self.item_bytes()

    def token_bytes(self) -> int:
        """Return the bytes of one token, all layers and planes."""
        return self.layers * self.layer_token_bytes()

    def page_bytes(self, page_tokens: int) -> int:
        """Return the bytes of a page of ``page_tokens`` tokens, all layers and planes. UsageError below 1 token."""
        return _tokens(page_tokens) * self.token_bytes()

    def fragment_bytes(self, layout: str, page_tokens: int) -> int:
        """Return the bytes of one fragment when a page moves between a layer_first pool and a pool of ``layout``.

        A fragment is contiguous on both sides. Neighbouring pages that happen to merge are not counted here. Raises
        UsageError for an unknown layout or a page below 1 token.
        """
        tokens = _tokens(page_tokens)
        page_run = tokens * self.item_bytes()
        if check_layout(layout) in ("layer_first", "page_first_direct"):
            return page_run
        if layout == "page_first" or self.kv_heads == 1:  # one head: page_head keeps tokens in the order of page_first
            return page_run if self.layers == 1 else self.item_bytes()
        # page_head: [head, token, layer]; the heads of a token are neighbours only where a head holds one row
        return self.item_bytes() if tokens * self.layers == 1 else self.head_bytes

    def fragments_per_page(self, layout: str, page_tokens: int) -> int:
        """Return how many fragments of :meth:`fragment_bytes` a page falls into; UsageError as there."""
        return self.page_bytes(page_tokens) // self.fragment_bytes(layout, page_tokens)


def check_layout(layout: str) -> Layout:
    """Return ``layout``; raises UsageError unless it is one of ``LAYOUTS``."""
    for known in LAYOUTS:
        if layout == known:
            return known
    raise UsageError("unknown KV layout", where="layout", got=layout, expected=f"one of {', '.join(LAYOUTS)}")


def _tokens(page_tokens: int) -> int:
    if page_tokens < 1:
        raise UsageError("a page holds at least one token", where="page_tokens", got=page_tokens)
    return page_tokens


def _dense(name: str, layers: int, kv_heads: int, head_dim: int, source: str) -> KVGeometry:
    return KVGeometry(name, layers, kv_heads, head_dim, 2, KV_DTYPES["bfloat16"], source)


_FIELDS = "num_hidden_layers, num_key_value_heads, hidden_size / num_attention_heads"
# Element size of these is that of bfloat16; geometry() replaces it.
MODELS: Mapping[str, KVGeometry] = MappingProxyType(
    {
        shape.name: shape
        for shape in (
            _dense("Llama-3.1-8B", 32, 8, 128, f"meta-llama/Llama-3.1-8B config.json: {_FIELDS} = 4096 / 32"),
            _dense("Llama-3-70B", 80, 8, 128, f"meta-llama/Meta-Llama-3-70B config.json: {_FIELDS} = 8192 / 64"),
            _dense("Qwen2.5-14B", 48, 8, 128, f"Qwen/Qwen2.5-14B config.json: {_FIELDS} = 5120 / 40"),
            _dense(
                "Mistral-24B", 40, 8, 128,
                "mistralai/Mistral-Small-24B-Instruct-2501 config.json: num_hidden_layers, num_key_value_heads, "
                "head_dim (given: hidden_size / num_attention_heads would be 160)",
            ),
            _dense(
                "Llama-2-7B", 32, 32, 128,
                "meta-llama/Llama-2-7b-hf config.json: num_hidden_layers, num_key_value_heads (= all 32 heads), "
                "hidden_size / num_attention_heads = 4096 / 32",
            ),
            KVGeometry(
                "DeepSeek-V3", 61, 1, 512 + 64, 1, KV_DTYPES["bfloat16"],
                "deepseek-ai/DeepSeek-V3 config.json: num_hidden_layers, kv_lora_rank 512 + qk_rope_head_dim 64",
            ),
        )
    }
)  # fmt: skip


def kv_bytes(kv_dtype: str) -> int:
    """Return the bytes of one element of ``kv_dtype``. Raises UsageError for a name that is not in ``KV_DTYPES``."""
    if kv_dtype not in KV_DTYPES:
        raise UsageError("unknown KV dtype", where="kv_dtype", got=kv_dtype, expected=f"one of {', '.join(KV_DTYPES)}")
    return KV_DTYPES[kv_dtype]


def geometry(name: str, kv_dtype: str = "bfloat16") -> KVGeometry:
    """Return the geometry of the model called ``name`` with a cache of ``kv_dtype``; UsageError for unknown names."""
    size = kv_bytes(kv_dtype)
    if name not in MODELS:
        raise UsageError(
            "unknown model", where="model", got=name, expected=f"one of {', '.join(MODELS)}",
            mend=nearest(name, MODELS),
        )  # fmt: skip
    base = MODELS[name]
    return KVGeometry(base.name, base.layers, base.kv_heads, base.head_dim, base.planes, size, base.source)
