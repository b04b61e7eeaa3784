"""Tiered lossless encoding of an expert's bf16 block against its base block. See spec/tiers.md.

The first tiers quantise the delta coarsely, each refining the one before; the last one restores the exact bits. Any
prefix of a block's tiers decodes to a delta; so does an exact tier `quick` alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mergefs.blocks.exact import Exact as Exact
from mergefs.blocks.tiers.scratch import ALONE
from mergefs.dtypes import DType
from mergefs.errors import CorruptionError
from mergefs.hashing import Buffer

if TYPE_CHECKING:
    from mergefs.blocks.tiers.delta import Delta
    from mergefs.blocks.tiers.encoder import Encoded
    from mergefs.blocks.tiers.exact_fast import ClassOrder

PAYS = {"fast": 0.66, "small": 0.66, "quick": 0.95}
"""All tiers together may take this share of the raw bytes, with each coding. A bf16 block takes two thirds without any
base; who chooses `quick` has the room."""


@dataclass(frozen=True)
class TieredBlock:
    """A block's tiers.

    Attributes:
        tiers: four payloads, or the exact one alone where few elements changed. Any prefix decodes.
        errors: the squared error of the delta that remains after each tier; the last one is 0.
        sampled: float32[sample, 3]: the sampled elements' deltas after each coarse tier (0 where there is none).
    """

    tiers: tuple[bytes, ...]
    errors: tuple[float, ...]
    sampled: NDArray[np.float32]


def encode(
    expert: Buffer, base: Buffer, dtype: DType, exact: Exact = "fast", sample: NDArray[np.int64] | None = None
) -> TieredBlock | None:
    """Encode an expert's block as tiers, where that applies and pays.

    Args:
        expert: the block's bytes.
        base: the base block's bytes, as many.
        dtype: their element type.
        exact: the coding of the last tier.
        sample: places of elements whose coarse deltas are wanted.

    Returns:
        None where another encoding is to be used: for dtypes other than BF16, for blocks where an element of either
        side is infinite, not a number or of a magnitude of 2^127 or more, and where tiers do not pay (unrelated blocks;
        blocks of a few elements).
    """
    if dtype.name != "BF16":
        return None
    encoded = encode_always(expert, base, exact, sample)
    *coarse, last = map(len, encoded.tiers)
    if not encoded.finite or sum(coarse) + last > PAYS[exact] * len(expert):
        return None
    if exact == "quick" and sum(coarse) >= last:
        return None  # it is to be read in the place of all of them
    return TieredBlock(encoded.tiers, encoded.errors, encoded.sampled)


def encode_always(expert: Buffer, base: Buffer, exact: Exact, sample: NDArray[np.int64] | None = None) -> Encoded:
    """Encode any bf16 block as tiers, whether it pays or not; see `encode`."""
    from mergefs.blocks.tiers import encoder

    return encoder.encode(_bits(expert), _bits(base), exact, encoder.NO_SAMPLE if sample is None else sample)


def encode_quick(expert: Buffer, base: Buffer, dtype: DType) -> bytes | None:
    """Return the exact tier `quick` alone; None where the dtype is not BF16."""
    if dtype.name != "BF16":
        return None
    from mergefs.blocks.tiers import encoder

    return encoder.encode_quick(_bits(expert), _bits(base))


def decode_delta(
    tiers: Sequence[Buffer],
    base: Buffer,
    out: NDArray[np.float32] | None = None,
    order: ClassOrder | None = None,
) -> NDArray[np.float32]:
    """Return the delta, float32[n], that a prefix of a block's tiers gives: zeros for none, exact for all.

    Args:
        tiers: the first tiers of the block, or of a `quick` one the last alone.
        base: the bytes of its base block, which also say how large it is.
        out: float32[n] to write to; a new array otherwise.
        order: the base's, where several blocks are decoded against it; see `class_order`.

    Raises:
        CorruptionError: when a tier is damaged or was made for another base.
    """
    bits = _bits(base)
    if out is None:
        out = np.empty(bits.size, np.float32)
    elif out.shape != bits.shape or out.dtype != np.float32 or not out.flags.c_contiguous:
        raise ValueError(f"the delta of {bits.size} elements does not fit {out.dtype}{list(out.shape)}")
    open_delta(tiers, base, order).write(0, out)
    return out


def open_delta(
    tiers: Sequence[Buffer], base: Buffer, order: ClassOrder | None = None, slot: int = ALONE, name: str = "a block"
) -> Delta:
    """Return the delta that `decode_delta` gives, to be written part by part.

    It is valid until this thread opens another one with the same slot.

    Args:
        tiers, base, order: see `decode_delta`.
        slot: a number from 0 on, one for each delta that is open at the same time; `ALONE` for one that is used
            up before anything else is decoded.
        name: what errors call the block.

    Raises:
        CorruptionError: see `Delta.write`.
    """
    from mergefs.blocks.tiers import delta

    return delta.open_delta(tiers, _bits(base), order, slot, name)


def class_order(base: Buffer) -> ClassOrder:
    """Return the order of a base block's elements, which makes decoding several exact deltas from it faster.

    It belongs to the thread that uses it first, until that asks for another one.
    """
    from mergefs.blocks.tiers.exact_fast import ClassOrder

    return ClassOrder(base)


def decode(tiers: Sequence[Buffer], base: Buffer) -> memoryview:
    """Return the block's exact bytes from all of its tiers.

    Args:
        tiers: all tiers of the block, or of a `quick` one the last alone.
        base: the bytes of its base block, which also say how large it is.

    Raises:
        CorruptionError: when a tier is damaged or missing, or was made for another base. Damage that leaves valid
            payloads gives other bytes: compare them with the block's id.
    """
    bits = _bits(base)
    from mergefs.blocks.tiers import decoder

    try:
        return memoryview(decoder.exact(tiers, bits).view(np.uint8))
    except (ValueError, RuntimeError) as error:
        raise CorruptionError(f"a block's tiers do not decode: {error}") from error


def coding(head: Buffer) -> Exact | None:
    """Return the coding of an exact tier, from the beginning of its payload; None where that is too little to say."""
    from mergefs.blocks.tiers import recoder

    return recoder.coding(memoryview(head).cast("B"))


def recode(tiers: Sequence[Buffer], base: Buffer, exact: Exact) -> bytes:
    """Return the exact tier of a block in a coding; it takes the place of the last of the tiers, the others stay.

    Args:
        tiers: all tiers of the block.
        base: the bytes of its base block.
        exact: the coding.

    Raises:
        CorruptionError: see `decode`, also for damage that it finds only by the block's id.
    """
    from mergefs.blocks.tiers import recoder

    try:
        return recoder.recode(tiers, _bits(base), exact)
    except (ValueError, RuntimeError) as error:
        raise CorruptionError(f"a block's tiers do not decode: {error}") from error


def _bits(raw: Buffer) -> NDArray[np.uint16]:
    if len(raw) % 2:
        raise CorruptionError(f"a base block of {len(raw)} bytes for elements of 2")
    return np.frombuffer(raw, np.uint16)
