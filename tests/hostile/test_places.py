"""Where what a stranger made may write, what it may run, what it may print, and who may read what is ours."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from builders import contents, new_repository, pack, random_model, recipe_text, tree, write_model
from click.testing import CliRunner

import mergefs.cli
from mergefs.cli import cli
from mergefs.errors import CheckpointError, CorruptionError, DestinationError, MergefsError
from mergefs.manifest import Blob, FileRecipe, Manifest
from mergefs.manifest import decode as decode_manifest
from mergefs.repository import Repository
from mergefs.serve.export import export
from mergefs.store import manifest_name

NOBODY = 65534
ROOT = str(Path(__file__).parents[2])
CAN_MOUNT = os.access("/dev/fuse", os.R_OK | os.W_OK) and shutil.which("fusermount3") is not None
ESCAPE = "\x1b]0;owned\x07\x1b[2J"

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", random_model(1), {"config.json": b"{}", "sub/note.txt": b"note"})


@pytest.fixture
def repository(tmp_path: Path, model: Path) -> Iterator[Repository]:
    with new_repository(tmp_path / "repository") as made:
        made.ingest(model, "m")
        yield made


def published(repository: Repository, manifest: Manifest, name: str = "hostile") -> str:
    """Store a manifest as an attacker would who can write one: past every check but those of a reader."""
    path = repository.path / manifest_name(manifest.id)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(manifest.encoded)
    repository.catalog.write(lambda txn: txn.put("manifests", bytes.fromhex(manifest.id), b'{"time": 0}'))
    repository.catalog.write(
        lambda txn: txn.put("refs", name.encode(), json.dumps({"manifest": manifest.id, "time": 0}).encode())
    )
    return manifest.id


def with_paths(manifest: Manifest, *paths: str) -> Manifest:
    """Return a manifest with more files, all of them the same small one."""
    small = manifest.file_by_path["config.json"]
    files = [*manifest.files, *(replace(small, path=path) for path in paths)]
    return replace(manifest, files=tuple(sorted(files, key=lambda file: file.path)))


PATHS = {
    "above": "../x",
    "far above": "../../../../../../tmp/x",
    "absolute": "/tmp/mergefs-hostile",
    "in the middle": "a/../../x",
    "NUL": "a\0b",
    "an escape": ESCAPE,
    "a very long name": "x" * 256,
    "a very long path": "/".join(["x" * 200] * 30),
    "empty parts": "a//b",
    "a backslash": "..\\x",
    "a file below a file": "config.json/x",
    "a file below the weights": "model.safetensors/x",
    "a dot": ".",
}


@pytest.mark.parametrize("name", PATHS)
def test_no_model_has_a_path_that_leads_elsewhere(repository: Repository, tmp_path: Path, name: str) -> None:
    before = set(tmp_path.iterdir())
    hostile = with_paths(repository.manifest(repository.resolve("m")), PATHS[name])
    with pytest.raises(CorruptionError):
        decode_manifest(hostile.encoded)
    published(repository, hostile)
    for attempt in (
        lambda: repository.export("hostile", tmp_path / "out"),
        lambda: repository.view("hostile"),
        lambda: repository.push("hostile", f"file://{tmp_path}/archive"),
        lambda: repository.edit("hostile"),
    ):
        with pytest.raises(MergefsError):
            attempt()
    assert not (tmp_path / "out").exists()
    assert {path for path in set(tmp_path.iterdir()) - before if path.name != "archive"} == set()


def test_names_that_differ_in_case_only(repository: Repository, tmp_path: Path) -> None:
    published(repository, with_paths(repository.manifest(repository.resolve("m")), "CONFIG.json", "Config.JSON"))
    repository.export("hostile", tmp_path / "out")
    assert {"CONFIG.json", "Config.JSON", "config.json"} <= set(tree(tmp_path / "out"))


def test_a_file_system_that_folds_case(repository: Repository, tmp_path: Path) -> None:
    """What is written second would take the first one's place there; the export says so."""
    published(repository, with_paths(repository.manifest(repository.resolve("m")), "CONFIG.json"))
    rename = os.rename

    def folding(source: object, target: object, **options: object) -> None:
        path = Path(str(target))
        rename(source, path.with_name(path.name.lower()) if path.name == "CONFIG.json" else path)  # type: ignore[call-overload]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rename", folding)
        with pytest.raises(DestinationError, match=r"'CONFIG.json' is not there .* in case only"):
            repository.export("hostile", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_sizes_that_are_not_those_of_the_blocks(repository: Repository, tmp_path: Path) -> None:
    manifest = repository.manifest(repository.resolve("m"))
    config = manifest.file_by_path["config.json"]
    (blob,) = config.segments
    assert isinstance(blob, Blob)
    for size in (1, 3, 1 << 20, 1 << 50):
        longer = FileRecipe(config.path, size, None, (Blob(blob.block, size),))
        published(repository, replace(manifest, files=tuple(longer if f is config else f for f in manifest.files)))
        with repository.view("hostile") as view, pytest.raises(CorruptionError, match="says"):
            view.read("config.json", 0, 10)
        with pytest.raises(MergefsError):
            repository.export("hostile", tmp_path / "out")
        with pytest.raises(CorruptionError, match="says"):
            repository.publish(repository.manifest(repository.resolve("hostile")), "again", {})


@as_root
def test_a_folder_of_another_user_is_not_written_into(repository: Repository, tmp_path: Path) -> None:
    """In a folder for all, somebody could have made the place where an export is going to be written."""
    shared = tmp_path / "shared"
    shared.mkdir()
    with repository.view("m") as view:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "rename", _interrupted)
            with pytest.raises(KeyboardInterrupt):
                export(view, shared / "out")
        (part,) = shared.iterdir() if any(shared.iterdir()) else [shared / ".out.part-x"]
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        os.chown(part, NOBODY, NOBODY)
        with pytest.raises(DestinationError, match="belongs to another user"):
            export(view, shared / "out")
        part.rmdir()
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        part.symlink_to(elsewhere)
        with pytest.raises(DestinationError):
            export(view, shared / "out")
        assert not any(elsewhere.iterdir())


