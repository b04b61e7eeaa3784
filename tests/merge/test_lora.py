"""Merges of LoRA adapters, against merges of the models that peft folds them into, computed in float64."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import Array, array, load_model, new_repository, pack, recipe_text, served, tensors_of, tree, unpack
from click.testing import CliRunner
from numpy.typing import NDArray
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from mergefs.cli import cli
from mergefs.errors import BudgetError, CheckpointError, MergefsError, RecipeError, UserError
from mergefs.recipe import Recipe
from mergefs.repository import Repository

Float64s = NDArray[np.float64]


def llama(**other: Any) -> LlamaForCausalLM:
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**shape, num_key_value_heads=2, vocab_size=128, **other))


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(n_embd=48, n_layer=2, n_head=4, vocab_size=96, n_positions=32, bos_token_id=1, eos_token_id=2)
    )


def bert() -> BertModel:
    return BertModel(
        BertConfig(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=96)
    )


MODELS: dict[str, Callable[[], Any]] = {"llama": llama, "gpt2": gpt2, "bert": bert}
CAUSAL = ("llama", "gpt2")

ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {"r": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}),
    "rslora": ("llama", {"r": 8, "lora_alpha": 5, "use_rslora": True, "target_modules": ["k_proj", "up_proj"]}),
    "patterns": (
        "llama",
        {
            "r": 4,
            "lora_alpha": 3,
            "target_modules": ["q_proj", "o_proj"],
            "rank_pattern": {"layers.0.self_attn.q_proj": 2, r"layers\.1.*\.o_proj": 6},
            "alpha_pattern": {"o_proj": 7},
        },
    ),
    "dora": ("llama", {"r": 4, "use_dora": True, "target_modules": ["q_proj", "k_proj", "gate_proj"]}),
    "saved": ("llama", {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head", "input_layernorm"]}),
    "embedding": ("llama", {"r": 4, "target_modules": ["embed_tokens", "lm_head", "v_proj"]}),
    "transposed": ("gpt2", {"r": 4, "target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "with a head": ("gpt2", {"r": 4, "target_modules": ["c_attn", "c_proj", "wte"], "fan_in_fan_out": True}),
    "bias": ("gpt2", {"r": 4, "bias": "all", "target_modules": ["c_attn"], "fan_in_fan_out": True}),
    "bert": ("bert", {"r": 4, "target_modules": ["query", "dense"], "bias": "lora_only"}),
    "bfloat16": ("llama", {"r": 8, "target_modules": "all-linear"}),
}


def save_base(kind: str, folder: Path, dtype: torch.dtype = torch.bfloat16, **other: Any) -> Path:
    """Write a model with random weights."""
    torch.manual_seed(7)
    model = MODELS[kind](**other).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.02)
    model.save_pretrained(folder)
    return folder


def loaded(kind: str, base: Path) -> Any:
    return (AutoModelForCausalLM if kind in CAUSAL else AutoModel).from_pretrained(base)


def save_adapter(kind: str, base: Path, folder: Path, seed: int = 1, half: bool = False, **config: Any) -> Path:
    """Write an adapter all of whose trained tensors are random."""
    torch.manual_seed(seed)
    model = get_peft_model(loaded(kind, base).float(), LoraConfig(**config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                close = ("modules_to_save", "magnitude", "bias")
                spread = 0.01 if any(part in name for part in close) else 0.1
                parameter.add_(torch.randn_like(parameter) * spread)
    (model.to(torch.bfloat16) if half else model).save_pretrained(folder)
    return folder


def folded(kind: str, base: Path, adapter: Path) -> dict[str, Float64s]:
    """Return the elements of the model that peft makes of both, in float64, by the names in the model's files."""
    model = PeftModel.from_pretrained(loaded(kind, base).double(), adapter, autocast_adapter_dtype=False)
    with torch.no_grad():
        state = model.double().merge_and_unload().state_dict()
    return {name: state[name].numpy().ravel() for name in load_model(base)}


# ------------------------------------------------------------------------------------------------- definitions


