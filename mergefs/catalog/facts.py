"""What merges found out about whole tensors of several models, kept for the next merge: the table `facts`."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from mergefs.catalog.environment import Transaction
from mergefs.hashing import digest

_COUNT = struct.Struct("<I")
_ID_BYTES = 32


def facts_key(models: Sequence[str], tensor: str, what: str) -> bytes:
    """Return the key.

    Args:
        models: the manifests' ids that the facts depend on, in the order of the merge, the base's first.
        tensor: its name.
        what: the measurement, with all of its parameters.
    """
    return digest("\0".join(("mergefs-facts", what, tensor, *models)).encode())


def get_facts(txn: Transaction, key: bytes) -> NDArray[np.float64] | None:
    """Return what was found, float64[n], or None."""
    value = txn.get("facts", key)
    if value is None:
        return None
    return np.frombuffer(value, "<f8", offset=_COUNT.size + _ID_BYTES * _COUNT.unpack_from(value)[0])


def put_facts(txn: Transaction, key: bytes, models: Sequence[str], found: NDArray[np.float64]) -> None:
    """Keep what was found of these models."""
    head = _COUNT.pack(len(models)) + b"".join(map(bytes.fromhex, models))
    txn.put("facts", key, head + found.astype("<f8").tobytes())


def facts_of(txn: Transaction, models: set[bytes]) -> Iterator[bytes]:
    """Yield the keys of everything that is known of one of these manifests (32 bytes each)."""
    for key, value in txn.items("facts"):
        (count,) = _COUNT.unpack_from(value)
        starts = range(_COUNT.size, _COUNT.size + _ID_BYTES * count, _ID_BYTES)
        if any(value[start : start + _ID_BYTES] in models for start in starts):
            yield key
