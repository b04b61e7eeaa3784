"""Which tensors have one row for each entry of a vocabulary, by their names, and which models tie them."""

from __future__ import annotations

from collections.abc import Callable

from mergefs.json_input import load_json
from mergefs.manifest import Blob, Manifest, Tensor

_EMBEDDINGS = (
    "embed_tokens.weight",
    "wte.weight",
    "embed_in.weight",
    "word_embeddings.weight",
    "tok_embeddings.weight",
)
_HEADS = ("lm_head.weight", "embed_out.weight", "predictions.decoder.weight")
_BIASES = ("lm_head.bias", "predictions.decoder.bias", "predictions.bias")

ReadBlob = Callable[[Blob], bytes]
"""Returns the bytes of a stored blob."""


def has_rows_of_vocabulary(name: str) -> bool:
    """Tell whether a tensor has one row for each entry of the vocabulary."""
    return _ends(name, (*_EMBEDDINGS, *_HEADS, *_BIASES))


def head(model: Manifest) -> Tensor | None:
    """Return the matrix that turns hidden states into scores of the vocabulary; None where a model has none of its
    own, or several."""
    return _only(model, _HEADS)


def embedding(model: Manifest) -> Tensor | None:
    """Return the matrix of the vocabulary's embeddings; None where a model has none, or several."""
    return _only(model, _EMBEDDINGS)


def ties(model: Manifest, read: ReadBlob) -> bool:
    """Tell whether a model uses its embedding as its head: as its config says, or, where that is silent, because it has
    no head."""
    file = model.file_by_path.get("config.json")
    config = None
    if file is not None:
        try:
            config = load_json(b"".join(read(s) for s in file.segments if isinstance(s, Blob)))
        except ValueError:
            config = None
    said = config.get("tie_word_embeddings") if isinstance(config, dict) else None
    if isinstance(said, bool):
        return said
    return head(model) is None and embedding(model) is not None


def _only(model: Manifest, endings: tuple[str, ...]) -> Tensor | None:
    found = [tensor for tensor in model.tensors if _ends(tensor.name, endings)]
    return found[0] if len(found) == 1 else None


def _ends(name: str, endings: tuple[str, ...]) -> bool:
    return any(name == ending or name.endswith("." + ending) for ending in endings)