def define(method: str, base: Float64s, experts: Sequence[Float64s], own: dict[str, Any]) -> Float64s:
    """Return a merge by its definition, with the weights 0.7, -0.4, ... of the recipe."""
    weights = WEIGHTS[: len(experts)]
    deltas = [expert - base for expert in experts]
    if method == "linear":
        return sum(w * x for w, x in zip(weights, experts, strict=True)) / sum(weights)
    if method == "task_arithmetic":
        return base + sum(w * d for w, d in zip(weights, deltas, strict=True))
    if method == "slerp":
        (expert,) = experts
        cosine = base @ expert / np.sqrt((base @ base) * (expert @ expert)) if base.any() and expert.any() else 0.0
        if abs(cosine) > 0.9995:
            return 0.4 * base + 0.6 * expert
        angle = np.arccos(cosine)
        return (np.sin(0.4 * angle) * base + np.sin(0.6 * angle) * expert) / np.sin(angle)
    assert method == "ties"
    kept = []
    for weight, delta in zip(weights, deltas, strict=True):
        magnitude = np.abs(delta)
        least = np.sort(magnitude)[::-1][max(1, int(own["density"] * delta.size)) - 1]
        kept.append(weight * np.where(magnitude >= least, delta, 0.0))
    sign = np.where(np.sum(kept, axis=0) >= 0, 1.0, -1.0)
    agree = [np.sign(part) == sign for part in kept]
    divisor = sum(w * a for w, a in zip(weights, agree, strict=True))
    return base + sum(part * a for part, a in zip(kept, agree, strict=True)) / np.where(
        np.abs(divisor) < 1e-8, 1.0, divisor
    )


WEIGHTS = (0.7, 0.4, 0.9)
METHODS: dict[str, dict[str, Any]] = {
    "task_arithmetic": {},
    "linear": {},
    "ties": {"density": 0.4},
    "slerp": {"t": 0.6},
}


def recipe(method: str, models: Sequence[str], base: str = "base", **dtype: str) -> Recipe:
    own = METHODS[method]
    if method == "slerp":
        return Recipe.parse(recipe_text(method, models, base, **own, **dtype))
    each = [(model, {**own, "weight": weight}) for model, weight in zip(models, WEIGHTS, strict=False)]
    return Recipe.parse(recipe_text(method, each, base, **dtype))


def check(found: dict[str, Array], base: dict[str, Array], expected: Callable[[str], Float64s]) -> None:
    """Check that every element is the expected one rounded once, but for a few that lie between two numbers."""
    assert found.keys() == base.keys()
    elements = wrong = 0
    for name, mine in found.items():
        want = expected(name)
        right = array(want.reshape(mine.shape), mine.dtype)
        off = mine.values != right.values
        # Half a last place; of float32, in which deltas are, those of the delta and of the sum as well.
        most, least = {"BF16": (1.01 * 2.0**-8, 1e-9), "F16": (1.01 * 2.0**-11, 2.0**-24), "F32": (2.0**-22, 1e-9)}[
            mine.dtype
        ]
        largest = np.maximum(np.abs(want), np.abs(base[name].values))
        assert (np.abs(mine.values - want) <= most * largest + least).all(), name
        elements, wrong = elements + off.size, wrong + int(off.sum())
    assert wrong <= max(4, 1e-4 * elements) or found[name].dtype == "F32"


@dataclass(frozen=True)
class Made:
    """A model with an adapter, on disk and in a repository as `base` and `adapter`."""

    kind: str
    base: Path
    adapter: Path
    repository: Repository

    @property
    def factor_bytes(self) -> int:
        return (self.adapter / "adapter_model.safetensors").stat().st_size

    def expected(self, method: str) -> Callable[[str], Float64s]:
        base, expert = load_model(self.base), folded(self.kind, self.base, self.adapter)
        return lambda name: define(method, base[name].values, [expert[name]], METHODS[method])


def make(folder: Path, name: str, dtype: torch.dtype = torch.bfloat16) -> Made:
    kind, config = ADAPTERS[name]
    base = save_base(kind, folder / "base", dtype)
    adapter = save_adapter(kind, base, folder / "adapter", half=name == "bfloat16", **config)
    repository = new_repository(folder / "repository")
    repository.ingest(base, "base")
    assert repository.ingest(adapter, "adapter").kind == "adapter"
    return Made(kind, base, adapter, repository)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Made]]:
    """Makes each adapter once."""
    known: dict[str, Made] = {}

    def once(name: str) -> Made:
        if name not in known:
            known[name] = make(tmp_path_factory.mktemp("adapters"), name)
        return known[name]

    yield once
    for each in known.values():
        each.repository.close()


