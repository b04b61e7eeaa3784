"""How much the user says that errors in tensors, or in their rows, matter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergefs.errors import ImportanceError
from mergefs.manifest import Tensor

_LARGEST_FILE = 1 << 30
_LARGEST_WEIGHT = 1e30
"""Sums of weighted errors stay finite."""


def load_importance(path: str | Path) -> dict[str, NDArray[np.float64]]:
    """Read weights from a safetensors file, or JSON: {"tensor": 2.0, "other": [1.0, 0.5, ...]}.

    Args:
        path: of the file.

    Returns:
        For each tensor named its weight, float64[1], or the weights of its rows (along its first axis), float64[rows].

    Raises:
        ImportanceError: when the file cannot be read, names a tensor twice, or has a weight that is negative, not
            finite or huge.
    """
    path = Path(path)
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise ImportanceError(f"{path} has more than 1 GiB: it does not hold weights of rows")
        values = _safetensors(path) if path.suffix == ".safetensors" else _json(path)
    except OSError as error:
        raise ImportanceError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ImportanceError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ImportanceError(f"{path} is not an object of tensor names and their weights")
    return {name: _weights(path, name, value) for name, value in values.items()}


def block_weights(
    tensors: tuple[Tensor, ...], block_elements: int, given: Mapping[str, NDArray[np.float64]] | None
) -> list[NDArray[np.float64]]:
    """Return the importance of each block of each tensor: the mean over its elements; 1 for tensors not named.

    Raises:
        ImportanceError: when a tensor is named that there is not, or its weights are not as many as its rows.
    """
    given = given or {}
    unknown = sorted(set(given) - {tensor.name for tensor in tensors})
    if unknown:
        raise ImportanceError(f"the importance names '{unknown[0]}', which is no float tensor of the base")
    found = []
    for tensor in tensors:
        firsts = tensor.grid(block_elements).firsts()
        weights = given.get(tensor.name, np.ones(1))
        rows = tensor.shape[0] if tensor.shape else 1
        if len(weights) not in (1, rows):
            raise ImportanceError(
                f"the importance has {len(weights)} weights for '{tensor.name}', which has {rows} rows: give one, or"
                " one for each row"
            )
        if len(tensor.blocks) == 0:
            found.append(np.empty(0))
            continue
        # Cut where a block begins and where a row does; no sum goes across, so that none loses small weights.
        per_row = tensor.elements // len(weights)
        cuts = np.union1d(firsts, np.arange(len(weights)) * per_row)
        sums = np.add.reduceat(np.diff(cuts) * weights[cuts[:-1] // per_row], np.searchsorted(cuts, firsts[:-1]))
        found.append(sums / np.diff(firsts))
    return found


def _json(path: Path) -> Any:
    def collect(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for number, name in enumerate(names) if name in names[:number])
            raise ImportanceError(f"{path} names '{twice}' twice")
        return found

    return json.loads(path.read_text(), object_pairs_hook=collect)


def _safetensors(path: Path) -> dict[str, Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name).double().numpy() for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ImportanceError(f"{path} is not a safetensors file: {error}") from error


def _weights(path: Path, name: str, value: Any) -> NDArray[np.float64]:
    is_list = isinstance(value, list) and not any(isinstance(item, (str, bool, dict)) for item in value)
    try:
        if not is_list and (isinstance(value, bool) or not isinstance(value, (int, float, np.ndarray))):
            raise TypeError
        weights = np.atleast_1d(np.asarray(value, np.float64))
    except (TypeError, ValueError):
        raise ImportanceError(f"{path}: the importance of '{name}' is neither a number nor a list of numbers") from None
    except OverflowError:
        weights = np.array([np.inf])
    if weights.ndim != 1 or not weights.size:
        raise ImportanceError(f"{path}: the importance of '{name}' has shape {list(weights.shape)} instead of one axis")
    if not np.isfinite(weights).all() or (weights < 0).any():
        raise ImportanceError(f"{path}: the importance of '{name}' has a weight that is negative or not finite")
    if (weights > _LARGEST_WEIGHT).any():
        raise ImportanceError(f"{path}: the importance of '{name}' has a weight beyond {_LARGEST_WEIGHT:g}")
    return weights
