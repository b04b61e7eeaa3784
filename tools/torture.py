"""Kill mergefs at random moments, and let its disk run full: nothing that a command reported may be lost.

    python -m tools.torture --kills 500 --seconds 1200

Commands run on small models, each as a process of its own, and most are killed (SIGKILL) somewhere on their way. After
each the repository has to open, to be whole, and to have the refs that it had before or those that the command was to
leave; now and then every byte is read, and garbage is collected. A command that was not killed has to leave what it
reports, or to refuse and leave everything as it was. Every tenth one runs on a file system that is nearly full (as
root, which may mount a tmpfs): it has to say so and to leave everything as it was.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mergefs.errors import MergefsError
from mergefs.repository import Repository
from tools.small_models import BLOCK_SIZE, recipe_text, write_models

EXPERTS = 6
READ_EVERY = 10
FULL_EVERY = 10


class LossError(Exception):
    """Something is not there that has to be."""


@dataclass
class Totals:
    """What was done.

    Attributes:
        commands, kills, full: commands that were begun, killed in time, and run on a full disk.
        refused: those of the full ones that found no room.
        checks, deep_checks: repositories that were checked, and read whole.
        losses: what was found missing.
    """

    commands: int = 0
    kills: int = 0
    full: int = 0
    refused: int = 0
    checks: int = 0
    deep_checks: int = 0
    losses: list[str] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; return 1 when something was lost."""
    parser = argparse.ArgumentParser(prog="tools.torture", description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=500, help="stop after so many processes were killed (500)")
    parser.add_argument("--seconds", type=float, default=1200.0, help="stop after so long (1200)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="mergefs-torture-") as scratch:
        totals = Torture(Path(scratch), options.seed).run(options.kills, options.seconds)
    found = {**vars(totals), "losses": len(totals.losses)}
    if options.json:
        print(json.dumps(found))
    else:
        print(
            f"{totals.commands} commands, {totals.kills} killed, {totals.full} on a nearly full disk"
            f" ({totals.refused} found no room); {totals.checks} checks, {totals.deep_checks} of them of every byte;"
            f" {len(totals.losses)} losses"
        )
    for loss in totals.losses:
        print(loss, file=sys.stderr)
    return 1 if totals.losses else 0


class Torture:
    """One run, in a folder of its own."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._repository = folder / "repository"
        self._chance = random.Random(seed)
        self._duration: dict[str, float] = {}
        self._totals = Totals()
        write_models(folder / "models", EXPERTS)
        self._run("init", str(self._repository), "--block-size", BLOCK_SIZE)
        self._run("ingest", "models/base", "--as", "base")

    def run(self, kills: int, seconds: float) -> Totals:
        """Go on until so many processes were killed, or the time is over."""
        stop = time.monotonic() + seconds
        totals = self._totals
        while totals.kills < kills and time.monotonic() < stop:
            totals.commands += 1
            try:
                if totals.commands % FULL_EVERY == 0 and os.geteuid() == 0:
                    self._on_a_full_disk()
                else:
                    self._once()
            except LossError as loss:
                totals.losses.append(str(loss))
                kept = self._folder.with_name(f"{self._folder.name}-loss-{len(totals.losses)}")
                shutil.copytree(self._repository, kept)
                totals.losses.append(f"the repository is kept in {kept}")
                break
        return totals

    def _once(self) -> None:
        """Run a command, and perhaps kill it."""
        before = self._refs()
        command = self._command(before)
        kind = command[0]
        usual = self._duration.get(kind)
        process = self._start(command, self._repository)
        if usual is None or self._chance.random() < 0.1:
            began = time.monotonic()
            done = self._finish(process, command)
            self._duration[kind] = time.monotonic() - began
        else:
            try:
                process.wait(self._chance.uniform(0.3, 1.05) * usual)
            except subprocess.TimeoutExpired:
                process.kill()
                self._totals.kills += 1
                process.wait()
                self._check(command, before, self._refs(), done=False)
                return
            done = self._finish(process, command)
        self._check(command, before, self._refs(), done=done)

    def _finish(self, process: subprocess.Popen[str], command: Sequence[str]) -> bool:
        """Wait for a command's end; tell whether it did what it was asked for, rather than refusing it."""
        _, errors = process.communicate()
        if process.returncode not in (0, 2):
            raise LossError(f"{' '.join(command)} ended with {process.returncode}: {errors.strip()}")
        return process.returncode == 0

    def _on_a_full_disk(self) -> None:
        """Run a command where there is little room; it does everything or nothing."""
        small = self._folder / "small"
        small.mkdir(exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256M", "tmpfs", small], check=True)
        try:
            shutil.copytree(self._repository, small / "repository")
            disk = os.statvfs(small)
            size = (disk.f_blocks - disk.f_bfree) * disk.f_frsize + self._chance.randrange(320 << 10)
            subprocess.run(["mount", "-o", f"remount,size={size}", small], check=True)
            before = self._refs(small / "repository")
            command = self._command(before)
            process = self._start(command, small / "repository")
            _, errors = process.communicate()
            self._totals.full += 1
            if process.returncode:
                self._totals.refused += 1
                if process.returncode not in (1, 2) or "Traceback" in errors:
                    raise LossError(f"on a full disk, {' '.join(command)}: {errors.strip()[-400:]}")
            after = self._refs(small / "repository")
            self._compare(command, before, after, done=not process.returncode)
            self._whole(small / "repository", command, deep=True)
        finally:
            subprocess.run(["umount", small], check=True)

    def _command(self, refs: dict[str, str]) -> list[str]:
        experts = [name for name in refs if name.startswith("expert")]
        merged = [name for name in refs if name.startswith("merged")]
        choices: list[Callable[[], list[str]]] = [self._ingest, self._ingest]
        if len(experts) > 1:
            choices += [
                lambda: self._merge(experts),
                lambda: self._merge(experts),
                lambda: ["repack", "--exact", self._pick(["small", "fast"])],
            ]
        if merged:
            choices += [
                lambda: ["materialize", self._pick(merged)],
                lambda: ["tag", self._pick(merged), f"tag-{self._chance.randrange(3)}"],
                lambda: ["rm", self._pick(merged + experts)],
            ]
        choices += [lambda: ["gc", "--rewrite-above", self._pick(["0", "0.5"])]]
        return self._pick(choices)()

    def _ingest(self) -> list[str]:
        number = self._chance.randrange(EXPERTS)
        base = ["--base", "base"] if self._chance.random() < 0.8 else []
        return ["ingest", f"models/expert-{number}", "--as", f"expert-{number}", *base]

    def _merge(self, experts: list[str]) -> list[str]:
        chosen = self._chance.sample(experts, 2)
        recipe = self._folder / "recipe.yml"
        recipe.write_text(recipe_text("task_arithmetic", {name: self._pick([0.25, 0.5, 0.75]) for name in chosen}))
        how = self._pick([[], ["--lazy"], ["--budget", "30%"]])
        return ["merge", str(recipe), "--as", f"merged-{self._chance.randrange(4)}", *how]

    def _pick(self, of: Sequence[Any]) -> Any:
        return self._chance.choice(of)

    def _start(self, command: Sequence[str], repository: Path) -> subprocess.Popen[str]:
        program = [sys.executable, "-m", "mergefs", "-R", str(repository), *command]
        return subprocess.Popen(program, cwd=self._folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def _run(self, *command: str) -> None:
        where = ["-R", str(self._repository)] if command[0] != "init" else []
        subprocess.run(
            [sys.executable, "-m", "mergefs", *where, *command], cwd=self._folder, stdout=subprocess.DEVNULL, check=True
        )

    def _refs(self, repository: Path | None = None) -> dict[str, str]:
        with Repository.open(repository or self._repository, readonly=True) as opened:
            return opened.refs()

    def _check(self, command: Sequence[str], before: dict[str, str], after: dict[str, str], *, done: bool) -> None:
        self._totals.checks += 1
        deep = self._totals.checks % READ_EVERY == 0
        self._totals.deep_checks += deep
        self._compare(command, before, after, done=done)
        self._whole(self._repository, command, deep=deep)

    def _compare(self, command: Sequence[str], before: dict[str, str], after: dict[str, str], *, done: bool) -> None:
        """Check that no ref changed but the one that the command is about, and that this one did when it was done."""
        kind = command[0]
        about = {
            "ingest": lambda: command[3],
            "merge": lambda: command[3],
            "materialize": lambda: command[1],
            "tag": lambda: command[2],
            "rm": lambda: command[1],
        }.get(kind, lambda: "")()
        for name in {*before, *after} - {about}:
            if before.get(name) != after.get(name):
                raise LossError(f"{' '.join(command)} changed the ref {name}")
        if kind == "rm":
            if done and about in after:
                raise LossError(f"{' '.join(command)} left the ref")
        elif about and (done or about in before) and about not in after:
            raise LossError(f"{' '.join(command)} lost the ref")

    def _whole(self, repository: Path, command: Sequence[str], *, deep: bool) -> None:
        try:
            with Repository.open(repository, readonly=True) as opened:
                report = opened.fsck(read_data=deep)
        except MergefsError as error:
            raise LossError(f"after {' '.join(command)}: {error}") from error
        if not report.ok:
            raise LossError(f"after {' '.join(command)}: {report.errors}")


if __name__ == "__main__":
    sys.exit(main())