def _interrupted(source: object, target: object) -> None:
    if str(target).endswith("/out"):
        raise KeyboardInterrupt
    os.replace(source, target)  # type: ignore[arg-type]


# -- checkpoints -------------------------------------------------------------------------------------------------


def test_links_in_a_checkpoint(repository: Repository, model: Path, tmp_path: Path) -> None:
    """To files they are followed (Hugging Face's cache is made of them), and files are what comes out."""
    (tmp_path / "blob").write_bytes(b"content")
    (model / "link.txt").symlink_to(tmp_path / "blob")
    repository.ingest(model, "linked")
    repository.export("linked", tmp_path / "out")
    assert not (tmp_path / "out" / "link.txt").is_symlink()
    assert (tmp_path / "out" / "link.txt").read_bytes() == b"content"
    for target in (tmp_path, "..", "/", "link"):
        (model / "link").unlink(missing_ok=True)
        (model / "link").symlink_to(target)
        with pytest.raises(CheckpointError):
            repository.ingest(model, "more")


def test_weights_that_are_a_folder(repository: Repository, tmp_path: Path) -> None:
    for name in ("model.safetensors", "model.safetensors.index.json"):
        folder = tmp_path / "odd" / name
        folder.mkdir(parents=True)
        (folder / "x").write_bytes(b"x")
        with pytest.raises(CheckpointError, match="not a checkpoint"):
            repository.ingest(tmp_path / "odd", "odd")
        shutil.rmtree(tmp_path / "odd")


class _Runs:
    """What a pickle runs that is loaded."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self._marker}",)


_WATCHED = """
import sys
repository, root, *folders = sys.argv[1:]
events = []
def hook(name, arguments):
    if name == "pickle.find_class" and arguments[0] in ("posix", "os") or name == "os.system":
        events.append((name, str(arguments)))
    if name in ("exec", "compile", "import") and root in str(arguments):
        events.append((name, str(arguments)))
sys.addaudithook(hook)
from mergefs.errors import MergefsError
from mergefs.repository import Repository
with Repository.open(repository) as opened:
    for folder in folders:
        try:
            opened.ingest(folder, "taken")
            opened.export("taken", folder + "-exported")
            print("taken")
        except MergefsError as error:
            print("refused", error)
