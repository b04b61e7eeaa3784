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
from mergefs.blocks.encoding import EXACT as EXACT
from mergefs.dtypes import DTYPES
from mergefs.errors import CorruptionError, FormatVersionError
from mergefs.hashing import hex_digest
from mergefs.manifest import Blob, FileRecipe, decode_file
from mergefs.merge.parameters import Scalar
from mergefs.parts import cut, flag, hex_id, items, natural, only, real, text
from mergefs.planner.older import as_now

FORMAT = "mergefs-plan"
VERSION = 1
_KEYS = frozenset(("format", "version", "method", "base", "experts", "baseless", "models", "numbers", "dtype", "seed"))
_KEYS |= {"budget", "tensors", "recipe"}
_DIGITS = frozenset("012349")


@dataclass(frozen=True)
class Numbers:
    """A method's parameters, as they are for some tensors.

    Attributes:
        experts: for each expert the parameters that each has of its own, such as `weight` and `density`.
        shared: the others, such as `lambda`, `normalize`, `t`.
    """

    experts: tuple[Mapping[str, Scalar], ...]
    shared: Mapping[str, Scalar]

    def each(self, name: str, default: float = 1.0) -> tuple[float, ...]:
        """Return one parameter of every expert; the default where the method has none of that name."""
        return tuple(float(expert.get(name, default)) for expert in self.experts)

    @cached_property
    def weights(self) -> tuple[float, ...]:
        """The experts' weights."""
        return self.each("weight")

    @cached_property
    def densities(self) -> tuple[float, ...]:
        """The experts' densities."""
        return self.each("density")


@dataclass(frozen=True)
class TensorPlan:
    """The plan of one tensor.

    Attributes:
        name: of the tensor.
        depths: for each expert a string with one digit for each block: how many tiers of it are read, `9` for all of
            them. `0` also where the expert's block equals the base's.
        thresholds: for each expert the |delta| below which elements are trimmed, or () where nothing is.
        ceilings: for each expert the |delta| above which they are, or () where nothing is.
        numbers: which of the plan's numbers are this tensor's.
        factors: what the method needs to know of the whole tensor, see `Method.factors`: of methods on angles the
            factor of the base's elements, and that of each expert's deltas; () where it needs nothing.
    """

    name: str
    depths: tuple[str, ...]
    thresholds: tuple[float, ...] = ()
    numbers: int = 0
    factors: tuple[float, ...] = ()
    ceilings: tuple[float, ...] = ()

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
        models: ids of the models that base and experts were fitted from, in their order; () where they are the recipe's
            own.
        numbers: the method's parameters, one set for all tensors that have the same.
        dtype: safetensors name of the output dtype of float tensors, or None for the base's.
        seed: of random methods; 0 for the others.
        budget: the expert bytes that may be read, or None when it did not keep anything from being read.
        tensors: the tensors that are not just the base's.
        recipe: the YAML that it came from.
        tokenizer: the files of the tokenizer that the result gets; None for the base's.
        chat_template: the text of the one that it gets; None for that of its tokenizer.
    """

    method: str
    base: str
    experts: tuple[str, ...]
    baseless: bool
    numbers: tuple[Numbers, ...]
    dtype: str | None
    seed: int
    budget: int | None
    tensors: tuple[TensorPlan, ...]
    recipe: str
    models: tuple[str, ...] = ()
    tokenizer: tuple[FileRecipe, ...] | None = None
    chat_template: str | None = None

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
                "models": list(self.models),
                "numbers": [
                    {"experts": [_encoded(e) for e in numbers.experts], "shared": _encoded(numbers.shared)}
                    for numbers in self.numbers
                ],
                "dtype": self.dtype,
                "seed": self.seed,
                "budget": self.budget,
                "tensors": [
                    {
                        "name": t.name,
                        "depths": list(t.depths),
                        "thresholds": [repr(x) for x in t.thresholds],
                        "numbers": t.numbers,
                        "factors": [repr(x) for x in t.factors],
                        "ceilings": [repr(x) for x in t.ceilings],
                    }
                    for t in self.tensors
                ],
                "recipe": self.recipe,
                **({} if self.tokenizer is None else {"tokenizer": [_encoded_file(f) for f in self.tokenizer]}),
                **({} if self.chat_template is None else {"chat_template": self.chat_template}),
            }
        )

    @cached_property
    def id(self) -> str:
        """The plan's name: the hash of its canonical form."""
        return hex_digest(self.encoded)

    def numbers_of(self, tensor: TensorPlan) -> Numbers:
        """Return the method's parameters for a tensor."""
        return self.numbers[tensor.numbers]

    @cached_property
    def tensor_by_name(self) -> dict[str, TensorPlan]:
        """The tensors' plans by their names."""
        return {tensor.name: tensor for tensor in self.tensors}


