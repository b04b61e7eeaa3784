"""Whether a plan is for its models: both may be a stranger's, and what is computed from them trusts in it."""

from __future__ import annotations

from collections.abc import Sequence

from mergefs.errors import CorruptionError
from mergefs.manifest import Manifest
from mergefs.merge.parameters import INT8_MASK
from mergefs.planner.plan import Plan


def check_fits(plan: Plan, base: Manifest, experts: Sequence[Manifest]) -> None:
    """Check that what a plan says of tensors is what its models have.

    Raises:
        CorruptionError: when it names a tensor that one of them lacks or has in another shape or not as floats, has
            depths for more or fewer blocks, or lacks a parameter of its method.
        RecipeError: when there is no such method.
    """
    from mergefs.merge import registry  # whose methods import those who ask this

    method = registry.method(plan.method)
    mine = {name for name, spec in method.parameters.items() if spec.per_model}
    shared = method.parameters.keys() - mine - {INT8_MASK}
    for numbers in plan.numbers:
        if any(not mine <= expert.keys() for expert in numbers.experts) or not shared <= numbers.shared.keys():
            raise CorruptionError(f"plan {plan.id} lacks a parameter of {method.name}")
    if len({base.block_elements, *(expert.block_elements for expert in experts)}) > 1:
        raise CorruptionError(f"plan {plan.id} is for models that are cut into blocks of different sizes")
    for planned in plan.tensors:
        first = base.tensor_by_name.get(planned.name)
        for tensor in (model.tensor_by_name.get(planned.name) for model in (base, *experts)):
            if first is None or tensor is None or tensor.shape != first.shape or not tensor.dtype.is_float:
                raise CorruptionError(f"plan {plan.id} does not fit its models at tensor '{planned.name}'")
        if first is not None and any(len(digits) != len(first.blocks) for digits in planned.depths):
            raise CorruptionError(f"plan {plan.id} has other blocks than its models at tensor '{planned.name}'")
