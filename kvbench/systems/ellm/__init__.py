"""eLLM: activations and KV cache share one pool of physical chunks."""