print(events)
"""


def test_nothing_of_a_checkpoint_runs(repository: Repository, model: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    hostile = pickle.dumps(_Runs(marker))
    code = f"import os; os.system('touch {marker}')\n".encode()
    folders = [tmp_path / "hostile" / name for name in ("bin", "pt", "zarr", "beside")]
    for folder in folders:
        folder.mkdir(parents=True)
    pickled, older, group, beside = folders
    (pickled / "pytorch_model.bin").write_bytes(hostile)
    (older / "model.pt").write_bytes(hostile)
    (group / ".zgroup").write_text('{"zarr_format": 2}')
    (group / "a").mkdir()
    described = {"zarr_format": 2, "shape": [4], "chunks": [4], "dtype": "<f4", "fill_value": 0, "order": "C"}
    (group / "a" / ".zarray").write_text(json.dumps({**described, "compressor": {"id": "pickle"}, "filters": None}))
    (group / "a" / "0").write_bytes(hostile)
    shutil.copytree(model, beside, dirs_exist_ok=True)
    for name in ("optimizer.pt", "tokenizer.pkl"):
        (beside / name).write_bytes(hostile)
    for name in ("modeling_x.py", "__init__.py", "setup.py", "sitecustomize.py", "conftest.py"):
        (beside / name).write_bytes(code)
    (beside / "config.json").write_text(json.dumps({"auto_map": {"AutoModel": "modeling_x.X"}, "architectures": ["X"]}))
    done = subprocess.run(
        [sys.executable, "-c", _WATCHED, str(repository.path), str(tmp_path / "hostile"), *map(str, folders)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ROOT},
    )
    assert done.returncode == 0, done.stderr
    *outcomes, events = done.stdout.splitlines()
    assert events == "[]"
    assert not marker.exists()
    assert all(outcome.startswith("refused") and "pickle" in outcome for outcome in outcomes[:3])
    assert outcomes[3:] == ["taken"]
    assert (tmp_path / "hostile" / "beside-exported" / "optimizer.pt").read_bytes() == hostile


def test_no_call_that_could_run_what_is_read() -> None:
    """None of the ways in which Python loads objects or code from data is in the source."""
    calls = (
        "pickle.load",
        "torch.load",
        "np.load",
        "numpy.load",
        "yaml.load(",
        "yaml.unsafe",
        "FullLoader",
        "marshal.",
    )
    calls += ("eval(", "exec(", "trust_remote_code", "allow_pickle", "shelve.", "joblib", "shell=True", "os.system(")
    package = Path(__file__).parents[2] / "mergefs"
    for path in package.rglob("*.py"):
        text = path.read_text()
        found = [call for call in calls if call in text and f"re.{call}" not in text]
        assert not found, f"{path} has {found}"


# -- what is printed ---------------------------------------------------------------------------------------------


def test_nothing_printed_drives_a_terminal(
    repository: Repository,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    odd = "a\u202eb\u2028c\u200bd"
    (model / f"{odd}.txt").write_bytes(b"x")
    (model / "config.json").write_text(json.dumps({"name": ESCAPE}))
    tensors = {odd: random_model(2)["embed.weight"]}
    (model / "model.safetensors").write_bytes(pack(tensors, {"format": ESCAPE}))
    repository.ingest(model, "odd")
    repository.ingest(model, "other", base="odd")
    recipe, bad, strange = tmp_path / "recipe.yml", tmp_path / "bad.yml", tmp_path / ESCAPE
    text = recipe_text("linear", [("odd", {"weight": 1}), ("other", {"weight": 1})])
    recipe.write_text(f"{text}\n# {odd}\n")
    bad.write_text(json.dumps({"merge_method": ESCAPE, "models": [{"model": ESCAPE}]}))
    strange.mkdir()
    (tmp_path / "long.yml").write_text(json.dumps({"merge_method": ["x" * 100] * 5000}))
    commands = [
        ("ls",), ("show", "odd"), ("log", "odd"), ("diff", "odd", "m"), ("stats",), ("fsck", "--read-data"),
        ("plan", str(recipe)), ("merge", str(recipe), "--as", "merged"), ("log", "merged"), ("plan", str(bad)),
        ("recipe", "check", str(bad)), ("recipe", "check", str(tmp_path / "long.yml")), ("show", ESCAPE), (ESCAPE,),
        ("ingest", str(strange), "--as", "x"), ("tag", "odd", ESCAPE), ("push", "odd", f"file:///{ESCAPE}\n"),
        ("export", "odd", str(tmp_path / "out" / odd)), ("umount", ESCAPE), ("ls", f"--{ESCAPE}"),
    ]  # fmt: skip
    for command in commands:
        monkeypatch.setattr(sys, "argv", ["mergefs", "-R", str(repository.path), *command])
        with pytest.raises(SystemExit):
            mergefs.cli.main()
        said = "".join(capfd.readouterr())
        assert said
        assert all(c.isprintable() or c == "\n" for c in said), (command, said)
        assert len(said) < 10_000


def test_tensors_with_names_that_drive_a_terminal_are_refused(repository: Repository) -> None:
    manifest = repository.manifest(repository.resolve("m"))
    text = manifest.encoded.decode().replace('"embed.weight"', json.dumps("embed.\x1b[2J"))
    with pytest.raises(CorruptionError, match="control characters"):
        decode_manifest(text.encode())


# -- who may read ------------------------------------------------------------------------------------------------


def test_a_repository_is_its_owners(tmp_path: Path, model: Path) -> None:
    before = os.umask(0)
    try:
        with new_repository(tmp_path / "mine") as repository:
            repository.ingest(model, "m")
            with repository.edit("m") as session:
                session.filesystem().pipe_file("new.txt", b"x")
            path = tmp_path / "recipe.yml"
            path.write_text(recipe_text("linear", [("m", {"weight": 1})]))
            CliRunner().invoke(cli, ["-R", str(repository.path), "merge", str(path), "--as", "again"])
            repository.gc()
    finally:
        os.umask(before)
    folders = [tmp_path / "mine", *(path for path in (tmp_path / "mine").rglob("*") if path.is_dir())]
    assert {"packs", "manifests", "refs", "sessions", "catalog", "tmp"} <= {folder.name for folder in folders}
    for folder in folders:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder


_READS = """
import os, sys
from pathlib import Path
from mergefs.cli import main
from mergefs.repository import Repository
from mergefs.serve import mount
folder, ours, theirs, at = sys.argv[1:]

