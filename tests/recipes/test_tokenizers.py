"""Whose tokenizer and chat template a merged model gets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import new_repository, served, sha256
from tiny import VOCABULARY, llama, llama_config, near, write
from transformers import AutoTokenizer

from mergefs.errors import RecipeError
from mergefs.recipe import Recipe
from mergefs.repository import Repository

ANSWER = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
OTHER = "{% for m in messages %}<{{ m.role }}> {{ m.content }}{% endfor %}"


def tokenizer(tokens: list[str], template: Any = None, *, apart: bool = False) -> dict[str, bytes]:
    """Return the files of a tokenizer of whole words; the template in a file of its own where `apart`."""
    value = {
        "version": "1.0",
        "model": {"type": "WordLevel", "vocab": {t: n for n, t in enumerate(tokens)}, "unk_token": tokens[0]},
        "pre_tokenizer": {"type": "Whitespace"},
        "added_tokens": [],
    }
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": tokens[0]}
    files = {"tokenizer__json": json.dumps(value).encode()}
    if template and apart:
        files["chat_template__jinja"] = template.encode()
    elif template:
        config["chat_template"] = template
    return {**files, "tokenizer_config__json": json.dumps(config).encode()}


MODELS = {
    "base": tokenizer(["?", "one", "two"]),
    "a": tokenizer(["?", "two", "one", "three"], ANSWER),
    "b": tokenizer(["?", "one", "two"], ANSWER, apart=True),
    "c": tokenizer(
        ["?", "one", "two"], [{"name": "default", "template": OTHER}, {"name": "tools", "template": "{{ 1 }}"}]
    ),
    "large": tokenizer([f"t{n}" for n in range(VOCABULARY + 1)]),
    "mute": {},
}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Repository]:
    folder = tmp_path_factory.mktemp("tokenizers")
    state = llama(0, 2)
    with new_repository(folder / "repository") as made:
        for seed, (name, files) in enumerate(MODELS.items()):
            write(folder / name, near(state, seed) if seed else state, llama_config(2), **files)
            made.ingest(folder / name, name, base="base" if seed else None)
        yield made


def recipe(models: str = "abc", **more: Any) -> Recipe:
    listed = [{"model": name, "parameters": {"weight": 0.3}} for name in models]
    return Recipe.parse(json.dumps({"merge_method": "task_arithmetic", "base_model": "base", "models": listed, **more}))


def said(repository: Repository, name: str, folder: Path) -> str:
    """Return what a model's tokenizer makes of a conversation."""
    repository.export(name, folder)
    loaded = AutoTokenizer.from_pretrained(folder)
    return str(loaded.apply_chat_template([{"role": "user", "content": "one"}], tokenize=False))


@pytest.mark.parametrize("form", [{"tokenizer_source": "a"}, {"tokenizer": {"source": "a"}}])
@pytest.mark.parametrize("lazy", [False, True])
def test_the_tokenizer_of_another_model(repository: Repository, tmp_path: Path, form: Any, lazy: bool) -> None:
    report = repository.merge(recipe(**form), "m", lazy=lazy)
    files, wanted = served(repository, "m"), served(repository, "a")
    for path in ("tokenizer.json", "tokenizer_config.json"):
        assert files[path] == wanted[path] == sha256(MODELS["a"][path.replace(".", "__")])
    assert sum("'b' have other numbers than those of the tokenizer of 'a'" in note for note in report.notes) == 1
    repository.export("m", tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("three").input_ids == [3]
    repository.merge(recipe(), "plain")
    assert {**served(repository, "plain"), **{p: files[p] for p in files if "tokenizer" in p}} == files


def test_files_of_the_bases_tokenizer_give_way(repository: Repository) -> None:
    value = {
        "merge_method": "linear",
        "models": [{"model": "base", "parameters": {"weight": 1}}],
        "base_model": "b",
        "tokenizer_source": "a",
    }
    repository.merge(Recipe.parse(json.dumps(value)), "m")
    # The template of b lies in a file of its own, and a has none.
    assert "chat_template.jinja" not in served(repository, "m")


def test_the_bases_tokenizer_is_what_there_is_anyway(repository: Repository) -> None:
    named, silent = (repository.merge(recipe(**form), "m") for form in ({"tokenizer_source": "base"}, {}))
    assert served(repository, named.manifest) == served(repository, silent.manifest)


def test_a_template_is_written_where_loaders_look(repository: Repository, tmp_path: Path) -> None:
    repository.merge(recipe(chat_template=ANSWER), "text")
    assert said(repository, "text", tmp_path / "1") == "[user] one"
    (tmp_path / "t.jinja").write_text(OTHER)
    repository.merge(recipe(chat_template=str(tmp_path / "t.jinja")), "file")
    assert said(repository, "file", tmp_path / "2") == "<user> one"
    # b has a file of its template, which loaders prefer.
    repository.merge(recipe(chat_template=OTHER, tokenizer_source="b"), "both")
    assert said(repository, "both", tmp_path / "3") == "<user> one"
    assert json.loads((tmp_path / "3/tokenizer_config.json").read_text())["chat_template"] == OTHER


def test_the_most_frequent_template(repository: Repository, tmp_path: Path) -> None:
    repository.merge(recipe(chat_template="auto"), "abc")
    assert said(repository, "abc", tmp_path / "1") == "[user] one"
    repository.merge(recipe("ca", chat_template="auto"), "ca")
    assert said(repository, "ca", tmp_path / "2") == "<user> one"
    assert "chat_template.jinja" not in served(repository, "ca")


def test_it_stays_when_a_merge_is_done_again(repository: Repository, tmp_path: Path) -> None:
    asked = recipe(tokenizer_source="a", chat_template=OTHER)
    planned = repository.plan(asked, budget="40%")
    repository.merge_planned(planned.plan.id, "planned")
    repository.merge(asked, "coarse", budget="40%", lazy=True)
    repository.refine("coarse", budget="100%", new_name="fine")
    repository.materialize("fine")
    repository.merge(asked, "exact")
    files = [
        {p: h for p, h in served(repository, n).items() if "token" in p} for n in ("planned", "coarse", "fine", "exact")
    ]
    assert all(mine == files[0] for mine in files)
    assert said(repository, "fine", tmp_path / "out") == "<user> one"
    assert served(repository, "fine") == served(repository, "exact")


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (
            {"tokenizer_source": "large"},
            "has tokens up to number 48, and 'model.embed_tokens.weight' of the result 48 rows",
        ),
        ({"tokenizer_source": "mute"}, "is to be that of 'mute', which has none"),
        ({"chat_template": "nowhere.jinja"}, "'nowhere.jinja' is neither 'auto' nor a template"),
    ],
)
def test_what_cannot_be_is_refused(repository: Repository, form: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        repository.merge(recipe(**form), "refused")
    assert "refused" not in repository.refs()
