"""What several processes did to the refs of repositories and saw there, and whether it fits together.

Every line of a history is one JSON object, with the moments between which it happened (`began`, `ended`: seconds of
the clock that all processes of a machine share). No order is known of what overlaps; everything else must be as if
each command had happened at one moment between its two:

- a ref is seen to name what somebody set it to and nobody has surely changed since;
- a manifest reads as one content, whoever reads it, and that is the one that its maker says it has.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

ABSENT = ""
"""Stands for the manifest of a ref that there is not."""


@dataclass(frozen=True)
class Event:
    """One thing that a process did or saw.

    Attributes:
        kind: `set` (a ref was set, or removed), `see` (a ref was seen to name this), `changes` (what a command may only
            end with if one of these refs changed meanwhile), `hidden` (a manifest was not there, which no ref may have
            named all the time), `read` (a manifest's content), `command` (one that was done), `refused` (one that ended
            with an error that it may end with), or `violation`.
        began, ended: the moments between which it happened.
        where: the repository.
        names: the refs.
        manifest: its id, or the beginning of it; `ABSENT` of a ref that there is not.
        content: its digest; None where the maker does not know.
        text: a command's name, or what is wrong.
    """

    kind: str
    began: float
    ended: float
    where: str = ""
    names: tuple[str, ...] = ()
    manifest: str = ABSENT
    content: str | None = None
    text: str = ""

    def line(self) -> str:
        """Return it as a line of JSON."""
        return json.dumps(asdict(self)) + "\n"


def read_events(path: Path) -> list[Event]:
    """Read what one process wrote."""
    found = (json.loads(line) for line in path.read_text().splitlines())
    return [Event(**{**event, "names": tuple(event["names"])}) for event in found]


@dataclass
class _Ref:
    """What was done to one ref: the sets, those before any process began included."""

    sets: list[Event] = field(default_factory=lambda: [Event("set", -math.inf, -math.inf)])

    def close(self) -> None:
        self.sets.sort(key=lambda event: event.ended)
        self._ends = [event.ended for event in self.sets]
        # Of the sets that ended by then, the latest beginning: what ended before that is surely overwritten.
        self._latest: list[float] = []
        for event in self.sets:
            self._latest.append(max(event.began, self._latest[-1] if self._latest else -math.inf))

    def possible(self, began: float, ended: float) -> set[str]:
        """Return what the ref may name at a moment between two others."""
        over = self._latest[bisect_right(self._ends, began) - 1]
        return {event.manifest for event in self.sets if event.began <= ended and event.ended >= over}


class History:
    """All that was done and seen, by whomever.

    Args:
        events: in any order.
    """

    def __init__(self, events: Iterable[Event]) -> None:
        self._events = list(events)
        self._refs: dict[tuple[str, str], _Ref] = {}
        for event in self._events:
            if event.kind == "set":
                for name in event.names:
                    self._refs.setdefault((event.where, name), _Ref()).sets.append(event)
        for ref in self._refs.values():
            ref.close()
        self.checks = 0
        """How much of what was seen has been judged."""

    def counts(self, kind: str) -> Counter[str]:
        """Return how many events of a kind there are, by their texts."""
        return Counter(event.text for event in self._events if event.kind == kind)

    def possible(self, where: str, name: str, began: float = math.inf, ended: float = math.inf) -> set[str]:
        """Return what a ref may name between two moments; by default when all is over."""
        ref = self._refs.get((where, name))
        return {ABSENT} if ref is None else ref.possible(began, ended)

    def names(self, where: str) -> list[str]:
        """Return the refs of a repository that were ever set."""
        return sorted(name for place, name in self._refs if place == where)

    def contents(self) -> dict[str, str]:
        """Return the content of each manifest for which somebody knows or has read it."""
        return {event.manifest: event.content for event in self._events if event.content and event.manifest}

    def violations(self) -> list[str]:
        """Return a sentence for everything that does not fit."""
        found = [event.text for event in self._events if event.kind == "violation"]
        contents: dict[str, str] = {}
        for event in sorted(self._events, key=lambda event: event.ended):
            if event.kind in ("set", "read") and event.content is not None:
                self.checks += 1
                if contents.setdefault(event.manifest, event.content) != event.content:
                    found.append(f"{event.manifest} had another content: {event}")
            possible = {name: self.possible(event.where, name, event.began, event.ended) for name in event.names}
            wrong = False
            if event.kind == "see":
                wrong = any(not _names(values, event.manifest) for values in possible.values())
            elif event.kind == "changes":
                wrong = all(len(values) == 1 for values in possible.values())
            elif event.kind == "hidden":
                refs = (self.possible(event.where, name, event.began, event.ended) for name in self.names(event.where))
                wrong = {event.manifest} in refs
            else:
                continue
            self.checks += 1
            if wrong:
                found.append(f"it cannot have been so, but could be {possible}: {event}")
        return found


def _names(values: set[str], manifest: str) -> bool:
    return any(_is(value, manifest) for value in values)


def _is(value: str, manifest: str) -> bool:
    return value == manifest or (manifest != ABSENT and value.startswith(manifest))
