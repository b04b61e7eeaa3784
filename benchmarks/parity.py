"""Every merge method beside mergekit 0.1.5 and beside its float64 definition: `python -m benchmarks.parity`.

It makes small checkpoints, a base and three experts in float32 and in bf16, and merges them by every recipe of
`parity_grid`, with mergefs and with mergekit. Both results are rounded to bf16 and compared with those of `definitions`
and with each other. Where they are not within one bf16 ULP of each other for 99.9 % of the elements, the table says
why, and which of the two is the definition's. Distances are counted in bf16 numbers: thousands are a sign that differs
near 0.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from benchmarks import definitions
from benchmarks.parity_grid import GRID, Asked
from mergefs.recipe import Recipe
from mergefs.repository import Repository

MERGEKIT = "mergekit==0.1.5"
SEED = 7
NAMES = ("base", "expert-0", "expert-1", "expert-2")
WITHIN = 0.999
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

WHY = {
    "dare": "other random masks; mergekit rescales to the tensor's L1 norm, the definition divides by the density",
    "della": "other random masks; mergekit rescales to the tensor's L1 norm, the definition divides by each chance",
    "arcee_fusion": "mergekit's divergences of rows are float32 sums that cancel: elements are across its threshold",
    "ties": "mergekit keeps exactly k elements, any of equal ones; the definition keeps all that equal the k-th",
    "sce": "mergekit selects exactly k elements, any of equal ones; the definition selects all that equal the k-th",
    "bfloat16": "mergekit rounds every intermediate value to bf16",
}

Model = dict[str, NDArray[np.float64]]


@dataclass(frozen=True)
class Row:
    """One recipe of one set of models; shares are of all elements but those at a threshold.

    Attributes:
        dtype: of the models and of the recipe.
        recipe: the method and its parameters.
        at_threshold: share of the elements for which the last bit of an input decides.
        mergefs, mergekit: share that is the definition's, after rounding to bf16; None for mergekit's random masks.
        mergefs_ulp, mergekit_ulp: the largest distance from it.
        within: share within one ULP of each other.
        expected: for random methods the length of mergefs's and mergekit's merged delta along that of the same recipe
            with density 1, relative to it; else None.
        note: why the two differ where they do, and which one is the definition's.
    """

    dtype: str
    recipe: str
    at_threshold: float
    mergefs: float
    mergefs_ulp: int
    mergekit: float | None
    mergekit_ulp: int | None
    within: float | None
    expected: tuple[float, float] | None
    note: str


def make_models(folder: Path, dtype: str) -> list[Path]:
    """Write a base and its experts and return their folders.

    Experts agree in part; of an embedding only some rows change; the last layer changes as little as by a real
    fine-tune (a rounding error of bf16), the others ten times as much; one norm does not change at all.
    """
    random = np.random.default_rng(11)
    hidden, inner, vocabulary = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"]
    key_values = CONFIG["num_key_value_heads"] * CONFIG["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(CONFIG["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes |= {
            at + "input_layernorm.weight": (hidden,),
            at + "mlp.down_proj.weight": (hidden, inner),
            at + "mlp.gate_proj.weight": (inner, hidden),
            at + "mlp.up_proj.weight": (inner, hidden),
            at + "post_attention_layernorm.weight": (hidden,),
            at + "self_attn.k_proj.weight": (key_values, hidden),
            at + "self_attn.o_proj.weight": (hidden, hidden),
            at + "self_attn.q_proj.weight": (hidden, hidden),
            at + "self_attn.v_proj.weight": (key_values, hidden),
        }
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}

    def spread(name: str) -> float:
        if name == "model.norm.weight":
            return 0.0
        return 1.3e-4 if f"layers.{CONFIG['num_hidden_layers'] - 1}" in name else 1.3e-3

    base = {n: random.normal(1.0 if "norm" in n else 0.0, 0.1 if "norm" in n else 0.02, s) for n, s in shapes.items()}
    common = {n: random.normal(0, spread(n), s) for n, s in shapes.items()}
    models = [base]
    for number in range(len(NAMES) - 1):
        mine = {}
        for name, shape in shapes.items():
            delta = 0.5 * common[name] + random.normal(0, spread(name) * (1 + 0.3 * number), shape)
            if "embed" in name:
                delta *= random.random((vocabulary, 1)) < 0.4
            mine[name] = base[name] + delta
        models.append(mine)
    folders = []
    for name, model in zip(NAMES, models, strict=True):
        made = folder / name
        made.mkdir(parents=True)
        tensors = {n: torch.from_numpy(v).to(DTYPES[dtype]) for n, v in model.items()}
        save_file(tensors, made / "model.safetensors", {"format": "pt"})
        (made / "config.json").write_text(json.dumps({**CONFIG, "torch_dtype": dtype}, indent=2))
        folders.append(made)
    return folders


def load(folder: Path) -> Model:
    """Return the tensors of a model directory in float64."""
    found = {}
    for path in folder.glob("*.safetensors"):
        found |= {name: tensor.double().numpy() for name, tensor in load_file(path).items()}
    return found


def with_mergekit(python: Path, folder: Path, models: list[Path], dtype: str) -> list[Model | str]:
    """Merge by every recipe with mergekit and return the results, or the errors' messages."""
    names = [str(model) for model in models]
    jobs = [
        {"recipe": asked.text(names[0], names[1:], dtype), "out": str(folder / str(number)), "seed": SEED}
        for number, asked in enumerate(GRID)
    ]
    script = Path(__file__).with_name("parity_mergekit.py")
    done = subprocess.run([python, script], input=json.dumps(jobs), text=True, stdout=subprocess.PIPE, check=True)
    errors = [json.loads(line) for line in done.stdout.splitlines()]
    return [load(Path(job["out"])) if error is None else error for job, error in zip(jobs, errors, strict=True)]


