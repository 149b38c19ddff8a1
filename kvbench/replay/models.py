"""The models a replay knows, by the names of :mod:`kvbench.model.layers`, and what their KV and weights weigh."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvbench.errors import UsageError, nearest
from kvbench.model.layers import SHAPES, LayerShape

ELEMENT = 2  # bytes of a weight and of an element of KV: bfloat16 or float16

_MORE = (
    LayerShape(
        "llama-2-7b", 4096, 32, 32, 32, 128, 11008, True, "rms", 32000,
        "meta-llama/Llama-2-7b-hf config.json: hidden_size, num_hidden_layers, num_attention_heads, "
        "num_key_value_heads, intermediate_size, vocab_size",
    ),
    LayerShape(
        "llama-3-70b", 8192, 80, 64, 8, 128, 28672, True, "rms", 128256,
        "meta-llama/Meta-Llama-3-70B config.json: hidden_size, num_hidden_layers, num_attention_heads, "
        "num_key_value_heads, intermediate_size, vocab_size",
    ),
)  # fmt: skip
MODELS: Mapping[str, LayerShape] = MappingProxyType({**SHAPES, **{shape.name: shape for shape in _MORE}})
# What kvbench.model.geometry, and so the suite strata, calls the same shape: 3.1 differs in the length of contexts.
ALIASES: Mapping[str, str] = MappingProxyType({"llama-3.1-8b": "llama-3-8b"})


def model(name: str) -> LayerShape:
    """Return the shape of the model called ``name``, by a name of MODELS or ALIASES in upper or lower case.

    The name of the shape is the one the model has in cases. Raises UsageError for an unknown one.
    """
    known = name.lower()
    known = ALIASES.get(known, known)
    if known not in MODELS:
        raise UsageError(
            "unknown model", where="model", got=name, expected=f"one of {', '.join(MODELS)}",
            mend=nearest(known, MODELS),
        )  # fmt: skip
    return MODELS[known]


def token_bytes(shape: LayerShape) -> int:
    """Return the bytes of one token's KV in all layers."""
    return shape.layers * shape.kv_bytes(1, ELEMENT)


def weight_bytes(shape: LayerShape) -> int:
    """Return the bytes of all weights: the layers' matrices, the embedding and the output head (taken as untied)."""
    return ELEMENT * (shape.layers * shape.layer_weights + 2 * shape.vocab * shape.hidden)
