"""The files of a merged model: the base's, with its weights replaced and what does not apply left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mergefs.blocks.reader import BlockReader, Kind
from mergefs.checkpoint.companions import rewritten, set_dtype, set_total_size
from mergefs.checkpoint.safetensors import build_header
from mergefs.dtypes import DTYPES
from mergefs.errors import CorruptionError
from mergefs.json_input import load_json
from mergefs.manifest import Blob, FileRecipe, Lineage, Manifest, Tensor, TensorData
from mergefs.merge.derive import output_dtype
from mergefs.planner.plan import Plan
from mergefs.planner.tokenizers import CONFIG, TEMPLATE, is_tokenizers

_OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".onnx", ".gguf", ".h5", ".msgpack", ".ot")
_WEIGHT_INDEX = "model.safetensors.index.json"
_NOT_CARRIED = ("README.md", ".gitattributes")

StoreBlob = Callable[[bytes], Blob]
"""Stores bytes and returns their segment."""


class Output:
    """The skeleton of the merged model's manifest.

    Args:
        plan: of the merge.
        base: the manifest whose files are followed.
        reader: for the small files that have to be rewritten.
        store_blob: called for those that are.
    """

    def __init__(self, plan: Plan, base: Manifest, reader: BlockReader, store_blob: StoreBlob) -> None:
        self._plan = plan
        self._base = base
        self._reader = reader
        self._store_blob = store_blob
        self.retyped = any(output_dtype(plan, t) is not t.dtype for t in base.tensors)

    def manifest(self, blocks: dict[str, tuple[str | None, ...]]) -> Manifest:
        """Return the merged model's manifest.

        Args:
            blocks: the block ids of every tensor (None where they are derived on demand).
        """
        tensors = tuple(
            Tensor(t.name, output_dtype(self._plan, t), t.shape, blocks[t.name]) for t in self._base.tensors
        )
        by_name = {tensor.name: tensor for tensor in tensors}
        plan = self._plan
        files = {file.path: self._file(file, by_name) for file in self._base.files if is_carried(file)}
        if plan.tokenizer is not None:
            files = {path: file for path, file in files.items() if not is_tokenizers(path)}
            files |= {file.path: file for file in plan.tokenizer}
        if plan.chat_template is not None:
            self._set_template(files, plan.chat_template)
        lineage = Lineage("merge", plan.id, plan.base, plan.experts, plan.models)
        ordered = tuple(files[path] for path in sorted(files))
        return Manifest(self._base.block_elements, ordered, tensors, lineage)

    def _set_template(self, files: dict[str, FileRecipe], template: str) -> None:
        """Write a chat template where loaders look for it: in the tokenizer's configuration, and, where the model has a
        file of it or no such configuration, in a file of its own."""
        config = files.get(CONFIG)
        if config is not None:
            files[CONFIG] = self._rewritten(config, lambda value: value.update(chat_template=template))
        if config is None or TEMPLATE in files:
            data = template.encode()
            files[TEMPLATE] = FileRecipe(TEMPLATE, len(data), None, (self._store_blob(data),))

    def _file(self, file: FileRecipe, tensors: dict[str, Tensor]) -> FileRecipe:
        names = [s.tensor for s in file.segments if isinstance(s, TensorData)]
        if names or _is_weights(file):
            return self._weights(file, [tensors[name] for name in names])
        if self.retyped and file.path == "config.json":
            return self._rewritten(file, self._retype_config)
        if self.retyped and file.path == _WEIGHT_INDEX:
            size = sum(tensor.nbytes for tensor in tensors.values())
            return self._rewritten(file, lambda index: set_total_size(index, size))
        return file

    def _weights(self, file: FileRecipe, tensors: list[Tensor]) -> FileRecipe:
        if not self.retyped:
            return FileRecipe(file.path, file.size, None if tensors else file.sha256, file.segments)
        old = self._content(FileRecipe(file.path, 0, None, tuple(_blobs(file))))
        try:
            metadata = load_json(old[8:]).get("__metadata__")
        except ValueError as error:
            raise CorruptionError(f"the header of '{file.path}' is damaged: {error}") from error
        header = build_header([(t.name, t.dtype, t.shape) for t in tensors], metadata)
        size = len(header) + sum(tensor.nbytes for tensor in tensors)
        segments: list[Blob | TensorData] = [self._store_blob(header), *(TensorData(t.name) for t in tensors)]
        return FileRecipe(file.path, size, None, tuple(segments))

    def _rewritten(self, file: FileRecipe, change: Callable[[dict[str, Any]], None]) -> FileRecipe:
        data = rewritten(self._content(file), change)
        if data is None:
            return file
        return FileRecipe(file.path, len(data), None, (self._store_blob(data),))

    def _retype_config(self, config: dict[str, Any]) -> None:
        assert self._plan.dtype is not None
        set_dtype(config, DTYPES[self._plan.dtype])

    def _content(self, file: FileRecipe) -> bytes:
        return b"".join(bytes(self._reader.read(bytes.fromhex(blob.block), Kind.METADATA)) for blob in _blobs(file))


def _blobs(file: FileRecipe) -> list[Blob]:
    return [segment for segment in file.segments if isinstance(segment, Blob)]


def _is_weights(file: FileRecipe) -> bool:
    return any(isinstance(segment, TensorData) for segment in file.segments)


def is_carried(file: FileRecipe) -> bool:
    """Tell whether a file of the base belongs to the merge: not its model card, nor other forms of its weights."""
    if _is_weights(file) or ("/" not in file.path and file.path.endswith(".safetensors")):
        return True
    name = file.path.rpartition("/")[2]
    if name in _NOT_CARRIED or name.endswith(_OTHER_WEIGHTS):
        return False
    return not name.endswith(".index.json") or file.path == _WEIGHT_INDEX