def with_mergefs(repository: Repository, dtype: str) -> list[Model]:
    """Merge by every recipe with mergefs and return the results."""
    found = []
    for asked in GRID:
        repository.merge(Recipe.parse(asked.text(NAMES[0], NAMES[1:], dtype)), "merged", seed=SEED)
        with repository.view("merged") as view:
            names = [tensor.name for tensor in view.manifest.tensors]
            found.append({name: view.tensor(name).double().numpy() for name in names})
    return found


def define(
    repository: Repository, models: list[Model], asked: Asked, *, whole: bool = False
) -> dict[str, definitions.Merged]:
    """Return what a recipe gives by the definitions, with mergefs's random masks.

    Args:
        repository: with the models.
        models: their elements.
        asked: the recipe.
        whole: with density 1 instead of its own.
    """
    base, *experts = models
    own = [{**mine, "density": 1.0} for mine in asked.own] if whole else asked.own
    found = {}
    for name, mine in base.items():
        drawn = [
            definitions.draw(SEED, repository.resolve(expert), 0, name, mine.size).reshape(mine.shape)
            if asked.is_random
            else np.zeros(mine.shape, np.uint64)
            for expert in NAMES[1 : 1 + len(asked.own)]
        ]
        parts = [expert[name] for expert in experts[: len(asked.own)]]
        case = definitions.Case(mine if asked.with_base else None, parts, own, asked.shared, drawn)
        with np.errstate(invalid="ignore", divide="ignore"):
            found[name] = definitions.METHODS[asked.method](case)
    return found


def compare(
    repository: Repository, models: list[Model], dtype: str, asked: Asked, mine: Model, its: Model | str
) -> Row:
    """Return the table's row of a recipe.

    Args:
        repository: with the models.
        models: their elements.
        dtype: theirs.
        asked: the recipe.
        mine, its: what mergefs and mergekit made of it; of mergekit also the error's message.
    """
    defined = define(repository, models, asked)
    names = list(defined)
    tied = _joined({n: np.broadcast_to(merged.tied, merged.values.shape) for n, merged in defined.items()}, names)
    exact = _joined({n: merged.values for n, merged in defined.items()}, names)
    operands = np.max([np.abs(_joined(model, names)) for model in models], axis=0)
    ours = _joined(mine, names)
    equal, most = _share(_steps(ours, exact, operands)[~tied])
    row = Row(dtype, asked.name, float(tied.mean()), equal, most, None, None, None, None, "")
    if isinstance(its, str):
        return replace(row, note=f"mergekit: {its.partition('. ')[0]}")
    theirs = _joined(its, names)
    if asked.is_random:
        base = _joined(models[0], names)
        whole = define(repository, models, asked, whole=True)
        along = _joined({n: merged.values for n, merged in whole.items()}, names) - base
        lengths = [float((found - base) @ along / (along @ along)) for found in (ours, theirs)]
        return replace(row, expected=(lengths[0], lengths[1]), note=WHY[asked.method.split("_")[0]])
    its_equal, its_most = _share(_steps(theirs, exact, operands)[~tied])
    within = float((_steps(ours, theirs, operands) <= 1).mean())
    note = ""
    if within < WITHIN:
        note = f"{_reason(asked, dtype)}; the definition is {'mergefs' if equal > its_equal else 'mergekit'}'s"
    return replace(row, mergekit=its_equal, mergekit_ulp=its_most, within=within, note=note)