# ---------------------------------------------------------------------------------------------- what is merged


@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.parametrize("method", METHODS)
def test_a_merge_is_that_of_the_folded_model(made: Callable[[str], Made], name: str, method: str) -> None:
    case = made(name)
    report = case.repository.merge(recipe(method, ["base+adapter"]), f"first-{method}")
    check(tensors_of(case.repository, f"first-{method}"), load_model(case.base), case.expected(method))
    # The first merge may have had to measure; all the same it has read the factors once.
    assert 0 < report.read.expert <= case.factor_bytes
    again = case.repository.merge(recipe(method, ["base+adapter"]), f"again-{method}", threads=1)
    assert again.manifest == report.manifest
    assert again.read.expert == 0
    other = case.repository.merge(recipe(method, ["base+adapter"], dtype="float32"), f"other-{method}", threads=1)
    assert 0 < other.read.expert <= case.factor_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    case = make(tmp_path, "dora", dtype)
    case.repository.merge(recipe("task_arithmetic", ["base+adapter"]), "merged")
    check(tensors_of(case.repository, "merged"), load_model(case.base), case.expected("task_arithmetic"))
    case.repository.close()


def test_folding_is_passing_through(made: Callable[[str], Made]) -> None:
    case = made("plain")
    text = recipe_text("passthrough", ["base+adapter"], dtype="float32")
    case.repository.merge(Recipe.parse(text), "whole")
    expert = folded(case.kind, case.base, case.adapter)
    check(tensors_of(case.repository, "whole"), load_model(case.base), expert.__getitem__)


@pytest.mark.parametrize("method", ["task_arithmetic", "ties"])
def test_adapters_beside_whole_models_and_on_others(tmp_path: Path, method: str) -> None:
    base = save_base("llama", tmp_path / "base")
    torch.manual_seed(3)
    tuned = LlamaForCausalLM.from_pretrained(base)
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter.add_((torch.randn(parameter.shape) * 0.003).to(parameter.dtype))
    tuned.save_pretrained(tmp_path / "tuned")
    for seed, name in enumerate(("one", "two"), start=1):
        save_adapter("llama", base, tmp_path / name, seed, r=4, target_modules=["q_proj", "up_proj"], use_dora=seed > 1)
    with new_repository(tmp_path / "repository") as repository:
        repository.ingest(base, "base")
        repository.ingest(tmp_path / "tuned", "tuned", base="base")
        for name in ("one", "two"):
            repository.ingest(tmp_path / name, name)
        models = ["tuned", "base+one", "tuned+two"]
        repository.merge(recipe(method, models), "merged")
        plain = load_model(base)
        experts = [
            {name: tensor.values for name, tensor in load_model(tmp_path / "tuned").items()},
            folded("llama", base, tmp_path / "one"),
            folded("llama", tmp_path / "tuned", tmp_path / "two"),
        ]
        check(
            tensors_of(repository, "merged"),
            plain,
            lambda name: define(method, plain[name].values, [e[name] for e in experts], METHODS[method]),
        )


def test_without_a_base_the_model_of_the_adapters_is_it(made: Callable[[str], Made]) -> None:
    case = made("plain")
    text = recipe_text("linear", [("base+adapter", {"weight": 1.0}), ("base", {"weight": 3.0})])
    report = case.repository.merge(Recipe.parse(text), "average")
    base, expert = load_model(case.base), folded(case.kind, case.base, case.adapter)
    check(
        tensors_of(case.repository, "average"),
        base,
        lambda name: 0.75 * base[name].values + 0.25 * expert[name],
    )
    assert report.read.expert <= case.factor_bytes


