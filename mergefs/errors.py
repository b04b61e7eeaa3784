"""Everything that mergefs raises on purpose, as one small tree.

`exit_code` is what the command line ends with: 2 where the user can mend it (a wrong file, name or number),
1 where the repository or mergefs itself is at fault.
"""

from __future__ import annotations


class MergefsError(Exception):
    """The root: catch this to catch every error that mergefs raises on purpose."""

    exit_code = 1


class UserError(MergefsError):
    """What was asked for cannot be done as asked; the message says what to change."""

    exit_code = 2


class CheckpointError(UserError):
    """A checkpoint (directory, index or safetensors file) is damaged, incomplete or not one."""


class RecipeError(UserError):
    """A recipe has an unknown key, model or method, or a value out of range."""


class BudgetError(UserError):
    """A budget is not a size or a share, is zero, or cannot be planned for."""


class PlanError(UserError):
    """A stored plan was made for other statistics than the catalog's."""


class ImportanceError(UserError):
    """A file of importances is malformed, or does not fit the models."""


class RefNameError(UserError):
    """A ref's name is malformed."""


class RefMovedError(UserError):
    """A ref names another model than was expected."""


class NotFoundError(UserError):
    """A ref, manifest, plan, file or tensor that was named does not exist."""


class DestinationError(UserError):
    """A place to write to (export, mount, init) is not empty, not a folder or not usable."""


class NotARepositoryError(UserError):
    """The folder is not a mergefs repository."""


class CatalogMissingError(MergefsError):
    """The repository has no catalog, or an empty file for one."""


class FormatVersionError(UserError):
    """The repository was written by a newer mergefs, or by an older one and is to be migrated."""


class MountError(UserError):
    """A mount cannot be made or removed here."""


class CorruptionError(MergefsError):
    """Stored data is missing or is not what its name says."""


class CatalogDamagedError(CorruptionError):
    """The catalog, or an entry of it, is not what was written."""


class BlocksCollectedError(MergefsError):
    """Blocks or models that were going to be used have been collected in the meantime: start again."""


class BudgetExceededError(MergefsError):
    """A read would have passed the merge's budget. The planner and the reader disagree: a bug of ours."""