def _reason(asked: Asked, dtype: str) -> str:
    if dtype == "bfloat16":
        return WHY["bfloat16"]
    return WHY.get(asked.method, WHY.get(asked.method.split("_")[-1], "unexplained"))


def _joined(parts: Mapping[str, NDArray[Any]], names: Sequence[str]) -> NDArray[Any]:
    return np.concatenate([parts[name].ravel() for name in names])


def _steps(a: NDArray[Any], b: NDArray[Any], operands: NDArray[Any]) -> NDArray[np.int64]:
    """Return how many bf16 numbers lie between elements; none where the difference is the last bit of an operand's
    float32, which counts where operands cancel."""
    return np.where(np.abs(a - b) <= 2.0**-22 * operands, 0, np.abs(definitions.rounded(a) - definitions.rounded(b)))


def _share(off: NDArray[np.int64]) -> tuple[float, int]:
    return float((off == 0).mean()), int(off.max(initial=0))


def measure(python: Path, work: Path) -> list[Row]:
    """Return all rows."""
    rows = []
    for dtype in DTYPES:
        folders = make_models(work / dtype / "models", dtype)
        models = [load(folder) for folder in folders]
        its = with_mergekit(python, work / dtype / "mergekit", folders, dtype)
        with Repository.init(work / dtype / "repository") as repository:
            for name, folder in zip(NAMES, folders, strict=True):
                repository.ingest(folder, name, base=None if name == NAMES[0] else NAMES[0])
            mine = with_mergefs(repository, dtype)
            for asked, ours, theirs in zip(GRID, mine, its, strict=True):
                rows.append(compare(repository, models, dtype, asked, ours, theirs))
    return rows


def table(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown."""
    lines = [
        "| models | recipe | at a threshold | mergefs = definition | max ULP | mergekit = definition | max ULP |"
        " within 1 ULP of each other | note |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        note = row.note
        if row.expected is not None:
            note = f"expected delta: mergefs × {row.expected[0]:.3f}, mergekit × {row.expected[1]:.3f}; {note}"
        cells = [
            row.dtype,
            row.recipe,
            _percent(row.at_threshold),
            _percent(row.mergefs),
            str(row.mergefs_ulp),
            _percent(row.mergekit),
            "-" if row.mergekit_ulp is None else str(row.mergekit_ulp),
            _percent(row.within),
            note,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.3f} %"


def mergekit_python(folder: Path) -> Path:
    """Return the Python of a virtual environment with mergekit, made where it is missing."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", MERGEKIT], check=True)
    return python


def main() -> None:
    """Print the table."""
    default = Path(tempfile.gettempdir()) / "mergefs-mergekit-0.1.5"
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parity", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mergekit", type=Path, metavar="PYTHON", help=f"a Python that has {MERGEKIT}")
    parser.add_argument("--venv", type=Path, default=default, help="where to make one otherwise (%(default)s)")
    parser.add_argument("--json", action="store_true", help="for scripts")
    options = parser.parse_args()
    python = options.mergekit or mergekit_python(options.venv)
    with tempfile.TemporaryDirectory(prefix="mergefs-parity-") as work:
        rows = measure(python, Path(work))
    print(json.dumps([asdict(row) for row in rows]) if options.json else table(rows))
    missed = [row for row in rows if row.mergefs < 0.9999]
    if missed and not options.json:
        names = "; ".join(f"{row.dtype} {row.recipe}" for row in missed)
        print(f"\nmergefs below 99.99 % of the definition: {names}", file=sys.stderr)


if __name__ == "__main__":
    main()