@pytest.mark.parametrize("rows", [120, 150])
def test_an_adapter_on_a_model_with_another_vocabulary(tmp_path: Path, rows: int) -> None:
    base = save_base("llama", tmp_path / "base")
    torch.manual_seed(5)
    tuned = LlamaForCausalLM.from_pretrained(base)
    tuned.resize_token_embeddings(rows, mean_resizing=False)
    tuned.save_pretrained(tmp_path / "tuned")
    targets = {"target_modules": ["embed_tokens", "lm_head", "v_proj"]}
    save_adapter("llama", tmp_path / "tuned", tmp_path / "adapter", r=4, **targets)
    with new_repository(tmp_path / "repository") as repository:
        repository.ingest(base, "base")
        repository.ingest(tmp_path / "tuned", "tuned", base="base")
        repository.ingest(tmp_path / "adapter", "adapter")
        repository.merge(recipe("task_arithmetic", ["tuned+adapter"]), "merged")
        plain, expert = load_model(base), folded("llama", tmp_path / "tuned", tmp_path / "adapter")

        def expected(name: str) -> Float64s:
            mine = plain[name].values
            theirs = np.concatenate([expert[name][: mine.size], mine[expert[name].size :]])
            return define("task_arithmetic", mine, [theirs], {})

        check(tensors_of(repository, "merged"), plain, expected)


# ---------------------------------------------------------------------------------------- everything around it


@pytest.mark.parametrize("name", ["plain", "dora", "saved"])
def test_lazy_is_eager(made: Callable[[str], Made], name: str) -> None:
    case = made(name)
    eager = case.repository.merge(recipe("ties", ["base+adapter"]), "eager")
    lazy = case.repository.merge(recipe("ties", ["base+adapter"]), "lazy", lazy=True)
    assert lazy.blocks.lazy > 0
    assert served(case.repository, "lazy") == served(case.repository, "eager")
    assert case.repository.materialize("lazy").manifest == eager.manifest


def test_an_export_runs_like_peft(made: Callable[[str], Made], tmp_path: Path) -> None:
    case = made("saved")
    text = recipe_text("passthrough", ["base+adapter"], dtype="float32")
    case.repository.merge(Recipe.parse(text), "whole", lazy=True)
    case.repository.export("whole", tmp_path / "whole")
    tokens = torch.arange(12).reshape(1, -1)
    peft = PeftModel.from_pretrained(loaded(case.kind, case.base).float(), case.adapter)
    with torch.no_grad():
        mine = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")(tokens).logits
        assert torch.allclose(mine, peft(tokens).logits, atol=2e-5)


def test_the_adapter_comes_back_byte_for_byte(made: Callable[[str], Made], tmp_path: Path) -> None:
    case = made("plain")
    case.repository.export("adapter", tmp_path / "adapter")
    assert tree(tmp_path / "adapter") == tree(case.adapter)


def test_gc_keeps_what_a_lazy_merge_is_derived_from(tmp_path: Path) -> None:
    case = make(tmp_path, "dora")
    repository = case.repository
    repository.merge(recipe("task_arithmetic", ["base+adapter"]), "lazy", lazy=True)
    repository.remove(["adapter"])
    repository.gc()
    check(tensors_of(repository, "lazy"), load_model(case.base), case.expected("task_arithmetic"))
    repository.remove(["lazy"])
    before = len(repository.manifest_ids())
    repository.gc()
    assert len(repository.manifest_ids()) < before
    assert repository.fsck(read_data=True).ok
    repository.close()


def test_budgets(made: Callable[[str], Made]) -> None:
    case = made("plain")
    repository, both = case.repository, recipe("ties", ["base+adapter"])
    planned = repository.plan(both)
    assert planned.reference_bytes <= case.factor_bytes
    assert planned.expert_raw_bytes == sum(len(tensor.data) for tensor in load_model(case.base).values())
    exact = repository.merge(both, "exact")
    within = repository.merge(both, "within", budget=str(planned.expert_bytes))
    assert within.manifest == exact.manifest
    assert within.read.expert <= planned.expert_bytes
    with pytest.raises(BudgetError, match="of the factors of its adapters"):
        repository.merge(both, "less", budget=str(planned.reference_bytes - 1))


