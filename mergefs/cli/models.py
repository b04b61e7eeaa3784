"""Commands about models and their names."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import click

from mergefs.cli.common import emit, json_option, keep_freed_memory, progress, repository, table, threads_option
from mergefs.errors import CorruptionError
from mergefs.repository import Repository
from mergefs.units import format_size

_KINDS = {"model": "", "adapter": ", a LoRA adapter (recipes name it as BASE+NAME)", "delta": ", a delta"}
_FORMATS = {"safetensors": "", "zarr": ", from a Zarr group"}


@click.command()
@click.argument("checkpoint")
@click.option("--as", "name", required=True, metavar="NAME", help="The model's name here.")
@click.option("--base", metavar="REF", help="The model that it was fine-tuned from.")
@click.option(
    "--kind",
    type=click.Choice(["model", "delta"]),
    default="model",
    help="A delta's tensors are added to the base's. (A LoRA adapter is recognised.)",
)
@threads_option
@json_option
@click.pass_obj
def ingest(
    repo: str | None, checkpoint: str, name: str, base: str | None, kind: str, threads: int | None, as_json: bool
) -> None:
    """Take in CHECKPOINT: a Hugging Face directory, a safetensors file, or the folder of a Zarr group."""
    keep_freed_memory()
    with repository(repo) as opened, progress("ingesting") as tell:
        report = opened.ingest(checkpoint, name, base=base, kind=kind, threads=threads, progress=tell)
    moved = f"\n'{name}' named {report.previous[:12]} before" if report.previous else ""
    share = f" ({report.stored_bytes / report.raw_bytes:.1%})" if report.raw_bytes else ""
    emit(
        report,
        as_json,
        lambda: (
            f"{name} is {report.manifest[:12]}{_KINDS[report.kind]}{_FORMATS[report.format]}:"
            f" {format_size(report.raw_bytes)} took"
            f" {format_size(report.stored_bytes)}{share}, {report.blocks_new} new blocks and"
            f" {report.blocks_reused} that were there, in {report.seconds:.1f} s{moved}"
        ),
    )


@click.command()
@json_option
@click.pass_obj
def ls(repo: str | None, as_json: bool) -> None:
    """List the refs."""
    with repository(repo) as opened:
        models = [_listed(opened, name, identity) for name, identity in sorted(opened.refs().items())]
    rows = [
        [
            m["ref"],
            m["manifest"][:12],
            format_size(m["raw_bytes"]),
            m["kind"] + (", lazy" if m["lazy"] else ""),
        ]
        for m in models
    ]
    emit({"models": models}, as_json, lambda: table(rows, right=(2,)))


@click.command()
@click.argument("ref")
@json_option
@click.pass_obj
def show(repo: str | None, ref: str, as_json: bool) -> None:
    """Describe the model REF: its files, tensors and lineage."""
    from mergefs.inspection import show as describe

    with repository(repo) as opened:
        found = describe(opened, ref)
    emit(found, as_json, lambda: _describe(found))


@click.command()
@click.argument("ref")
@json_option
@click.pass_obj
def log(repo: str | None, ref: str, as_json: bool) -> None:
    """Show where the model REF came from."""
    from mergefs.inspection import lineage

    with repository(repo) as opened:
        found = lineage(opened, ref)
    emit(found, as_json, lambda: _lineage(found))


@click.command()
@click.argument("first")
@click.argument("second")
@json_option
@click.pass_obj
def diff(repo: str | None, first: str, second: str, as_json: bool) -> None:
    """Show which files, tensors and blocks differ between the models FIRST and SECOND."""
    from mergefs.inspection import diff as compare

    with repository(repo) as opened:
        found = compare(opened, first, second)
    emit(found, as_json, lambda: _differences(found))


@click.command()
@click.argument("ref")
@click.argument("name")
@json_option
@click.pass_obj
def tag(repo: str | None, ref: str, name: str, as_json: bool) -> None:
    """Let NAME name the model REF."""
    with repository(repo) as opened:
        identity = opened.tag(name, ref)
    emit({"ref": name, "manifest": identity}, as_json, lambda: f"{name} is {identity[:12]}")


@click.command()
@click.argument("refs", nargs=-1, required=True)
@json_option
@click.pass_obj
def rm(repo: str | None, refs: tuple[str, ...], as_json: bool) -> None:
    """Remove REFS; 'mergefs gc' then frees what nothing else needs."""
    with repository(repo) as opened:
        removed = opened.remove(refs)
        kept: dict[str, str] = {}
        with suppress(CorruptionError):  # gc and fsck say so
            kept = {session.id: session.manifest for session in opened.sessions()}
    lines = [f"removed {name} ({identity[:12]})" for name, identity in removed.items()]
    lines += [
        f"session {session} keeps {identity[:12]} until it is committed or discarded"
        for session, identity in kept.items()
        if identity in removed.values()
    ]
    emit({"removed": removed}, as_json, lambda: "\n".join(lines))


def _listed(opened: Repository, name: str, identity: str) -> dict[str, Any]:
    manifest = opened.manifest(identity)
    return {
        "ref": name,
        "manifest": identity,
        "raw_bytes": manifest.raw_bytes,
        "kind": _kind(opened, identity, manifest.lineage.kind),
        "lazy": manifest.is_lazy,
        "time": opened.manifest_time(identity),
    }


def _kind(opened: Repository, identity: str, kind: str) -> str:
    """Return what a listing calls a model: what it was ingested as, where that is not a whole model."""
    ingested = opened.manifest_entry(identity).get("kind", "model")
    return kind if ingested == "model" else str(ingested)


def _describe(found: dict[str, Any]) -> str:
    names = ", ".join(found["refs"]) or "no ref"
    rows = [[f["path"], format_size(f["size"]), f["sha256"] or "not computed yet"] for f in found["files"]]
    elements = f"{len(found['tensors'])} tensors, {sum(t['blocks'] for t in found['tensors'])} blocks"
    return "\n".join(
        [
            f"manifest {found['manifest']} ({names}){', lazy' if found['lazy'] else ''}",
            elements,
            table(rows, right=(1,)),
            _lineage(found["lineage"]),
        ]
    )


def _lineage(found: dict[str, Any]) -> str:
    from mergefs.inspection import ago

    lines = [f"{found['kind']} {found['manifest'][:12]}, {ago(found['time'])}"]
    if found.get("parent"):
        lines.append(f"  of       {_model(found['parent'])}")
    if found.get("base"):
        lines.append(f"  base     {_model(found['base'])}")
    lines += [f"  expert   {_model(expert)}" for expert in found.get("experts", ())]
    if "plan" in found:
        lines.append(f"  plan     {found['plan'][:12]}")
    if found.get("read"):
        budget = found["budget_bytes"]
        lines.append(
            f"  read     {format_size(found['read']['expert'])} of {format_size(found['expert_raw_bytes'])}"
            f" of experts (budget {format_size(budget) if budget is not None else 'none'}),"
            f" {format_size(found['read']['base'])} of the base"
        )
    if found.get("refines"):
        lines.append(f"  refines  {_model(found['refines'])}")
    lines += [f"  refined as {_model(later)}" for later in found.get("refined_as", ())]
    if found.get("recipe"):
        lines += ["  recipe", *(f"    {line}" for line in found["recipe"].strip().splitlines())]
    return "\n".join(lines)


def _model(model: dict[str, Any]) -> str:
    return f"{model['manifest'][:12]} {', '.join(model['refs'])}".rstrip()


def _differences(found: dict[str, Any]) -> str:
    lines = [f"file {f['path']}" + (f" only in {f['only_in']}" if "only_in" in f else "") for f in found["files"]]
    for tensor in found["tensors"]:
        if "only_in" in tensor:
            lines.append(f"tensor {tensor['name']} only in {tensor['only_in']}")
        elif "shapes" in tensor:
            a, b = tensor["shapes"]
            lines.append(f"tensor {tensor['name']} {tensor['dtypes'][0]} {a} and {tensor['dtypes'][1]} {b}")
        else:
            lines.append(
                f"tensor {tensor['name']} {len(tensor['differing_blocks'])} of {tensor['blocks']} blocks differ"
            )
    lines.append(f"{found['equal_blocks']} blocks are equal")
    return "\n".join(lines)
