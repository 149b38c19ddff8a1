"""Attention over a paged KV cache: decode on host cores and on GPUs, and the forms it is compared with."""
