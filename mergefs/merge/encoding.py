"""How a derived block lies in a pack: encoded against the base's block, where that is possible."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mergefs.blocks import codecs
from mergefs.blocks.codecs import Encoded
from mergefs.blocks.exact import Exact
from mergefs.blocks.pack import NO_BASE
from mergefs.hashing import Buffer, digest
from mergefs.manifest import Tensor
from mergefs.merge.derive import output_dtype
from mergefs.merge.expert import BaseBlock
from mergefs.planner.plan import Plan


@dataclass(frozen=True)
class EncodedBlock:
    """A derived block, ready to be stored.

    Attributes:
        block: its id.
        encoded: how its bytes lie in a pack; None where they are stored already.
        root: the block that they are encoded against, or `NO_BASE`.
    """

    block: bytes
    encoded: Encoded | None
    root: bytes


def encode_derived(
    plan: Plan, tensor: Tensor, base: BaseBlock, raw: Buffer, known: Callable[[bytes], bool], exact: Exact
) -> EncodedBlock:
    """Encode a block of a merged tensor.

    Args:
        plan: of the merge.
        tensor: the base's tensor.
        base: its block at that place.
        raw: the derived bytes.
        known: tells whether a block is stored.
        exact: the repository's coding.
    """
    block = digest(raw)
    if known(block):
        return EncodedBlock(block, None, NO_BASE)
    dtype = output_dtype(plan, tensor)
    if dtype is not tensor.dtype:
        return EncodedBlock(block, codecs.encode(raw, dtype, exact=exact), NO_BASE)
    # The block that everything here is encoded against: the base's own, or the one that is encoded against.
    root, root_raw = next(iter(base.known.items()))
    return EncodedBlock(block, codecs.encode(raw, dtype, root_raw, exact), root)