def decode(data: bytes) -> Plan:
    """Read a plan from its canonical form, or from one of those of earlier versions (spec/manifest.md).

    Raises:
        CorruptionError: when it is malformed.
        FormatVersionError: when it was written by a newer mergefs.
    """
    value = canonical.decode(data)
    try:
        if value["format"] != FORMAT:
            raise ValueError("it does not say that it is a plan")
        if type(value["version"]) is not int or value["version"] != VERSION:
            raise FormatVersionError(
                f"the plan has version {value['version']!r}; this mergefs reads version {VERSION}: upgrade it"
            )
        value = as_now(value)
        only(value, _KEYS | ({"tokenizer", "chat_template"} & set(value)))
        found = Plan(
            text(value["method"]),
            hex_id(value["base"]),
            tuple(hex_id(expert) for expert in items(value["experts"])),
            flag(value["baseless"]),
            tuple(_numbers(numbers) for numbers in items(value["numbers"])),
            None if value["dtype"] is None else DTYPES[value["dtype"]].name,
            natural(value["seed"]),
            None if value["budget"] is None else natural(value["budget"]),
            tuple(_tensor(item) for item in items(value["tensors"])),
            text(value["recipe"]),
            tuple(hex_id(model) for model in items(value["models"])),
            tuple(_file(item) for item in items(value["tokenizer"])) if "tokenizer" in value else None,
            text(value["chat_template"]) if "chat_template" in value else None,
        )
        _check(found)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptionError(f"a plan is malformed: {cut(repr(error))}") from error
    vars(found)["encoded"] = bytes(data)  # it was canonical, and keeps its id in whatever form it is
    return found


def _check(plan: Plan) -> None:
    """Check what one part of a plan says of another."""
    if len(plan.tensor_by_name) != len(plan.tensors):
        raise ValueError("a tensor is named twice")
    count = len(plan.experts)
    if any(len(numbers.experts) != count for numbers in plan.numbers):
        raise ValueError("numbers of more or fewer experts than there are")
    for tensor in plan.tensors:
        if len(tensor.depths) != count or len(set(map(len, tensor.depths))) > 1:
            raise ValueError(f"tensor {tensor.name!r} has depths of other experts or blocks")
        if tensor.numbers >= len(plan.numbers):
            raise ValueError(f"tensor {tensor.name!r} has numbers that there are not")
        if not {len(tensor.thresholds), len(tensor.ceilings)} <= {0, count}:
            raise ValueError(f"tensor {tensor.name!r} has thresholds of other experts")


def _tensor(value: dict[str, Any]) -> TensorPlan:
    only(value, {"name", "depths", "thresholds", "numbers", "factors", "ceilings"})
    depths = tuple(text(digits) for digits in items(value["depths"]))
    if not all(set(digits) <= _DIGITS for digits in depths):
        raise ValueError(f"{depths!r} are not depths")
    return TensorPlan(
        text(value["name"]),
        depths,
        _reals(value["thresholds"]),
        natural(value["numbers"]),
        _reals(value["factors"]),
        _reals(value["ceilings"]),
    )


def _numbers(value: dict[str, Any]) -> Numbers:
    only(value, {"experts", "shared"})
    return Numbers(tuple(_decoded(expert) for expert in items(value["experts"])), _decoded(value["shared"]))


def _reals(value: Any) -> tuple[float, ...]:
    return tuple(real(x) for x in items(value))


def _encoded(values: Mapping[str, Scalar]) -> dict[str, Any]:
    return {name: value if isinstance(value, bool) else repr(float(value)) for name, value in values.items()}


def _decoded(values: dict[str, Any]) -> dict[str, Scalar]:
    return {name: value if isinstance(value, bool) else real(value) for name, value in values.items()}


def _encoded_file(file: FileRecipe) -> dict[str, Any]:
    segments = [{"blob": s.block, "size": s.size} for s in file.segments if isinstance(s, Blob)]
    return {"path": file.path, "size": file.size, "sha256": file.sha256, "segments": segments}


def _file(value: dict[str, Any]) -> FileRecipe:
    found = decode_file(value)
    sizes = [segment.size for segment in found.segments if isinstance(segment, Blob)]
    if len(sizes) != len(found.segments) or sum(sizes) != found.size:
        raise ValueError(f"file {found.path!r} is not of blobs that add up to it")
    return found
