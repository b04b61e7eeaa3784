"""PEFT LoRA adapters: what `adapter_config.json` says, and which tensor of a model each of an adapter's tensors is for.

Only tensors' names and shapes are looked at here; what is computed from them is in `mergefs.merge.expert`. What is not
supported is refused by its name in the configuration: an adapter is never taken for less than it is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mergefs.checkpoint.strict import NotAnInteger, parse_object, quote
from mergefs.errors import CheckpointError

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

Shapes = Mapping[str, tuple[int, ...]]
"""Tensors' shapes by their names."""

_AGAIN = "save the adapter with peft again"
_INITIAL_WEIGHTS = ("gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` besides a flag with which the model itself is not changed: with the others, an adapter
fits the model that peft has made of its base, not the base."""
_ELSEWHERE = frozenset(
    (
        *("auto_mapping", "base_model_name_or_path", "revision", "peft_version", "task_type", "inference_mode"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save", "bias"),
        *("lora_dropout", "runtime_config", "megatron_core", "qalora_group_size"),
        *("corda_config", "eva_config", "loftq_config", "lora_ga_config"),
    )
)
"""Keys of the configuration that what is computed does not depend on: they are for training, for loading, or say what
the tensors' names say."""
_PREFIX = "base_model.model."
_FACTOR = re.compile(
    r"(?P<module>.+)\.(?:lora_(?P<linear>[AB])(?:\.[^.]+)?\.weight|lora_embedding_(?P<embedding>[AB])(?:\.[^.]+)?"
    r"|(?P<magnitude>lora_magnitude_vector)(?:\.[^.]+)?(?:\.weight)?)"
)
_SAVED = re.compile(r"(?P<module>.+)\.modules_to_save(?:\.[^.]+)?\.(?P<parameter>[^.]+)")
_WRAPPED = re.compile(r"(?P<module>.+)\.base_layer\.(?P<parameter>[^.]+)")
_LONGEST_PATTERN, _MOST_REPEATS, _LONGEST_NAME = 2000, 2, 500
"""What keeps a stranger's patterns from matching for ever: the time goes with the name's length to the power of the
repeats, and with a repeat in a repeat there is no such bound."""
_LAYER = re.compile(r"\.\d+\.")


@dataclass(frozen=True)
class AdapterConfig:
    """What a LoRA adapter's configuration says about the arithmetic.

    Attributes:
        rank, alpha: of modules that no pattern is for.
        ranks, alphas: patterns of modules' names (regular expressions), the first of which that fits counts.
        rslora: the scale is alpha / sqrt(rank), not alpha / rank.
        dora: rows (of what a module puts out) have a magnitude of their own.
        fan_in_fan_out: the modules' weights are stored transposed.
        base: how it names the model that it was made for, or "".
    """

    rank: int
    alpha: float
    ranks: tuple[tuple[re.Pattern[str], int], ...]
    alphas: tuple[tuple[re.Pattern[str], float], ...]
    rslora: bool
    dora: bool
    fan_in_fan_out: bool
    base: str

    def rank_of(self, module: str) -> int:
        """Return a module's rank."""
        return next((rank for pattern, rank in self.ranks if pattern.fullmatch(module)), self.rank)

    def scale_of(self, module: str) -> float:
        """Return what the product of a module's factors is multiplied by."""
        rank = self.rank_of(module)
        alpha = next((alpha for pattern, alpha in self.alphas if pattern.fullmatch(module)), self.alpha)
        return alpha / (math.sqrt(rank) if self.rslora else rank)


@dataclass(frozen=True)
class Factors:
    """The tensors of an adapter that change one tensor W of a model.

    W becomes W + scale `up` `down`, or with `transposed` W + scale (`up` `down`)^T. With a magnitude m, each row of
    that (each column with `transposed`) is then divided by its norm and multiplied by its element of m.

    Attributes:
        down: name of the tensor [rank, in].
        up: name of the tensor [out, rank].
        scale: see above.
        magnitude: name of the tensor [out], or None.
        transposed: W is [in, out], not [out, in].
    """

    down: str
    up: str
    scale: float
    magnitude: str | None
    transposed: bool


@dataclass(frozen=True)
class Adapted:
    """What an adapter does to one tensor of a model.

    Attributes:
        replacement: name of the adapter's tensor that stands for the model's, or None.
        factors: what is added to the one or the other, or None.
    """

    replacement: str | None
    factors: Factors | None


def read_config(data: bytes, where: str) -> AdapterConfig:
    """Read a LoRA adapter's configuration.

    Args:
        data: the bytes of `adapter_config.json`.
        where: what messages call it.

    Raises:
        CheckpointError: when it is damaged, not that of a LoRA, or has something that is not supported.
    """
    fields, repeated = parse_object(data, where, _AGAIN)
    if repeated:
        raise CheckpointError(f"{where} has the key {quote(repeated[0])} twice; {_AGAIN}")
    kind = fields.pop("peft_type", None)
    if kind != "LORA":
        raise CheckpointError(f"{where}: peft_type is {quote(kind)}, and mergefs has only LORA; fold it in with peft")
    initial = fields.pop("init_lora_weights", True)
    if not isinstance(initial, bool) and initial is not None and initial not in _INITIAL_WEIGHTS:
        raise CheckpointError(
            f"{where}: with init_lora_weights {quote(initial)} the adapter is not for the base itself; save it with"
            " path_initial_model_for_weight_conversion"
        )
    base = fields.get("base_model_name_or_path")
    found = AdapterConfig(
        _rank(fields.pop("r", 8), where, "r"),
        _number(fields.pop("lora_alpha", 8), where, "lora_alpha"),
        tuple((p, _rank(value, where, key)) for p, key, value in _patterns(fields.pop("rank_pattern", None), where)),
        tuple((p, _number(value, where, key)) for p, key, value in _patterns(fields.pop("alpha_pattern", None), where)),
        _flag(fields.pop("use_rslora", False), where, "use_rslora"),
        _flag(fields.pop("use_dora", False), where, "use_dora"),
        _flag(fields.pop("fan_in_fan_out", False), where, "fan_in_fan_out"),
        base if isinstance(base, str) else "",
    )
    for key, value in fields.items():
        # What is empty or off changes nothing, whatever a later peft means by it.
        if key not in _ELSEWHERE and value:
            raise CheckpointError(
                f"{where}: {quote(key)} is {quote(value)}, which mergefs does not support; fold the adapter into its"
                " model with peft (merge_and_unload) and ingest the result"
            )
    return found


def _patterns(value: Any, where: str) -> Iterator[tuple[re.Pattern[str], str, Any]]:
    """Yield each pattern, compiled as peft matches it: at the end of a module's name, behind a dot or at its begin."""
    if value is None:
        return
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: a pattern is {quote(value)}, not an object; {_AGAIN}")
    for key, given in value.items():
        repeats = len(re.findall(r"[*+{]", key))
        if len(key) > _LONGEST_PATTERN or repeats > _MOST_REPEATS or re.search(r"\)[*+{]", key):
            raise CheckpointError(
                f"{where}: the pattern {quote(key)} repeats more than can be matched in bounded time: write the"
                " modules' names instead"
            )
        try:
            yield re.compile(rf"(.*\.)?({key})"), key, given
        except (re.error, RecursionError, OverflowError) as error:
            raise CheckpointError(f"{where}: the pattern {quote(key)} is malformed ({error}); {_AGAIN}") from None


def _rank(value: Any, where: str, key: str) -> int:
    if type(value) is not int or not 0 < value < 1 << 31:
        raise CheckpointError(f"{where}: the rank {quote(key)} is {quote(value)}, not a positive number; {_AGAIN}")
    return value


def _number(value: Any, where: str, key: str) -> float:
    if type(value) is int or isinstance(value, NotAnInteger):
        number = float(value.text if isinstance(value, NotAnInteger) else value)
        if math.isfinite(number):
            return number
    raise CheckpointError(f"{where}: {quote(key)} is {quote(value)}, not a number; {_AGAIN}")


def _flag(value: Any, where: str, key: str) -> bool:
    if not isinstance(value, bool):
        raise CheckpointError(f"{where}: {key} is {quote(value)}, neither true nor false; {_AGAIN}")
    return value


def adapt(config: AdapterConfig, adapter: Shapes, model: Shapes, where: str) -> dict[str, Adapted]:
    """Return what an adapter does to the tensors of a model, by their names; only those that it changes.

    A module of the adapter is the model's of the same name, or else the one whose name has one part more, or less, at
    its begin (a checkpoint of a model without its head, or the other way round).

    Args:
        config: of the adapter.
        adapter, model: their tensors.
        where: what messages call the adapter.

    Raises:
        CheckpointError: when a tensor of the adapter is for none of the model's, lacks its other half, or has a shape
            that does not fit.
    """
    parts: dict[str, dict[str, str]] = {}
    replaced: dict[str, str] = {}
    lost: list[str] = []
    names = _Names(model)
    for name in adapter:
        if len(name) > _LONGEST_NAME and (config.ranks or config.alphas):
            raise CheckpointError(f"{where}: the name {quote(name)} is too long for patterns; {_AGAIN}")
        role, module, parameter = _role(name)
        target = names.find(f"{module}.{parameter}" if module else parameter)
        if target is None:
            lost.append(name)
        elif role:
            if role in parts.setdefault(target, {"module": module}):
                raise CheckpointError(f"{where}: {quote(name)} and {quote(parts[target][role])} are the same; {_AGAIN}")
            parts[target][role] = name
        else:
            if target in replaced:
                raise CheckpointError(f"{where}: {quote(name)} and {quote(replaced[target])} are the same; {_AGAIN}")
            replaced[target] = name
    if lost:
        shown = ", ".join(map(quote, lost[:3])) + (", ..." if len(lost) > 3 else "")
        raise CheckpointError(
            f"{where}: {len(lost)} of its {len(adapter)} tensors match no tensor of the model ({shown}): name the"
            f" model that the adapter was made for{f' ({quote(config.base)})' if config.base else ''}"
        )
    for target, name in replaced.items():
        if adapter[name] != model[target]:
            raise CheckpointError(
                f"{where}: {quote(name)} has shape {list(adapter[name])} and '{target}' of the model"
                f" {list(model[target])}: they cannot be merged"
            )
    straight = _is_straight(model)
    return {
        target: Adapted(
            replaced.get(target),
            _factors(config, parts[target], adapter, target, model[target], where, straight)
            if target in parts
            else None,
        )
        for target in (*parts, *(name for name in replaced if name not in parts))
    }


def _role(name: str) -> tuple[str, str, str]:
    """Return which part of a module's factors a tensor is ("" for what stands for the model's own tensor), the module
    and its parameter."""
    plain = name.removeprefix(_PREFIX)
    found = _FACTOR.fullmatch(plain)
    if found:
        if found["magnitude"]:
            return "magnitude", found["module"], "weight"
        return (
            (f"linear {found['linear']}" if found["linear"] else f"embedding {found['embedding']}"),
            found["module"],
            "weight",
        )
    found = _SAVED.fullmatch(plain) or _WRAPPED.fullmatch(plain)
    if found:
        return "", found["module"], found["parameter"]
    return "", *_split(plain)


def _split(name: str) -> tuple[str, str]:
    module, _, parameter = name.rpartition(".")
    return module, parameter


class _Names:
    """Finds a model's tensors by the names that an adapter has for them."""

    def __init__(self, model: Shapes) -> None:
        self._model = model
        firsts = {name.partition(".")[0] for name in model if "." in name}
        self._shorter: dict[str, str | None] = {}
        for name in model:
            for first in firsts:
                if name.startswith(f"{first}."):
                    rest = name.removeprefix(f"{first}.")
                    self._shorter[rest] = None if rest in self._shorter else name

    def find(self, name: str) -> str | None:
        if name in self._model:
            return name
        rest = name.partition(".")[2]
        return rest if rest in self._model else self._shorter.get(name)


def _factors(
    config: AdapterConfig,
    parts: Mapping[str, str],
    adapter: Shapes,
    target: str,
    shape: tuple[int, ...],
    where: str,
    straight: bool,
) -> Factors:
    """Return the factors of one tensor, their shapes checked."""
    module = parts["module"]
    embedding = any(role.startswith("embedding") for role in parts)
    if embedding and any(role.startswith("linear") for role in parts):
        raise CheckpointError(f"{where}: module {quote(module)} has factors of two kinds; {_AGAIN}")
    kind = "embedding" if embedding else "linear"
    down, up, magnitude = parts.get(f"{kind} A"), parts.get(f"{kind} B"), parts.get("magnitude")
    if down is None or up is None:
        raise CheckpointError(f"{where}: module {quote(module)} has no {'B' if down else 'A'} factor; {_AGAIN}")
    if config.dora is not (magnitude is not None):
        problem = "use_dora is true and it has no" if config.dora else "use_dora is false and it has a"
        raise CheckpointError(f"{where}: module {quote(module)}: {problem} magnitude vector; {_AGAIN}")
    a, b, rank = adapter[down], adapter[up], config.rank_of(module)
    if len(a) != 2 or len(b) != 2:
        raise CheckpointError(
            f"{where}: the factors of module {quote(module)} are no matrices ({list(a)} and {list(b)}), as of a"
            " convolution, which mergefs does not support; fold the adapter into its model with peft"
        )
    if a[0] != rank or b[1] != rank:
        raise CheckpointError(
            f"{where}: the factors of module {quote(module)} have shapes {list(a)} and {list(b)}, and"
            f" {CONFIG} says rank {rank}; {_AGAIN}"
        )
    out, into = b[0], a[1]
    if shape == (out, into) == (into, out) and not embedding:
        # Nothing but the kind of the module tells, which is that of the others in the model's layers.
        transposed = bool(_LAYER.search(target)) and (config.fan_in_fan_out or not straight)
    else:
        transposed = embedding or shape != (out, into)
    if shape != ((into, out) if transposed else (out, into)):
        raise CheckpointError(
            f"{where}: the factors of module {quote(module)} have shapes {list(a)} and {list(b)}, which do not fit"
            f" '{target}' of the model with shape {list(shape)}: name the model that the adapter was made for"
        )
    if magnitude is not None and adapter[magnitude] not in ((out,), (1, out), (out, 1)):
        raise CheckpointError(
            f"{where}: {quote(magnitude)} has shape {list(adapter[magnitude])}, not {[out]}; {_AGAIN}"
        )
    return Factors(down, up, config.scale_of(module), magnitude, transposed)


def _is_straight(model: Shapes) -> bool:
    """Tell whether the weights in a model's layers are [out, in], by those that have a bias (of length out) and are not
    square; as most are, where there is none."""
    votes = 0
    for name, shape in model.items():
        if name.endswith(".weight") and len(shape) == 2 and shape[0] != shape[1] and _LAYER.search(name):
            bias = model.get(name.removesuffix("weight") + "bias")
            votes += (bias == shape[:1]) - (bias == shape[1:])
    return votes >= 0
