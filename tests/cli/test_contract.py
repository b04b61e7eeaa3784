"""What scripts rely on: keys of the JSON, exit codes, and how the repository is found."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
from builders import fine_tuned, random_model, recipe_text, tree, write_model
from click.testing import CliRunner

from mergefs.cli import _COMMANDS, cli, main


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def value(self) -> dict[str, Any]:
        """The one JSON object on stdout."""
        assert self.out.count("\n") == 1, self.out
        assert self.out.endswith("\n")
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found


def run(*arguments: object, cwd: Path | None = None, **environment: str) -> Ran:
    """Run the command line in a process of its own, outside any repository unless told."""
    clean = {key: value for key, value in os.environ.items() if key != "MERGEFS_REPO"}
    done = subprocess.run(
        [sys.executable, "-m", "mergefs", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd or "/",
        env={**clean, **environment},
        timeout=120,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return Ran(done.returncode, done.stdout, done.stderr)


def call(*arguments: object, cwd: Path | None = None, **environment: str) -> Ran:
    """Do what `run` does in this process: for commands that another test here has run in one of their own."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.delenv("MERGEFS_REPO", raising=False)
        for key, value in environment.items():
            patch.setenv(key, value)
        patch.setattr(sys, "argv", ["mergefs", *map(str, arguments)])
        patch.chdir(cwd or "/")
        with pytest.raises(SystemExit) as ended:
            main()
    code = ended.value.code
    assert isinstance(code, int)
    return Ran(code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and recipes to work with; the tests below go through one repository in the order of a day's work."""
    made = tmp_path_factory.mktemp("contract")
    base = random_model(1)
    write_model(made / "base", base, {"config.json": b"{}"})
    write_model(made / "x", fine_tuned(base, 2), {"config.json": b"{}"})
    write_model(made / "y", fine_tuned(base, 3), {"config.json": b"{}"})
    (made / "recipe.yml").write_text(recipe_text("ties", ["x", "y"], "base", weight=0.5, density=0.5))
    (made / "paths.yml").write_text(recipe_text("linear", [str(made / "x"), str(made / "y")], weight=0.5))
    return made


@pytest.fixture(scope="module")
def repo(folder: Path) -> Path:
    """A repository made by the command line, with everything ingested and merged; keys are checked on the way."""
    path = folder / "repo"
    made = run("init", path, "--block-size", "4KiB", "--json")
    assert made.code == 0, made.err
    assert made.value == {"repository": str(path), "block_size": 4096, "exact": "fast", "version": 3}
    ingested = {}
    for name in ("base", "x", "y"):
        against = () if name == "base" else ("--base", "base")
        done = run("-R", path, "ingest", folder / name, "--as", name, *against, "--json")
        assert done.code == 0, done.err
        ingested[name] = done.value
    for name, value in ingested.items():
        keys = {"manifest", "ref", "raw_bytes", "stored_bytes", "blocks_new", "blocks_reused", "seconds"}
        assert keys <= value.keys()
        assert value["ref"] == name
        assert value["raw_bytes"] == sum(path.stat().st_size for path in (folder / name).iterdir())
    return path


MERGE_KEYS = {
    "plan",
    "manifest",
    "ref",
    "budget_bytes",
    "expert_raw_bytes",
    "read",
    "written_bytes",
    "blocks",
    "seconds",
}


def merged(value: dict[str, Any]) -> dict[str, Any]:
    """Check the keys that plan and merge have in common."""
    assert value.keys() >= MERGE_KEYS
    assert value["read"].keys() >= {"expert", "base", "metadata"}
    assert value["blocks"].keys() >= {"shared", "derived", "lazy"}
    return value


def test_a_recipe_is_checked(repo: Path, folder: Path) -> None:
    value = run("-R", repo, "recipe", "check", folder / "recipe.yml", "--json").value
    assert value.keys() >= {"method", "base", "models", "dtype", "ignored", "groups"}
    assert value["ignored"] == []
    tensors = call("-R", repo, "show", value["base"], "--json").value["tensors"]
    names = {tensor["name"] for tensor in tensors if "F" in tensor["dtype"]}
    assert {name for group in value["groups"] for name in group["tensors"]} == names
    assert all(len(group["experts"]) == len(value["models"]) == 2 for group in value["groups"])
    assert "weight" in call("-R", repo, "recipe", "check", folder / "recipe.yml").out


def test_parameters_of_other_methods_are_ignored_and_told(repo: Path, folder: Path) -> None:
    plain, more = folder / "plain.yml", folder / "more.yml"
    own = {"weight": 0.5}
    plain.write_text(recipe_text("task_arithmetic", [("x", own)], "base"))
    more.write_text(recipe_text("task_arithmetic", [("x", {**own, "density": 0.3})], "base", rescale=True))
    value = call("-R", repo, "recipe", "check", more, "--json").value
    assert value["ignored"] == ["rescale", "density"]
    assert value["groups"] == call("-R", repo, "recipe", "check", plain, "--json").value["groups"]
    assert "ignored" in call("-R", repo, "recipe", "check", more).out


def test_plan_explain_and_merge(repo: Path, folder: Path) -> None:
    plan = merged(run("-R", repo, "plan", folder / "recipe.yml", "--budget", "10%", "--json").value)
    explained = merged(run("-R", repo, "explain", folder / "recipe.yml", "--budget", "10%", "--json").value)
    assert (plan["manifest"], plan["ref"]) == (None, None)
    assert explained["plan"] == plan["plan"]
    assert len(explained["experts"]) == 2
    rows = {"name", "blocks", "blocks_read", "bytes", "bytes_read", "tier_bytes", "error", "cancelled"}
    assert all(row.keys() >= rows for row in [*explained["experts"], *explained["layers"], *explained["kinds"]])
    done = run("-R", repo, "merge", folder / "recipe.yml", "--as", "tenth", "--budget", "10%", "--json")
    assert done.code == 0, done.err
    value = merged(done.value)
    assert value["plan"] == plan["plan"]
    assert value["ref"] == "tenth"
    assert value["budget_bytes"] == value["expert_raw_bytes"] // 10 == plan["budget_bytes"]
    assert 0 < value["read"]["expert"] == plan["read"]["expert"] <= value["budget_bytes"]
    assert value["blocks"]["lazy"] == 0
    # Which derived blocks turn out to be stored already is not known beforehand.
    assert sum(value["blocks"].values()) == sum(plan["blocks"][key] for key in value["blocks"])
    assert 0 < value["blocks"]["derived"] <= plan["blocks"]["derived"]


def test_lazy_merge_and_materialize(repo: Path, folder: Path) -> None:
    recipe = folder / "recipe.yml"
    options = ("--seed", 3, "--max-memory", "1GiB", "--threads", 1, "--json")
    lazy = merged(call("-R", repo, "merge", recipe, "--as", "later", "--lazy", *options).value)
    assert lazy["blocks"]["lazy"] > 0
    stored = merged(run("-R", repo, "materialize", "later", "--json").value)
    eager = merged(call("-R", repo, "merge", recipe, "--as", "now", *options).value)
    assert stored["manifest"] == eager["manifest"] != lazy["manifest"]


def test_merge_with_ingest(folder: Path) -> None:
    path = folder / "other"
    call("init", path)
    (path / "base").mkdir()  # what is in the working folder is a path, not a model
    refused = call("-R", path, "merge", folder / "paths.yml", "--as", "m", "--json")
    assert (refused.code, refused.out) == (2, "")
    done = call("-R", path, "merge", folder / "paths.yml", "--as", "m", "--ingest", "--json")
    assert done.code == 0, done.err
    merged(done.value)
    assert {m["ref"] for m in call("-R", path, "ls", "--json").value["models"]} == {"m", "x", "y"}


def test_looking(repo: Path, folder: Path) -> None:
    shown = run("-R", repo, "show", "x", "--json").value
    assert shown.keys() >= {"manifest", "files", "tensors", "lineage"}
    assert {file["path"]: file["sha256"] for file in shown["files"]} == tree(folder / "x")
    assert all(file.keys() >= {"path", "size", "sha256"} for file in shown["files"])
    prefix = shown["manifest"][:8]
    assert call("-R", repo, "show", prefix, "--json").value["manifest"] == shown["manifest"]
    models = run("-R", repo, "ls", "--json").value["models"]
    assert {"base", "x", "y"} <= {model["ref"] for model in models}
    call("-R", repo, "merge", folder / "recipe.yml", "--as", "logged", "--budget", "50%", "--json")
    log = run("-R", repo, "log", "logged", "--json").value
    assert log.keys() >= {"manifest", "plan", "base", "experts", "budget_bytes", "read", "recipe"}
    assert log["recipe"] == (folder / "recipe.yml").read_text()
    assert log["base"]["refs"] == ["base"]
    differences = run("-R", repo, "diff", "base", "x", "--json").value
    names = {tensor["name"] for tensor in differences["tensors"]}
    assert {"embed.weight", "layers.0.experts"} <= names <= set(random_model(1)) - {"positions"}
    stats = run("-R", repo, "stats", "--json").value
    assert stats.keys() >= {"raw_bytes", "stored_bytes", "refs", "manifests", "blocks", "packs"}
    for command in (("show", "x"), ("ls",), ("log", "logged"), ("diff", "base", "x"), ("stats",)):
        done = CliRunner().invoke(cli, ["-R", str(repo), *command])
        assert done.exit_code == 0
        assert done.stdout.strip()


def test_export(repo: Path, folder: Path) -> None:
    done = run("-R", repo, "export", "x", folder / "out", "--json")
    assert done.code == 0, done.err
    assert done.value.keys() >= {"directory", "files", "bytes", "seconds"}
    assert tree(folder / "out") == tree(folder / "x")


@pytest.mark.fuse
def test_mount(repo: Path, folder: Path) -> None:
    done = run("-R", repo, "mount", "x", folder / "mounted", "--json")
    assert done.code == 0, done.err
    try:
        assert done.value.keys() >= {"directory", "pid", "ref"}
        assert tree(folder / "mounted") == tree(folder / "x")
        listed = run("mounts", "--json")
        assert listed.code == 0, listed.err
        (state,) = [m for m in listed.value["mounts"] if m["directory"] == str(folder / "mounted")]
        assert (state["ref"], state["state"], state["pid"]) == ("x", "serving", done.value["pid"])
        assert state["bytes_served"] > 0
        assert state["cache"].keys() == {"hits", "misses", "ahead", "bytes", "limit"}
        assert state["read"].keys() == {"expert", "base", "metadata"}
        assert str(folder / "mounted") in run("mounts").out
    finally:
        ended = run("umount", folder / "mounted", "--json")
    assert ended.code == 0, ended.err
    assert ended.value == {"directory": str(folder / "mounted"), "stale": False}
    done = run("-R", repo, "mount", "x", folder / "mounted", "--keep", "1MiB", "--cache-size", "8MiB", "--json")
    os.kill(done.value["pid"], signal.SIGKILL)
    while "stale" not in run("mounts").out:
        time.sleep(0.05)
    assert run("umount", folder / "mounted").out.startswith("cleared away what a dead process had left")


def test_tag_rm_gc_and_fsck(repo: Path) -> None:
    tagged = run("-R", repo, "tag", "y", "other@2", "--json").value
    assert tagged == {"ref": "other@2", "manifest": call("-R", repo, "show", "y", "--json").value["manifest"]}
    removed = run("-R", repo, "rm", "other@2", "y", "--json").value
    assert removed["removed"] == dict.fromkeys(("other@2", "y"), tagged["manifest"])
    for option in (("--dry-run",), ()):
        done = run("-R", repo, "gc", *option, "--json")
        assert done.code == 0, done.err
        assert done.value.keys() >= {"freed_bytes", "live_bytes", "blocks_freed", "packs_rewritten"}
    checked = run("-R", repo, "fsck", "--read-data", "--json")
    assert checked.code == 0
    assert checked.value["ok"] is True
    assert checked.value["errors"] == []


# ----------------------------------------------------------------------------------------------------- exit codes


def test_damage_exits_with_one(folder: Path) -> None:
    path = folder / "damaged"
    call("init", path, "--block-size", "4KiB")
    call("-R", path, "ingest", folder / "base", "--as", "m")
    pack = next((path / "packs").rglob("*.pack"))
    pack.write_bytes(pack.read_bytes()[:1000])
    checked = call("-R", path, "fsck", "--json")
    assert checked.code == 1
    assert checked.value["ok"] is False
    assert checked.value["errors"][0].keys() >= {"kind", "name", "message", "affects"}
    assert checked.value["errors"][0]["affects"] == ["m"]
    exported = run("-R", path, "export", "m", folder / "nothing", "--json")
    assert (exported.code, exported.out) == (1, "")
    assert exported.err.startswith("mergefs: ")
    assert not (folder / "nothing").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("nonsense",),
        ("--nonsense",),
        ("ingest",),
        ("ingest", "x"),
        ("stats", "--nonsense"),
        ("gc", "--rewrite-above", "7"),
    ],
    ids=" ".join,
)
def test_misuse_exits_with_two(arguments: tuple[str, ...]) -> None:
    done = call(*arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err


# ------------------------------------------------------------------------------------------ finding the repository


def test_the_repository_is_found(repo: Path, folder: Path) -> None:
    inside = repo / "packs"
    empty = folder / "empty"
    call("init", empty)
    full, none = (call("-R", path, "stats", "--json").value for path in (repo, empty))
    assert full != none
    assert call("--repo", repo, "stats", "--json").value == full
    assert call("stats", "--json", cwd=repo).value == full
    assert run("stats", "--json", cwd=inside).value == full
    assert run("stats", "--json", MERGEFS_REPO=str(repo)).value == full
    assert call("-R", "repo", "stats", "--json", cwd=folder).value == full
    # What is given goes before the environment, and that before the working folder.
    assert call("-R", empty, "stats", "--json", cwd=repo, MERGEFS_REPO=str(repo)).value == none
    assert call("stats", "--json", cwd=repo, MERGEFS_REPO=str(empty)).value == none
    # The nearest one counts.
    nested = repo / "tmp" / "nested"
    call("init", nested)
    (nested / "sub").mkdir()
    assert call("stats", "--json", cwd=nested / "sub").value == none


def test_no_repository_is_found(folder: Path) -> None:
    for done in (
        run("stats", "--json", cwd=folder),
        call("-R", folder, "stats", "--json"),
        call("-R", folder / "nothing", "stats", "--json"),
        call("stats", "--json", MERGEFS_REPO=str(folder)),
    ):
        assert (done.code, done.out) == (2, "")
        assert "repository" in done.err
        assert done.err.count("\n") == 1


# ------------------------------------------------------------------------------------------------------------ help


def test_help_is_light() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "mergefs", "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if "|" in line}
    assert "mergefs.cli" in imported
    assert not {name.partition(".")[0] for name in imported} & {
        "torch",
        "zarr",
        "numba",
        "numpy",
        "numcodecs",
        "lmdb",
        "safetensors",
        "fsspec",
        "ml_dtypes",
        "yaml",
    }


def test_help_is_fast() -> None:
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "mergefs", "--help"], capture_output=True, check=True)
        seconds.append(time.perf_counter() - began)
    # 0.2 s on an idle machine; other tests may run beside this one.
    assert min(seconds) < 0.5


def test_every_command_has_help_and_json() -> None:
    listed = call("--help").out
    for name in _COMMANDS:
        assert f"  {name} " in listed
        command = cli.get_command(None, name)  # type: ignore[arg-type]
        assert command is not None
        assert command.help
        for one in command.commands.values() if isinstance(command, click.Group) else (command,):
            assert one.help
            assert any("--json" in parameter.opts for parameter in one.params)
