"""Reading a block of an expert as what it differs by from the base's, in whatever form the expert is stored.

A merge, and whoever measures experts for a plan, read experts here and nowhere else.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mergefs.blocks.floats import to_float
from mergefs.blocks.reader import BlockReader, Kind
from mergefs.blocks.tiers.scratch import ALONE
from mergefs.errors import CorruptionError
from mergefs.hashing import Buffer
from mergefs.manifest import Difference, LowRank, Manifest, Tensor
from mergefs.planner.plan import EXACT

if TYPE_CHECKING:
    from mergefs.blocks.tiers.delta import Delta
    from mergefs.blocks.tiers.exact_fast import ClassOrder

FACTOR_SHARE = 4
"""Factors of adapters may take this part of the memory, or what one tensor of all experts needs."""

FACTOR_MEMORY = 256 << 20
"""Bytes of adapters' factors that are kept where nobody says how much memory there is."""


@dataclass(frozen=True)
class BaseBlock:
    """A block of the base, with what is needed to decode deltas against it.

    Attributes:
        raw: its bytes.
        known: the bytes of this block, and of the one that it is encoded against, by id.
        order: of its elements, where several experts are decoded against it; see `tiers.class_order`.
    """

    raw: Buffer
    known: dict[bytes, Buffer]
    order: ClassOrder | None = None


@dataclass(frozen=True)
class _Product:
    """The factors of a tensor as they are multiplied: `left` [rows, rank] times `right` [rank, columns]."""

    left: NDArray[Any]
    right: NDArray[Any]
    magnitude: NDArray[Any] | None

    @property
    def nbytes(self) -> int:
        return self.left.nbytes + self.right.nbytes + (0 if self.magnitude is None else self.magnitude.nbytes)


class FactorCache:
    """Keeps the factors of adapters that were read last, and whole blocks that a plan had to measure, so that a run
    reads them once. Safe to use from many threads.

    Args:
        limit: bytes that are kept.
    """

    def __init__(self, limit: int = FACTOR_MEMORY) -> None:
        self.limit = limit
        self._kept: OrderedDict[object, _Product] = OrderedDict()
        self._blocks: dict[bytes, Buffer] = {}
        self._block_bytes = 0
        self._loading: dict[object, threading.Lock] = {}
        self._lock = threading.Lock()

    @classmethod
    def of(cls, base: Manifest, experts: Iterable[Manifest], limit: int = FACTOR_MEMORY) -> FactorCache:
        """Return one for some experts, of no bytes where nothing stands on them.

        It is large enough for all experts' factors of one tensor, and of the next one.
        """
        sizes: dict[str, int] = {}
        others = 0
        for expert in experts:
            stands = any(tensor.added is not None for tensor in expert.tensors)
            for tensor in expert.tensors if stands else ():
                if isinstance(tensor.added, LowRank):
                    mine = sum(part.elements * max(4, part.dtype.itemsize) for part in tensor.added.tensors)
                    sizes[tensor.name] = sizes.get(tensor.name, 0) + mine
                twin = base.tensor_by_name.get(tensor.name)
                others += 0 if twin and tensor.blocks == twin.blocks else tensor.nbytes
                others += tensor.added.tensor.nbytes if isinstance(tensor.added, Difference) else 0
        return cls(min(sum(sizes.values()) + others, max(limit, 2 * max(sizes.values(), default=0))))

    def block(self, block: bytes) -> Buffer | None:
        """Return a block's bytes where they are kept."""
        return self._blocks.get(block)

    def keep(self, block: bytes, raw: Buffer) -> None:
        """Keep a block's bytes where there is room."""
        with self._lock:
            taken = sum(product.nbytes for product in self._kept.values()) + self._block_bytes
            if taken + len(raw) <= self.limit and block not in self._blocks:
                self._blocks[block] = raw
                self._block_bytes += len(raw)

    def get(self, added: LowRank, reader: BlockReader) -> _Product:
        """Return a tensor's factors, read where they are not kept."""
        key = added.key
        with self._lock:
            loading = self._loading.setdefault(key, threading.Lock())
        with loading:
            with self._lock:
                found = self._kept.get(key)
                if found is not None:
                    self._kept.move_to_end(key)
                    return found
            found = _read(added, reader)
            with self._lock:
                self._kept[key] = found
                total = sum(product.nbytes for product in self._kept.values()) + self._block_bytes
                while total > self.limit and len(self._kept) > 1:
                    total -= self._kept.popitem(last=False)[1].nbytes
            return found


