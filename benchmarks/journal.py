"""Finished measurements in a file, each written as soon as it is done, so that an interrupted run can go on."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.measure import load

Value = dict[str, Any]


class Journal:
    """A file of JSON lines: first what all its measurements have in common, then one line for each.

    Args:
        path: the file; it is made if need be, and gone on with if it is there.
        common: what the measurements have in common, such as models and versions.
        check: whether the file's measurements have to have that in common; `common` tells what they have.

    Raises:
        SystemExit: when the file's measurements have something else in common.
    """

    def __init__(self, path: Path, common: Value, check: bool = True) -> None:
        self.path = path
        self.common = common
        self._values: dict[str, Value] = {}
        if path.exists():
            self._read(check)
        else:
            path.write_text(json.dumps(common) + "\n")

    def _read(self, check: bool) -> None:
        text = self.path.read_text()
        whole = text[: text.rfind("\n") + 1]
        if whole != text:  # the last line was being written when the run ended
            self.path.write_text(whole)
        first, *lines = whole.splitlines() or [""]
        found = json.loads(first or "{}")
        if check and found != self.common:
            raise SystemExit(
                f"{self.path} holds measurements of something else ({found}; now {self.common}): remove it or name"
                " another file"
            )
        self.common = found
        for line in lines:
            entry = json.loads(line)
            self._values[entry.pop("key")] = entry

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str) -> Value | None:
        """Return a measurement, with `time` and `load` of when it was made."""
        return self._values.get(key)

    def items(self) -> list[tuple[str, Value]]:
        """Return all measurements by their keys."""
        return list(self._values.items())

    def measure(self, key: str, do: Callable[[], Value]) -> Value:
        """Measure and keep the result, also where there is one already."""
        say(f"{key} ...")
        before = load()
        value = {"time": time.strftime("%Y-%m-%dT%H:%M:%S"), "load": before, **do()}
        with self.path.open("a") as file:
            file.write(json.dumps({"key": key, **value}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._values[key] = value
        if "seconds" in value:
            say(f"{key}: {value['seconds']:.2f} s")
        return value


def say(text: str) -> None:
    """Tell people how far it is."""
    print(text, file=sys.stderr, flush=True)