def test_a_budget_chooses_beside_adapters(tmp_path: Path) -> None:
    case = make(tmp_path, "plain")
    torch.manual_seed(3)
    tuned = loaded(case.kind, case.base)
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter.add_((torch.randn(parameter.shape) * 0.003).to(parameter.dtype))
    tuned.save_pretrained(tmp_path / "tuned")
    repository = case.repository
    repository.ingest(tmp_path / "tuned", "tuned", base="base")
    both = recipe("ties", ["base+adapter", "tuned"])
    planned = repository.plan(both)
    budget = (planned.expert_bytes + planned.reference_bytes) // 2
    report = repository.merge(both, "half", budget=str(budget))
    assert planned.reference_bytes < report.read.expert <= budget
    assert report.predicted_error is not None
    assert 0 < report.predicted_error < 1
    stored = repository.plan(both, budget=str(budget))
    assert repository.merge_planned(stored.plan.id, "planned").manifest == report.manifest
    refined = repository.refine("half", budget="100%")
    assert refined.manifest == repository.merge(both, "exact").manifest
    repository.close()


# ------------------------------------------------------------------------------------------------ what is refused


def test_an_adapter_is_no_model(made: Callable[[str], Made]) -> None:
    repository = made("plain").repository
    for models, base in ((["adapter"], "base"), (["base"], "adapter"), (["base+adapter+adapter"], "base")):
        with pytest.raises(MergefsError) as caught:
            repository.merge(recipe("linear", models, base), "never")
        assert "adapter" in str(caught.value)
    with pytest.raises(RecipeError, match=r"'adapter' is a LoRA adapter and no whole model: name it as BASE\+adapter"):
        repository.merge(recipe("linear", ["adapter"]), "never")
    with pytest.raises(RecipeError, match="'base' is a whole model and no LoRA adapter: name it alone"):
        repository.merge(recipe("linear", ["base+base"]), "never")
    assert "never" not in repository.refs()


