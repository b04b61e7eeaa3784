"""Whose tokenizer and chat template a merged model gets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mergefs.errors import RecipeError
from mergefs.json_input import load_json
from mergefs.manifest import Blob, FileRecipe, Manifest
from mergefs.planner.vocabulary import ReadBlob, embedding
from mergefs.recipe import Recipe

CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
_TOKENS = "tokenizer.json"
_FILES = frozenset(
    (
        *(CONFIG, TEMPLATE, _TOKENS, "chat_template.json", "special_tokens_map.json", "added_tokens.json"),
        *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt", "merges.txt"),
    )
)
_FOLDERS = ("additional_chat_templates/",)


def is_tokenizers(path: str) -> bool:
    """Tell whether a file of a model is one of its tokenizer."""
    return path in _FILES or path.startswith(_FOLDERS)


def tokenizer_files(model: Manifest) -> tuple[FileRecipe, ...]:
    """Return the files of a model's tokenizer."""
    return tuple(file for file in model.files if is_tokenizers(file.path))


def fit_tokenizer(
    recipe: Recipe, chosen: Manifest, base: Manifest, named: Mapping[str, Manifest], read: ReadBlob
) -> tuple[tuple[FileRecipe, ...] | None, list[str]]:
    """Return the tokenizer's files where they are not the base's, and sentences about models whose tokens are others.

    Args:
        recipe: that names the tokenizer's model.
        chosen: that model.
        base: whose files the result follows, and whose rows its embedding has.
        named: all models of the recipe.
        read: for files of tokenizers.

    Raises:
        RecipeError: when that model has no tokenizer, or one of more tokens than the result has embeddings.
    """
    files, whose = tokenizer_files(chosen), recipe.tokenizer_of
    if not files:
        raise RecipeError(f"the tokenizer is to be that of '{whose}', which has none")
    tokens, rows = _tokens(chosen, read), embedding(base)
    if tokens and rows is not None and rows.shape and max(tokens.values()) >= rows.shape[0]:
        raise RecipeError(
            f"the tokenizer of '{whose}' has tokens up to number {max(tokens.values()):,}, and '{rows.name}' of the"
            f" result {rows.shape[0]:,} rows: give that model as base_model, or another tokenizer"
        )
    notes = [
        f"tokens of '{name}' have other numbers than those of the tokenizer of '{whose}': rows of embeddings are merged"
        " by their numbers"
        for name, model in named.items()
        if (theirs := _tokens(model, read)) and tokens and any(tokens.get(t, n) != n for t, n in theirs.items())
    ]
    return (None if files == tokenizer_files(base) else files), notes


def choose_template(recipe: Recipe, named: Mapping[str, Manifest], read: ReadBlob) -> str | None:
    """Return the text of the chat template that the recipe asks for; None where it asks for none, or for the models'
    most frequent one and no model has one.

    Args:
        recipe: what is asked for.
        named: its models; of templates that are equally frequent the first one's counts.
        read: for their files.

    Raises:
        RecipeError: when it is neither a template nor a file.
    """
    asked = recipe.chat_template
    if asked is None:
        return None
    if asked == "auto":
        found = [template.strip() for model in named.values() if (template := _template_of(model, read))]
        return Counter(found).most_common(1)[0][0] if found else None
    if "{" in asked:
        return asked
    try:
        return Path(asked).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise RecipeError(
            f"the chat_template {asked!r} is neither 'auto' nor a template (it has no '{{') nor a file that can be read"
        ) from error


def _template_of(model: Manifest, read: ReadBlob) -> str | None:
    file = model.file_by_path.get(TEMPLATE)
    if file is not None:
        return _content(file, read).decode(errors="replace")
    config = _json(model, CONFIG, read)
    found = config.get("chat_template")
    if isinstance(found, list):
        found = next((t.get("template") for t in found if isinstance(t, dict) and t.get("name") == "default"), None)
    return found if isinstance(found, str) else None


def _tokens(model: Manifest, read: ReadBlob) -> dict[str, int]:
    """Return the numbers of a model's tokens, as far as its `tokenizer.json` says."""
    value = _json(model, _TOKENS, read)
    vocabulary = value.get("model", {}).get("vocab", {}) if isinstance(value.get("model"), dict) else {}
    found: dict[str, int] = {}
    if isinstance(vocabulary, dict):
        found = {token: number for token, number in vocabulary.items() if isinstance(number, int)}
    elif isinstance(vocabulary, list):
        found = {
            item[0]: number
            for number, item in enumerate(vocabulary)
            if isinstance(item, list) and item and isinstance(item[0], str)
        }
    added = value.get("added_tokens")
    for item in added if isinstance(added, list) else ():
        if isinstance(item, dict) and isinstance(item.get("id"), int) and isinstance(item.get("content"), str):
            found[item["content"]] = item["id"]
    return found


def _json(model: Manifest, path: str, read: ReadBlob) -> dict[str, Any]:
    file = model.file_by_path.get(path)
    try:
        value = None if file is None else load_json(_content(file, read))
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {}


def _content(file: FileRecipe, read: ReadBlob) -> bytes:
    return b"".join(read(segment) for segment in file.segments if isinstance(segment, Blob))
