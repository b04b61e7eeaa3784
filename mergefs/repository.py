"""`Repository`: everything that can be done with a repository, in one object. The command line is a thin layer
over it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergefs.again import again_if_collected
from mergefs.store import Store

if TYPE_CHECKING:
    from mergefs.edit.folders import SessionInfo
    from mergefs.edit.session import Session
    from mergefs.fsck import FsckReport
    from mergefs.gc import GcReport
    from mergefs.ingest import IngestReport, Progress
    from mergefs.inspection import StatsReport
    from mergefs.merge.accuracy import ErrorReport
    from mergefs.merge.engine import RefineReport
    from mergefs.merge.remembered import Forecast
    from mergefs.merge.run import MergeReport
    from mergefs.planner.aim import Aim
    from mergefs.planner.resolve import Planned
    from mergefs.recipe import Recipe
    from mergefs.repack import RepackReport
    from mergefs.repair import RepairReport
    from mergefs.serve.export import ExportReport
    from mergefs.serve.mount import MountInfo
    from mergefs.serve.verify import VerifyReport
    from mergefs.serve.view import View
    from mergefs.serve.zarr_store import BlockStore, ModelStore
    from mergefs.transfer.copy import TransferReport


class Repository(Store):
    """An open repository; see `Repository.init` and `Repository.open`.

    Modules that do the work are imported when they are first needed.
    """

    def ingest(
        self,
        path: str | Path,
        name: str,
        *,
        base: str | None = None,
        kind: str = "model",
        threads: int | None = None,
        progress: Progress | None = None,
    ) -> IngestReport:
        """Take in a checkpoint; see `mergefs.ingest.ingest`, and for the folder of a Zarr group `ingest_zarr`."""
        from mergefs.checkpoint.directory import is_zarr

        if is_zarr(path):
            return self.ingest_zarr(path, name, base=base, kind=kind, threads=threads, progress=progress)
        from mergefs.ingest import ingest

        return ingest(self, path, name, base=base, kind=kind, threads=threads, progress=progress)

    def ingest_zarr(self, group: Any, as_: str, **options: Any) -> IngestReport:
        """Take in the arrays of a Zarr group as a model; see `mergefs.serve.zarr_ingest.ingest_zarr`."""
        from mergefs.serve.zarr_ingest import ingest_zarr

        return ingest_zarr(self, group, as_, **options)

    @again_if_collected
    def plan(
        self, recipe: Recipe, *, seed: int = 0, save: bool = True, strict_shapes: bool = False, **aim: Any
    ) -> Planned:
        """Resolve a recipe without running it; see `mergefs.planner.resolve.make_plan`.

        Args:
            recipe: what is asked for.
            seed: of random methods.
            save: whether the plan is stored until the next gc.
            strict_shapes: refuse models whose tensors' names and shapes are not the same.
            aim: `budget`, `max_error`, `planner`, `importance`; see `mergefs.planner.aim.Aim`.
        """
        from mergefs.blocks.reader import ReadCounter
        from mergefs.planner.aim import Aim
        from mergefs.planner.fitting import fit_models
        from mergefs.planner.models import find_models
        from mergefs.planner.resolve import make_plan
        from mergefs.store import plan_name

        models = find_models(self, recipe)
        with self.reading("plan", models.all) as lease:
            counter = ReadCounter()
            models = fit_models(self, recipe, models, lease, counter, strict=strict_shapes)
            planned = make_plan(self, recipe, models, Aim(**aim), seed=seed, counter=counter)
            if save:
                self.backend.put(plan_name(planned.plan.id), planned.plan.encoded)
        return planned

    def forecast(self, planned: Planned) -> Forecast:
        """Return which of a plan's blocks are stored already, and how many are remembered."""
        from mergefs.merge.remembered import forecast

        return forecast(self, planned.plan, planned.base, planned.experts)

    def merge(self, recipe: Recipe, name: str, **options: Any) -> MergeReport:
        """Merge models; see `mergefs.merge.engine.merge` for the options, and `plan` for what may be read."""
        from mergefs.merge.engine import merge

        return merge(self, recipe, name, aim=_aim(options), **options)

    def merge_planned(self, plan: str, name: str, **options: Any) -> MergeReport:
        """Run a stored plan; see `mergefs.merge.engine.merge_planned`."""
        from mergefs.merge.engine import merge_planned

        return merge_planned(self, plan, name, **options)

    def refine(self, name: str, **options: Any) -> RefineReport:
        """Merge again with a larger budget; see `mergefs.merge.engine.refine`, and `plan` for what may be read."""
        from mergefs.merge.engine import refine

        return refine(self, name, _aim(options), **options)

    def measure_error(self, name: str, predicted: float | None = None, **options: Any) -> ErrorReport:
        """Derive a merge exactly as well, and compare; see `mergefs.merge.accuracy.measure_error`."""
        from mergefs.merge.accuracy import measure_error

        return measure_error(self, name, predicted, **options)

    def materialize(self, name: str, **options: Any) -> MergeReport:
        """Derive and store a lazy merge's blocks; see `mergefs.merge.engine.materialize`."""
        from mergefs.merge.engine import materialize

        return materialize(self, name, **options)

    def view(self, name: str, **options: Any) -> View:
        """Open a model for reading; see `mergefs.serve.view.View`."""
        from mergefs.serve.view import View

        return View(self, name, **options)

    def zarr(self, name: str) -> ModelStore:
        """Return a model as a read-only Zarr v3 store; see `mergefs.serve.zarr_store.ModelStore`."""
        from mergefs.serve.zarr_store import ModelStore

        return ModelStore(self.view(name))

    def blocks(self) -> BlockStore:
        """Return the blocks as a read-only Zarr store, keyed by block id."""
        from mergefs.serve.zarr_store import BlockStore

        return BlockStore(self)

    def mount(self, directory: str | Path, name: str | None = None, **options: Any) -> MountInfo:
        """Mount one model, or everything; see `mergefs.serve.mount.mount`."""
        from mergefs.serve.mount import mount

        own = {"sync": self.sync, "check_blocks": self.check_blocks}
        return mount(self.path, name, Path(directory), **{**own, **options})

    def edit(self, name: str | None = None, *, resume: str | None = None) -> Session:
        """Open a model for writing, or with `resume` go on with a session; see `mergefs.edit.session.Session`."""
        from mergefs.edit.session import Session

        if (name is None) == (resume is None):
            raise TypeError("edit takes a model's name, or a session to resume")
        return Session.begin(self, name) if name is not None else Session.resume(self, resume or "")

    def sessions(self) -> list[SessionInfo]:
        """Return the sessions that are neither committed nor discarded; see `mergefs.edit.folders.SessionInfo`."""
        from mergefs.edit.folders import sessions

        return list(sessions(self))

    def export(self, name: str, directory: str | Path, **options: Any) -> ExportReport:
        """Write a model as an ordinary directory, here or at a URL; see `mergefs.serve.export.export`."""
        from mergefs.serve.export import export

        with self.view(name) as view:
            return export(view, directory, **options)

    def verify_export(self, name: str, directory: str | Path, **options: Any) -> VerifyReport:
        """Compare a directory with a model; see `mergefs.serve.verify.verify_export`."""
        from mergefs.serve.verify import verify_export

        with self.view(name) as view:
            return verify_export(view, directory, **options)

    def gc(self, *, dry_run: bool = False, **options: Any) -> GcReport:
        """Free what nothing needs; see `mergefs.gc.collect`."""
        from mergefs.gc import collect

        return collect(self, dry_run=dry_run, **options)

    def repack(self, exact: str | None = None, **options: Any) -> RepackReport:
        """Write the exact tiers of stored experts in another coding; see `mergefs.repack.repack`."""
        from mergefs.repack import repack

        return repack(self, exact, **options)

    def fsck(self, *, read_data: bool = False, progress: Progress | None = None) -> FsckReport:
        """Check the repository; see `mergefs.fsck.check`."""
        from mergefs.fsck import check

        return check(self, read_data=read_data, progress=progress)

    def repair(self, *, progress: Progress | None = None) -> RepairReport:
        """Mend what can be mended; see `mergefs.repair`."""
        from mergefs.repair import repair

        return repair(self, progress=progress)

    def push(self, name: str, remote: str, **options: Any) -> TransferReport:
        """Send a model to another repository or an archive; see `mergefs.transfer.copy.push`."""
        from mergefs.transfer.copy import push

        return push(self, name, remote, **options)

    def pull(self, name: str, remote: str, **options: Any) -> TransferReport:
        """Fetch a model from another repository or an archive; see `mergefs.transfer.copy.pull`."""
        from mergefs.transfer.copy import pull

        return pull(self, name, remote, **options)

    def stats(self) -> StatsReport:
        """Return how much the repository holds."""
        from mergefs.inspection import stats

        return stats(self)


def _aim(options: dict[str, Any]) -> Aim:
    """Take what says what may be read out of the options."""
    from mergefs.planner.aim import Aim

    return Aim(**{key: options.pop(key) for key in ("budget", "max_error", "planner", "importance") if key in options})