class ExpertReader:
    """Reads blocks of experts. Safe to use from many threads.

    Args:
        reader: of the repository; it counts.
        block_elements: of the repository (see `mergefs.blocks.geometry`).
        factors: what has been read.
        keeps: whether blocks that are read exactly are to be kept there.
    """

    def __init__(
        self, reader: BlockReader, block_elements: int, factors: FactorCache | None = None, *, keeps: bool = False
    ) -> None:
        self._reader = reader
        self._block_elements = block_elements
        self._factors = factors or FactorCache(0)
        self._keeps = keeps and self._factors.limit > 0

    def delta(
        self,
        tensor: Tensor,
        base: Tensor,
        number: int,
        depth: int,
        below: BaseBlock,
        values: NDArray[Any],
        out: NDArray[Any] | None = None,
    ) -> NDArray[Any]:
        """Read a block of an expert to some depth and return expert minus base, [n] of the base values' dtype.

        Args:
            tensor, base: the expert's tensor and the base's.
            number: of the block.
            depth: how many tiers are read, `EXACT` for all; nothing else where something is added to the tensor.
            below: the base's block.
            values: its values, float32[n] or float64[n].
            out: where to put the result, or None.

        Raises:
            BudgetExceededError: when the plan's budget is used up: the plan is wrong.
            CorruptionError: see `BlockReader.read`, `BlockReader.open_coarse` and `Delta.write`.
        """
        if out is None:
            out = np.empty_like(values)
        if tensor.added is not None:
            out[:] = self._with_added(tensor, tensor.added, base, number, below, values)
        elif values.dtype == np.float32 and self.opens(tensor, base, number):
            self.open(tensor, number, depth, below).write(0, out)
        elif depth == EXACT:
            raw = self._whole(block_id(tensor, number), below)
            np.subtract(to_float(raw, tensor.dtype), values, out=out, dtype=values.dtype)
        else:
            # It is bf16, as it has tiers, and the base it is stored against too.
            delta, root = self._reader.read_coarse(block_id(tensor, number), depth, Kind.EXPERT, below.known)
            out[:] = delta if root is below.raw else delta + (to_float(root, tensor.dtype) - values)
        return out

    def opens(self, tensor: Tensor, base: Tensor, number: int) -> bool:
        """Tell whether a block of an expert can be opened: it is bf16 like the base's, and nothing is added to it."""
        if tensor.added is not None or tensor.dtype is not base.dtype or tensor.dtype.name != "BF16" or self._keeps:
            return False
        return self._factors.block(block_id(tensor, number)) is None

    def open(self, tensor: Tensor, number: int, depth: int, below: BaseBlock, slot: int = ALONE) -> Delta:
        """Read a block as `delta` does, to be written part by part in float32.

        Args:
            tensor, number, depth, below: see `delta`; `opens` has to be true.
            slot: see `tiers.open_delta`.

        Raises: see `delta`.
        """
        from mergefs.blocks.tiers.delta import Whole

        block = block_id(tensor, number)
        if depth == EXACT:
            found = self._reader.open_exact(block, Kind.EXPERT, below.known, below.raw, below.order, slot)
            if isinstance(found, bytes | bytearray | memoryview):
                return Whole(_difference(found, below.raw, tensor))
            return found
        delta, root = self._reader.open_coarse(block, depth, Kind.EXPERT, below.known, slot)
        if root is below.raw:
            return delta
        # It is encoded against another block than the base's: what these two differ by comes on top.
        values = _difference(root, below.raw, tensor)
        coarse = np.empty_like(values)
        delta.write(0, coarse)
        return Whole(coarse + values)

    def _with_added(
        self,
        tensor: Tensor,
        added: LowRank | Difference,
        base: Tensor,
        number: int,
        below: BaseBlock,
        values: NDArray[Any],
    ) -> NDArray[Any]:
        """Return the delta of a block to which something is added, in float64 or the values' dtype."""
        same = is_base_block(tensor, base, number)
        if isinstance(added, Difference):
            raw = self._whole(block_id(added.tensor, number), below)
            difference = to_float(raw, added.tensor.dtype)
            return difference if same else self._own(tensor, number, below) - values + difference
        product = self._factors.get(added, self._reader)
        total = multiply(product, added.scale, tensor, number, self._block_elements)
        if product.magnitude is None:
            if not same:
                total += self._own(tensor, number, below) - values
            return total
        total += values if same else self._own(tensor, number, below)
        _rescale(total, product.magnitude, tensor, added.transposed, number, self._block_elements)
        total -= values
        return total

    def _own(self, tensor: Tensor, number: int, below: BaseBlock) -> NDArray[Any]:
        """Return the elements of a tensor's own block in float64."""
        block = block_id(tensor, number)
        raw = below.known.get(block)
        return to_float(self._whole(block, below) if raw is None else raw, tensor.dtype).astype(np.float64)

    def _whole(self, block: bytes, below: BaseBlock) -> Buffer:
        """Read a block exactly, where it is not kept."""
        raw = self._factors.block(block)
        if raw is None:
            raw = self._reader.read(block, Kind.EXPERT, below.known)
            if self._keeps:
                self._factors.keep(block, raw)
        return raw


