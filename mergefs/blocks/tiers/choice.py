"""Which of the two forms of a loop this processor takes."""

from __future__ import annotations

from mergefs.blocks.tiers.kernels import plain, wide

delta, predict, remaining, unpack_trits = wide.delta, wide.predict, wide.remaining, wide.unpack_trits
split, refine = (wide.split, wide.refine) if wide.EXPANDS else (plain.split, plain.refine)

__all__ = ["delta", "predict", "refine", "remaining", "split", "unpack_trits"]
