"""Plans: a recipe resolved to numbers, from which any block of the result can be derived alone.

A plan is stored in canonical form and named by its hash; real numbers are strings in it (Python's shortest
form that reads back the same). The form is in spec/manifest.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mergefs import canonical
from mergefs.errors import CorruptionError, FormatVersionError
from mergefs.hashing import hex_digest

FORMAT = "mergefs-plan"
VERSION = 1


EXACT = 9
"""The depth that means all tiers, however many there are: exact."""


@dataclass(frozen=True)
class TensorPlan:
    """The plan of one tensor.

    Attributes:
        name: of the tensor.
        depths: for each expert a string with one digit for each block: how many tiers of it are read, `9` for all of
            them. `0` also where the expert's block equals the base's.
        thresholds: for each expert the |delta| below which elements are trimmed, or () where nothing is.
    """

    name: str
    depths: tuple[str, ...]
    thresholds: tuple[float, ...] = ()

    def planned(self, block: int) -> tuple[int, ...]:
        """Return which experts are read for a block."""
        return tuple(i for i, depths in enumerate(self.depths) if depths[block] != "0")

    def depths_at(self, block: int) -> dict[int, str]:
        """Return the digit of each expert that is read for a block."""
        return {i: depths[block] for i, depths in enumerate(self.depths) if depths[block] != "0"}

    def depth(self, expert: int, block: int) -> int:
        """Return how many tiers of an expert's block are read; `EXACT` for all."""
        return int(self.depths[expert][block])


@dataclass(frozen=True)
class Plan:
    """A recipe resolved against a repository.

    Attributes:
        method: name of the merge method.
        base: id of the manifest that deltas are taken from.
        experts: ids of the expert manifests, in the recipe's order.
        baseless: there is no base: deltas are taken from the first expert, which `base` then is.
        weights, densities: one for each expert; densities 1.0 where the method has none.
        settings: the method's other numbers and flags, such as `lambda`, `normalize`, `rescale`.
        dtype: safetensors name of the output dtype of float tensors, or None for the base's.
        seed: of random methods; 0 for the others.
        budget: the expert bytes that may be read, or None when it did not keep anything from being read.
        tensors: the tensors that some expert is read for; all others are the base's.
        recipe: the YAML that it came from.
    """

    method: str
    base: str
    experts: tuple[str, ...]
    baseless: bool
    weights: tuple[float, ...]
    densities: tuple[float, ...]
    settings: Mapping[str, float | bool]
    dtype: str | None
    seed: int
    budget: int | None
    tensors: tuple[TensorPlan, ...]
    recipe: str

    @cached_property
    def encoded(self) -> bytes:
        """The canonical form."""
        return canonical.encode(
            {
                "format": FORMAT,
                "version": VERSION,
                "method": self.method,
                "base": self.base,
                "experts": list(self.experts),
                "baseless": self.baseless,
                "weights": [repr(w) for w in self.weights],
                "densities": [repr(d) for d in self.densities],
                "settings": {k: v if isinstance(v, bool) else repr(v) for k, v in self.settings.items()},
                "dtype": self.dtype,
                "seed": self.seed,
                "budget": self.budget,
                "tensors": [
                    {
                        "name": t.name,
                        "depths": list(t.depths),
                        "thresholds": [repr(x) for x in t.thresholds],
                    }
                    for t in self.tensors
                ],
                "recipe": self.recipe,
            }
        )

    @cached_property
    def id(self) -> str:
        """The plan's name: the hash of its canonical form."""
        return hex_digest(self.encoded)

    @cached_property
    def tensor_by_name(self) -> dict[str, TensorPlan]:
        """The tensors' plans by their names."""
        return {tensor.name: tensor for tensor in self.tensors}


def decode(data: bytes) -> Plan:
    """Read a plan from its canonical form.

    Raises:
        CorruptionError: when it is malformed.
        FormatVersionError: when it was written by a newer mergefs.
    """
    value = canonical.decode(data)
    try:
        if value["format"] != FORMAT:
            raise ValueError("it does not say that it is a plan")
        if value["version"] != VERSION:
            raise FormatVersionError(
                f"the plan has version {value['version']!r}; this mergefs reads version {VERSION}: upgrade it"
            )
        return Plan(
            value["method"],
            value["base"],
            tuple(value["experts"]),
            value["baseless"],
            tuple(float(w) for w in value["weights"]),
            tuple(float(d) for d in value["densities"]),
            {k: _setting(v) for k, v in value["settings"].items()},
            value["dtype"],
            value["seed"],
            value["budget"],
            tuple(_tensor(item) for item in value["tensors"]),
            value["recipe"],
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptionError(f"a plan is malformed: {error!r}") from error


def _tensor(value: dict[str, Any]) -> TensorPlan:
    return TensorPlan(value["name"], tuple(value["depths"]), tuple(float(x) for x in value["thresholds"]))


def _setting(value: Any) -> float | bool:
    return value if isinstance(value, bool) else float(value)
