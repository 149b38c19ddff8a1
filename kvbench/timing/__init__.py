"""How a number is taken: clocks, gates, budgets, the sampler, ordered statistics and the judgement of a value.

This package knows no system, store or command: it times any ``run(reps) -> float | None``.
"""
