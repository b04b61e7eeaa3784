"""Compiled loops: what is kept on the disk is never of other sources than the ones that are there."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mergefs.compiled import LOOPS, PACKAGE

ONE = """
from mergefs.compiled import njit

@njit(nogil=True)
def number():
    return {number}
"""
TWO = """
from mergefs.compiled import njit
from mergefs.merge.one_kernels import number

@njit(nogil=True)
def twice():
    return 2 * number()
"""


def imported(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            names.update({node.module, *(f"{node.module}.{alias.name}" for alias in node.names)})
    return names


def test_files_with_loops_are_known_and_take_nothing_from_others() -> None:
    """Whatever is compiled into a function, constants too, is in a file whose change makes it compile again."""
    known = {path for pattern in LOOPS for path in PACKAGE.glob(pattern)}
    modules = {"mergefs." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in known}
    allowed = {*modules, "mergefs.compiled", "mergefs.blocks.tiers.kernels"}
    with_loops = 0
    for file in sorted(PACKAGE.rglob("*.py")):
        names = imported(file)
        compiles = "mergefs.compiled" in names or any(name.split(".")[0] in ("numba", "llvmlite") for name in names)
        if not compiles or file == PACKAGE / "compiled.py":
            continue
        with_loops += 1
        assert file in known, f"{file} has loops: LOOPS has to name it"
        taken = {name for name in names if name.startswith("mergefs.")}
        others = {name for name in taken if name not in allowed and name.rpartition(".")[0] not in allowed}
        assert not others, f"{file} takes {others} from files whose change would not be noticed"
    assert with_loops >= 15


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of what of the package is needed, with a loop that calls one in another file."""
    for name in ("__init__.py", "compiled.py", "hashing.py", "errors.py"):
        target = tmp_path / "mergefs" / name
        target.parent.mkdir(exist_ok=True)
        if name == "__init__.py":
            target.touch()
        else:
            shutil.copy(PACKAGE / name, target)
    (tmp_path / "mergefs" / "merge").mkdir()
    (tmp_path / "mergefs" / "merge" / "__init__.py").touch()
    (tmp_path / "mergefs" / "merge" / "one_kernels.py").write_text(ONE.format(number=3))
    (tmp_path / "mergefs" / "merge" / "two_kernels.py").write_text(TWO)
    return tmp_path


def called(package: Path, **variables: str) -> int:
    program = "from mergefs.merge.two_kernels import twice; print(twice())"
    left_out = ("NUMBA_CACHE_DIR", "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment |= {"PYTHONPATH": str(package), "HOME": str(package / "home"), **variables}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, cwd=package, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def kept(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.nbc"))


def test_a_change_in_another_file_is_compiled(package: Path) -> None:
    assert called(package) == 6
    before = kept(package)
    assert len(before) == 2
    times = [path.stat().st_mtime_ns for path in before]
    assert called(package) == 6
    assert [path.stat().st_mtime_ns for path in kept(package)] == times  # nothing was compiled again
    (package / "mergefs" / "merge" / "one_kernels.py").write_text(ONE.format(number=5))
    assert called(package) == 10
    assert len(kept(package)) == 2
    assert not set(kept(package)) & set(before)  # nothing is left of what was there before


def test_the_place_can_be_chosen_and_there_may_be_none(package: Path, tmp_path: Path) -> None:
    chosen = tmp_path / "chosen"
    assert called(package, NUMBA_CACHE_DIR=str(chosen)) == 6
    assert len(kept(chosen)) == len(kept(package)) == 2
    shutil.rmtree(chosen)
    shutil.rmtree(package / "mergefs" / "__pycache__", ignore_errors=True)
    (package / "mergefs" / "__pycache__").touch()  # neither a folder nor to be made one
    assert called(package) == 6
    assert len(kept(package / "home" / ".cache" / "mergefs")) == 2
    shutil.rmtree(package / "home")
    (package / "home").touch()
    assert called(package) == 6
    assert kept(package) == []
