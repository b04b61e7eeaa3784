"""What an adapter's configuration and tensors' names mean for a model's tensors."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from peft.utils.other import get_pattern_key

from mergefs.checkpoint.adapter import Adapted, AdapterConfig, Factors, adapt, read_config
from mergefs.errors import CheckpointError

MODEL = {
    "model.embed_tokens.weight": (40, 8),
    **{
        f"model.layers.{layer}.{name}": shape
        for layer in range(2)
        for name, shape in {
            "self_attn.q_proj.weight": (8, 8),
            "self_attn.q_proj.bias": (8,),
            "mlp.up_proj.weight": (12, 8),
            "mlp.up_proj.bias": (12,),
            "norm.weight": (8,),
        }.items()
    },
    "lm_head.weight": (40, 8),
}
UP = "model.layers.0.mlp.up_proj"


def config(**fields: Any) -> AdapterConfig:
    return read_config(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4, **fields}).encode(), "x")


def pair(module: str, out: int, into: int, rank: int = 2, form: str = "lora_{}.weight") -> dict[str, tuple[int, ...]]:
    prefix = f"base_model.model.{module}."
    return {prefix + form.format("A"): (rank, into), prefix + form.format("B"): (out, rank)}


def refusal(adapter: dict[str, tuple[int, ...]], of: AdapterConfig | None = None, model: Any = None) -> str:
    with pytest.raises(CheckpointError) as caught:
        adapt(of or config(), adapter, model or MODEL, "adapter 'x'")
    return str(caught.value)


def test_factors_of_a_linear_module() -> None:
    found = adapt(config(), pair(UP, 12, 8), MODEL, "x")
    name = f"base_model.model.{UP}.lora_{{}}.weight"
    assert found == {f"{UP}.weight": Adapted(None, Factors(name.format("A"), name.format("B"), 2.0, None, False))}


@pytest.mark.parametrize("form", ["lora_{}.weight", "lora_{}.default.weight", "lora_{}.mine.weight"])
def test_names_with_the_adapters_own(form: str) -> None:
    assert set(adapt(config(), pair(UP, 12, 8, form=form), MODEL, "x")) == {f"{UP}.weight"}


def test_what_replaces_a_tensor() -> None:
    adapter = {
        "base_model.model.lm_head.weight": (40, 8),
        "base_model.model.model.layers.0.norm.modules_to_save.default.weight": (8,),
        "base_model.model.model.layers.1.norm.modules_to_save.weight": (8,),
        "base_model.model.model.layers.0.self_attn.q_proj.base_layer.bias": (8,),
    }
    assert adapt(config(), adapter, MODEL, "x") == {
        "lm_head.weight": Adapted("base_model.model.lm_head.weight", None),
        "model.layers.0.norm.weight": Adapted(list(adapter)[1], None),
        "model.layers.1.norm.weight": Adapted(list(adapter)[2], None),
        "model.layers.0.self_attn.q_proj.bias": Adapted(list(adapter)[3], None),
    }


def test_an_embedding_has_factors_and_a_copy_of_its_own() -> None:
    adapter = {
        "base_model.model.model.embed_tokens.base_layer.weight": (40, 8),
        **pair("model.embed_tokens", 8, 40, form="lora_embedding_{}"),
    }
    ((name, found),) = adapt(config(), adapter, MODEL, "x").items()
    assert name == "model.embed_tokens.weight"
    assert found.replacement == next(iter(adapter))
    assert found.factors is not None
    assert found.factors.transposed


@pytest.mark.parametrize("names", ["layers.0.mlp.up_proj", f"model.{UP}"])
def test_a_model_with_another_first_part(names: str) -> None:
    assert set(adapt(config(), pair(names, 12, 8), MODEL, "x")) == {f"{UP}.weight"}


def test_which_way_round_is_told_by_shape_bias_and_flag() -> None:
    turned = {name: shape[::-1] if name.endswith(("proj.weight",)) else shape for name, shape in MODEL.items()}
    square = pair("model.layers.0.self_attn.q_proj", 8, 8)

    def transposed(of: AdapterConfig, adapter: Any, model: Any) -> bool:
        (found,) = adapt(of, adapter, model, "x").values()
        assert found.factors is not None
        return found.factors.transposed

    for flag in (False, True):
        assert transposed(config(fan_in_fan_out=flag), pair(UP, 12, 8), turned)
        assert not transposed(config(fan_in_fan_out=flag), pair(UP, 12, 8), MODEL)
        # peft changes the flag with every module; where a shape does not tell, the other weights and biases do.
        assert transposed(config(fan_in_fan_out=flag), square, turned)
    assert not transposed(config(), square, MODEL)
    assert not transposed(config(fan_in_fan_out=True), pair("lm_head", 40, 8), MODEL)


def test_magnitudes() -> None:
    adapter = {**pair(UP, 12, 8), f"base_model.model.{UP}.lora_magnitude_vector": (12,)}
    (found,) = adapt(config(use_dora=True), adapter, MODEL, "x").values()
    assert found.factors is not None
    assert found.factors.magnitude == f"base_model.model.{UP}.lora_magnitude_vector"
    assert "it has a magnitude vector" in refusal(adapter)
    assert "it has no magnitude vector" in refusal(pair(UP, 12, 8), config(use_dora=True))


def test_tensors_that_match_nothing() -> None:
    adapter = pair(UP, 12, 8) | pair("model.layers.5.mlp.up_proj", 12, 8) | {"base_model.model.x.lora_B.bias": (3,)}
    message = refusal(adapter, config(base_model_name_or_path="some/model"))
    assert "adapter 'x': 3 of its 5 tensors match no tensor of the model" in message
    assert "'base_model.model.model.layers.5.mlp.up_proj.lora_A.weight'" in message
    assert "('some/model')" in message


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        ({f"base_model.model.{UP}.lora_A.weight": (2, 8)}, "has no B factor"),
        ({f"base_model.model.{UP}.lora_B.weight": (12, 2)}, "has no A factor"),
        (pair(UP, 12, 8, rank=3), "says rank 2"),
        (pair(UP, 12, 9), "do not fit 'model.layers.0.mlp.up_proj.weight' of the model with shape [12, 8]"),
        ({name: (*shape, 1, 1) for name, shape in pair(UP, 12, 8).items()}, "as of a convolution"),
        ({"base_model.model.lm_head.weight": (41, 8)}, "has shape [41, 8] and 'lm_head.weight' of the model [40, 8]"),
        (pair(UP, 12, 8) | pair(UP, 12, 8, form="lora_{}.default.weight"), "are the same"),
    ],
)
def test_what_does_not_fit(adapter: dict[str, tuple[int, ...]], message: str) -> None:
    assert message in refusal(adapter)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"r": 0}, "the rank 'r' is 0"),
        ({"r": 1.5}, "the rank 'r' is 1.5"),
        ({"lora_alpha": "8"}, "'lora_alpha' is '8', not a number"),
        ({"use_rslora": 1}, "use_rslora is 1, neither true nor false"),
        ({"rank_pattern": ["x"]}, "not an object"),
        ({"rank_pattern": {"(": 3}}, "the pattern '(' is malformed"),
        ({"alpha_pattern": {"q": None}}, "'q' is None, not a number"),
        ({"lora_bias": True}, "'lora_bias' is True, which mergefs does not support"),
        ({"alora_invocation_tokens": [1]}, "'alora_invocation_tokens'"),
        ({"init_lora_weights": "olora"}, "not for the base itself"),
    ],
)
def test_configurations_that_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        config(**fields)
    assert message in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b'{"r": 1, "r": 2}', b'{"peft_type": "LORA", "a": {"b":1,"b":2}}'])
def test_configurations_that_are_damaged(data: bytes) -> None:
    with pytest.raises(CheckpointError):
        read_config(data, "x")


def test_what_training_alone_needs_is_passed_over() -> None:
    config(
        lora_dropout=0.1,
        target_modules=["q"],
        bias="all",
        layers_to_transform=[1],
        modules_to_save=["lm_head"],
        auto_mapping={"a": "b"},
        loftq_config={"bits": 4},
        later=None,
    )


names = st.lists(st.sampled_from(["layers", "0", "1", "12", "attn", "q_proj", "k_proj"]), min_size=1, max_size=5)
patterns = st.dictionaries(
    st.one_of(
        st.sampled_from(["q_proj", "1", "attn.q_proj", r"layers\.\d+\.attn.*", "q_proj|k_proj", ".*", "proj"]),
        names.map(".".join),
    ),
    st.integers(1, 64),
    max_size=4,
)


@given(names.map(".".join), patterns, patterns, st.integers(1, 64), st.floats(0.25, 128), st.booleans())
def test_scales_and_ranks_are_those_of_peft(
    module: str, ranks: dict[str, int], alphas: dict[str, int], rank: int, alpha: float, rslora: bool
) -> None:
    found = config(r=rank, lora_alpha=alpha, rank_pattern=ranks, alpha_pattern=alphas, use_rslora=rslora)
    r = ranks.get(get_pattern_key(ranks, module), rank)
    a = alphas.get(get_pattern_key(alphas, module), alpha)
    assert found.rank_of(module) == r
    assert found.scale_of(module) == a / (math.sqrt(r) if rslora else r)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4), st.booleans())
def test_factors_fit_one_way_round(out: int, into: int, rank: int, turned: bool) -> None:
    model = {"a.layers.0.w.weight": (into, out) if turned else (out, into)}
    adapter = pair("a.layers.0.w", out, into, rank)
    (found,) = adapt(config(r=rank, fan_in_fan_out=turned), adapter, model, "x").values()
    assert found.factors is not None
    assert found.factors.transposed is turned
    if out != into:
        assert re.search("do not fit", refusal(pair("a.layers.0.w", out, into + out, rank), config(r=rank), model))