def test_tensors_that_match_nothing_are_named(made: Callable[[str], Made], tmp_path: Path) -> None:
    case = made("plain")
    other = shutil.copytree(case.adapter, tmp_path / "other")
    weights = other / "adapter_model.safetensors"
    tensors = unpack(weights.read_bytes())
    weights.write_bytes(pack({name.replace("layers.1", "layers.7"): tensor for name, tensor in tensors.items()}))
    case.repository.ingest(other, "other")
    with pytest.raises(CheckpointError) as caught:
        case.repository.merge(recipe("linear", ["base+other"]), "never")
    assert "adapter 'other': 6 of its 12 tensors match no tensor of the model" in str(caught.value)
    assert "layers.7." in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"trainable_token_indices": [1, 2]}, "'trainable_token_indices' is [1, 2], which mergefs does not support"),
        ({"lora_bias": True}, "'lora_bias' is True"),
        ({"target_parameters": ["x"]}, "'target_parameters'"),
        ({"layer_replication": [[0, 2]]}, "'layer_replication'"),
        ({"init_lora_weights": "pissa"}, "not for the base itself"),
        ({"something_new": {"a": 1}}, "'something_new'"),
        ({"r": 4}, "says rank 4"),
        ({"use_dora": True}, "it has no magnitude vector"),
    ],
)
def test_what_is_not_supported_is_named(
    made: Callable[[str], Made], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    case = made("plain")
    other = shutil.copytree(case.adapter, tmp_path / "other")
    config = json.loads((other / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps({**config, **change}))
    name = f"refused-{abs(hash(message))}"
    case.repository.ingest(other, name)
    with pytest.raises(CheckpointError) as caught:
        case.repository.merge(recipe("linear", [f"base+{name}"]), "never")
    assert message in str(caught.value)


def test_dora_whose_norms_go_beyond_a_block(tmp_path: Path) -> None:
    base = save_base("gpt2", tmp_path / "base")
    adapter = save_adapter(
        "gpt2", base, tmp_path / "adapter", r=2, target_modules=["c_attn"], use_dora=True, fan_in_fan_out=True
    )
    with new_repository(tmp_path / "repository") as repository:
        repository.ingest(base, "base")
        repository.ingest(adapter, "adapter")
        with pytest.raises(CheckpointError, match="go beyond a block"):
            repository.merge(recipe("linear", ["base+adapter"]), "never")
    with new_repository(tmp_path / "coarser", 1 << 16) as repository:
        repository.ingest(base, "base")
        repository.ingest(adapter, "adapter")
        repository.merge(recipe("linear", ["base+adapter"]), "merged")
        plain, expert = load_model(base), folded("gpt2", base, adapter)
        check(tensors_of(repository, "merged"), plain, lambda name: expert[name])


# -------------------------------------------------------------------------------------------------- explicit deltas


def deltas(base: dict[str, Array], seed: int) -> dict[str, Array]:
    random = np.random.default_rng(seed)
    return {
        name: array(random.normal(0, 0.003, tensor.shape), "F32")
        for name, tensor in base.items()
        if "embed_tokens" not in name
    }


@pytest.mark.parametrize("method", METHODS)
def test_an_explicit_delta(tmp_path: Path, method: str) -> None:
    base = save_base("llama", tmp_path / "base")
    plain = load_model(base)
    mine = deltas(plain, 5)
    (tmp_path / "delta").mkdir()
    (tmp_path / "delta" / "model.safetensors").write_bytes(pack(mine))
    with new_repository(tmp_path / "repository") as repository:
        repository.ingest(base, "base")
        report = repository.ingest(tmp_path / "delta", "delta", base="base", kind="delta")
        assert report.kind == "delta"
        assert served(repository, "delta") == tree(tmp_path / "delta")
        merged = repository.merge(recipe(method, ["delta"]), "merged")
        if method != "slerp":  # which has to read the models once more for their angles
            assert merged.read.expert <= sum(len(tensor.data) for tensor in mine.values())
        check(
            tensors_of(repository, "merged"),
            plain,
            lambda name: define(
                method,
                plain[name].values,
                [plain[name].values + (mine[name].values if name in mine else 0.0)],
                METHODS[method],
            ),
        )
        if method == "ties":
            half = repository.merge(recipe(method, ["delta"]), "half", budget=str(merged.read.expert // 2))
            assert half.read.expert <= merged.read.expert // 2
            repository.merge(recipe(method, ["delta"]), "lazy", lazy=True)
            assert served(repository, "lazy") == served(repository, "merged")


def test_a_delta_that_fits_no_base(tmp_path: Path) -> None:
    base = save_base("llama", tmp_path / "base")
    adapter = save_adapter("llama", base, tmp_path / "adapter", r=2, target_modules=["q_proj"])
    (tmp_path / "delta").mkdir()
    (tmp_path / "delta" / "model.safetensors").write_bytes(pack({"x": array(np.ones(3), "F32")}))
    with new_repository(tmp_path / "repository") as repository:
        repository.ingest(base, "base")
        with pytest.raises(UserError, match="name it with --base"):
            repository.ingest(tmp_path / "delta", "delta", kind="delta")
        with pytest.raises(RecipeError, match="tensor 'x' of the delta 'delta' is not in its base"):
            repository.ingest(tmp_path / "delta", "delta", base="base", kind="delta")
        with pytest.raises(UserError, match="'adapter' is a LoRA adapter"):
            repository.ingest(adapter, "adapter", base="base", kind="delta")
        assert set(repository.refs()) == {"base"}


def test_the_command_line_takes_adapters_by_path(tmp_path: Path) -> None:
    base = save_base("llama", tmp_path / "base")
    adapter = save_adapter("llama", base, tmp_path / "adapter", r=2, target_modules=["q_proj"])
    new_repository(tmp_path / "repository").close()
    (tmp_path / "recipe.yml").write_text(
        recipe_text("task_arithmetic", [(f"{base}+{adapter}", {"weight": 0.5})], str(base))
    )

    def run(*arguments: object) -> dict[str, Any]:
        ran = CliRunner().invoke(cli, ["--repo", str(tmp_path / "repository"), *map(str, arguments), "--json"])
        assert ran.exit_code == 0, ran.output
        found = json.loads(ran.stdout)
        assert isinstance(found, dict)
        return found

    merged = run("merge", tmp_path / "recipe.yml", "--as", "merged", "--ingest")
    assert merged["read"]["expert"] > 0
    assert {m["ref"]: m["kind"] for m in run("ls")["models"]} == {
        "adapter": "adapter",
        "base": "checkpoint",
        "merged": "merge",
    }
    assert run("ingest", adapter, "--as", "again")["kind"] == "adapter"
