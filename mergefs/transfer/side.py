"""What a transfer needs of either side: a repository on this machine, or an archive behind an fsspec URL."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from mergefs.blocks.pack import Record
from mergefs.catalog.tables import Location
from mergefs.manifest import Manifest


@dataclass(frozen=True)
class Model:
    """What a ref names, with all that it needs.

    Attributes:
        manifest: of the model.
        others: the manifests of the models from which its open blocks are derived; none unless it is lazy.
        plan: the id and the canonical form of the plan that it came from, or None.
    """

    manifest: Manifest
    others: tuple[Manifest, ...]
    plan: tuple[str, bytes] | None

    def block_ids(self) -> set[bytes]:
        """Return the blocks that all these manifests hold."""
        return {block for manifest in (self.manifest, *self.others) for block in manifest.block_ids()}


class Receiver(ABC):
    """Takes in one model."""

    @abstractmethod
    def has(self, block: bytes) -> bool:
        """Tell whether a block is there already; it stays until the transfer ends."""

    @abstractmethod
    def stands_alone(self, block: bytes) -> bool:
        """Tell whether a block that is there is encoded by itself, so that others can be encoded against it."""

    @abstractmethod
    def add(self, records: Sequence[Record], payloads: Sequence[bytes]) -> None:
        """Take in a block: the records of all its tiers and their payloads."""

    @abstractmethod
    def publish(self, model: Model, name: str, *, replace: bool) -> None:
        """Make what was taken in durable, and a ref name it.

        Raises:
            RefMovedError: when the ref names another model, and is not to be replaced.
        """

    @property
    @abstractmethod
    def added_bytes(self) -> int:
        """How many bytes were written so far."""


class Side(ABC):
    """One side of a transfer."""

    @property
    @abstractmethod
    def block_elements(self) -> int:
        """Elements of a block; both sides have to cut alike."""

    @abstractmethod
    def resolve(self, name: str) -> str:
        """Return the id of the manifest that a ref or an id names.

        Raises:
            NotFoundError: when there is none.
        """

    @abstractmethod
    def manifest(self, identity: str) -> Manifest:
        """Return a manifest, checked against its id."""

    @abstractmethod
    def plan(self, identity: str) -> bytes:
        """Return the bytes of a plan, checked against its id."""

    @abstractmethod
    def tiers(self, block: bytes) -> tuple[Location, ...]:
        """Return where the tiers of a block lie; () when it is not there."""

    @abstractmethod
    def payloads(self, locations: Iterable[Location]) -> list[bytes]:
        """Return the bytes at some places, as they are."""

    @abstractmethod
    def sending(self, identities: Iterable[str]) -> AbstractContextManager[object]:
        """Keep models from being collected while they are read."""

    @abstractmethod
    def receiving(self) -> AbstractContextManager[Receiver]:
        """Begin to take in a model."""