def is_base_block(tensor: Tensor, base: Tensor, number: int) -> bool:
    """Tell whether an expert's own block, without what is added to it, is the base's."""
    return tensor.blocks[number] == base.blocks[number] and tensor.dtype is base.dtype


def is_changed(tensor: Tensor, base: Tensor, number: int) -> bool:
    """Tell whether an expert's block, as it is read, can differ from the base's."""
    return tensor.added is not None or not is_base_block(tensor, base, number)


def _difference(raw: Buffer, base: Buffer, tensor: Tensor) -> NDArray[np.float32]:
    found: NDArray[np.float32] = to_float(raw, tensor.dtype) - to_float(base, tensor.dtype)
    return found


def block_id(tensor: Tensor, number: int) -> bytes:
    """Return the id of a stored block (32 bytes).

    Raises:
        CorruptionError: when it is still to be derived.
    """
    block = tensor.blocks[number]
    if block is None:
        raise CorruptionError(f"tensor '{tensor.name}' has a block that was never materialized")
    return bytes.fromhex(block)


def multiply(product: _Product, scale: float, tensor: Tensor, number: int, block_elements: int) -> NDArray[np.float64]:
    """Return scale left right for the elements of one block, float64[n]; 0 in rows that the factors do not have."""
    from mergefs.merge import low_rank

    first, stop = tensor.grid(block_elements).extent(number)
    row, column = divmod(first, tensor.shape[1])
    # A block is a run of whole rows, or where a row is longer than that a part of one.
    rows, columns = max(1, (stop - first) // tensor.shape[1]), min(stop - first, tensor.shape[1])
    left = product.left[row : row + rows]
    out = np.zeros((rows, columns))
    low_rank.multiply(left, product.right[:, column : column + columns], scale, out[: len(left)])
    return out.reshape(-1)


def _rescale(
    values: NDArray[np.float64],
    magnitude: NDArray[Any],
    tensor: Tensor,
    columns: bool,
    number: int,
    block_elements: int,
) -> None:
    from mergefs.merge import low_rank

    first, _ = tensor.grid(block_elements).extent(number)
    matrix = values.reshape(-1, tensor.shape[1])
    if columns:
        low_rank.rescale_columns(matrix, magnitude)
    else:
        row = first // tensor.shape[1]
        mine = magnitude[row : row + len(matrix)]
        low_rank.rescale_rows(matrix[: len(mine)], mine)


def _read(added: LowRank, reader: BlockReader) -> _Product:
    down, up = _elements(added.down, reader), _elements(added.up, reader)
    left, right = (down.T, up.T) if added.transposed else (up, down)
    magnitude = None if added.magnitude is None else _elements(added.magnitude, reader).ravel()
    return _Product(np.ascontiguousarray(left), np.ascontiguousarray(right), magnitude)


def _elements(tensor: Tensor, reader: BlockReader) -> NDArray[Any]:
    """Return a tensor of an adapter, in its shape."""
    parts = (reader.read(block_id(tensor, number), Kind.EXPERT) for number in range(len(tensor.blocks)))
    return np.concatenate([to_float(raw, tensor.dtype) for raw in parts]).reshape(tensor.shape)
