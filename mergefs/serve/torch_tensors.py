"""A model's tensors as torch tensors: blocks are decoded on all cores, straight into the memory of the tensors."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mergefs.errors import NotFoundError, UserError
from mergefs.manifest import Tensor
from mergefs.pipeline import available_cores, ordered

if TYPE_CHECKING:
    from mergefs.serve.view import View


@dataclass(frozen=True)
class _Target:
    """A tensor that is being filled.

    Attributes:
        out: the torch tensor, flat.
        memory: its bytes, where a block can be put there as it is.
    """

    tensor: Tensor
    out: torch.Tensor
    memory: memoryview | None


def load(
    view: View,
    tensors: str | Iterable[str] = "*",
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
    threads: int | None = None,
) -> dict[str, torch.Tensor]:
    """Return tensors by name; see `View.state_dict`."""
    place = torch.device(device)
    kind = _dtype(dtype)
    found: dict[str, torch.Tensor] = {}
    workers = threads or available_cores()

    def blocks() -> Iterator[tuple[_Target, int]]:
        for tensor in _chosen(view, tensors):
            wanted = kind if kind is not None and tensor.dtype.is_float else tensor.dtype.torch
            out = torch.empty(tensor.shape, dtype=wanted, device=place)
            found[tensor.name] = out
            flat = out.view(-1)
            as_it_is = place.type == "cpu" and wanted == tensor.dtype.torch and tensor.nbytes
            target = _Target(tensor, flat, memoryview(flat.view(torch.uint8).numpy()) if as_it_is else None)
            for number in range(len(tensor.blocks)):
                yield target, number

    def fill(item: tuple[_Target, int]) -> None:
        _fill(view, *item)

    for _ in ordered(fill, blocks(), threads=workers, window=2 * workers + 2):
        pass
    return found


def _fill(view: View, target: _Target, number: int) -> None:
    tensor = target.tensor
    first, stop = tensor.grid(view.manifest.block_elements).extent(number)
    raw = view.fresh_block(tensor, number)
    if target.memory is not None:
        width = tensor.dtype.itemsize
        target.memory[first * width : stop * width] = raw
        return
    block = torch.empty(stop - first, dtype=tensor.dtype.torch)
    memoryview(block.view(torch.uint8).numpy())[:] = raw
    target.out[first:stop].copy_(block)


def _chosen(view: View, tensors: str | Iterable[str]) -> list[Tensor]:
    if isinstance(tensors, str):
        return [tensor for name, tensor in view.tensors.items() if fnmatch.fnmatchcase(name, tensors)]
    wanted = list(dict.fromkeys(tensors))
    missing = [name for name in wanted if name not in view.tensors]
    if missing:
        raise NotFoundError(f"the model {view.manifest_id[:12]} has no tensor '{missing[0]}'")
    return [view.tensors[name] for name in wanted]


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if (found is not None and not (isinstance(found, torch.dtype) and found.is_floating_point)) or (
        isinstance(dtype, str) and found is None
    ):
        raise UserError(f"'{dtype}' is not a floating-point dtype of torch: use one such as bfloat16 or float32")
    return found
