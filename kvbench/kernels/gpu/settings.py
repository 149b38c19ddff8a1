"""What Triton and its compilers are told through the environment, in one place and before they are imported."""

from __future__ import annotations

import tempfile
from pathlib import Path

from kvbench.kernels.cache import user_cache_dir


def triton_settings(cache: Path | None = None) -> dict[str, str]:
    """Return the environment Triton runs with: FP fusion said aloud, and a cache folder of our own.

    Triton 3.9 warns while TRITON_DEFAULT_FP_FUSION is unset, because its default flips in 3.10; ours stays. Without
    a home directory the cache is a new temporary folder, as another user's folder could hold another user's code.
    """
    if cache is None:
        try:
            cache = user_cache_dir() / "triton"
        except OSError:
            cache = Path(tempfile.mkdtemp(prefix="kvbench-triton-"))
    return {"TRITON_DEFAULT_FP_FUSION": "1", "TRITON_CACHE_DIR": str(cache)}