def look(out):
    with Repository.open(folder, readonly=True) as repository:
        print(sorted(repository.refs()))
        with repository.view("m") as view:
            print(len(view.read("model.safetensors")))
        repository.export("m", out + "/exported")
        assert repository.fsck(read_data=True).ok
    sys.argv = ["mergefs", "-R", folder, "ls"]
    try:
        main()
    except SystemExit as end:
        print(end.code)

look(ours)  # whatever is imported on the way may lie where the other user cannot read
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
os.environ["HOME"] = theirs
assert not os.access(folder + "/catalog", os.W_OK)
look(theirs)
if at:
    os.mkdir(at)
    mount.mount(Path(folder), "m", Path(at))
    print((Path(at) / "config.json").read_bytes())
    mount.umount(Path(at))
"""


@as_root
def test_another_user_reads_what_he_may_not_write(repository: Repository, model: Path, tmp_path: Path) -> None:
    path = repository.path
    for parent in (tmp_path, *tmp_path.parents[:2]):
        parent.chmod(0o755)
    if not all(parent.stat().st_mode & stat.S_IXOTH for parent in tmp_path.parents):
        pytest.skip("another user cannot get to the tests' folder")
    for found in [path, *path.rglob("*")]:
        found.chmod(0o555 if found.is_dir() else 0o444)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    theirs.mkdir()
    os.chown(theirs, NOBODY, NOBODY)
    can_mount = CAN_MOUNT and os.stat("/dev/fuse").st_mode & stat.S_IWOTH and _is_for_all(Path(sys.executable))
    at = str(theirs / "at") if can_mount else ""
    before = contents(path)
    done = subprocess.run(
        [sys.executable, "-c", _READS, str(path), str(ours), str(theirs), at],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        env={**os.environ, "PYTHONPATH": ROOT, "NUMBA_CACHE_DIR": str(theirs / "numba")},
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines.count("['m']") == lines.count("0") == 2
    assert tree(theirs / "exported") == tree(model)
    assert not at or lines[-1] == "b'{}'"
    assert contents(path) == before


def _is_for_all(path: Path) -> bool:
    """Tell whether every user gets to a file."""
    return all(folder.stat().st_mode & stat.S_IXOTH for folder in path.resolve().parents)


@as_root
@pytest.mark.fuse
@pytest.mark.skipif(not CAN_MOUNT, reason="needs /dev/fuse and fusermount3")
def test_a_mount_is_its_users(repository: Repository, tmp_path: Path) -> None:
    at = tmp_path / "at"
    at.mkdir()
    for parent in (tmp_path, *tmp_path.parents[:2]):
        parent.chmod(0o755)
    repository.mount(at, "m")
    try:
        look = "import os; os.setgid(65534); os.setuid(65534); print(os.listdir(os.sys.argv[1]))"
        done = subprocess.run([sys.executable, "-c", look, str(at)], capture_output=True, text=True, check=False)
        assert done.returncode != 0
        assert "PermissionError" in done.stderr
        assert (at / "config.json").read_bytes() == b"{}"
    finally:
        subprocess.run(["fusermount3", "-u", at], check=True)
