"""YAML that remembers its lines, so that messages can name them."""

from __future__ import annotations

from typing import Any

import yaml

from mergefs.errors import RecipeError

DEEPEST = 100
"""So deep may YAML be nested."""

MOST_NODES = 200_000
"""So many scalars, lists and maps may a document have, aliases counted as what they stand for."""


class Map(dict[str, Any]):
    """A map of YAML.

    Attributes:
        line: where it begins, from 1.
        lines: of each key, where the key is.
        value_lines: of each key, where its value begins.
    """

    def __init__(self, line: int) -> None:
        super().__init__()
        self.line = line
        self.lines: dict[str, int] = {}
        self.value_lines: dict[str, int] = {}


class Items(list[Any]):
    """A list of YAML.

    Attributes:
        line: where it begins, from 1.
        lines: where each item begins.
    """

    def __init__(self, line: int) -> None:
        super().__init__()
        self.line = line
        self.lines: list[int] = []


class Place:
    """What messages call a place in a file, or the file as a whole.

    Args:
        file: what they call the file.
        line: from 1, or None.
    """

    def __init__(self, file: str, line: int | None = None) -> None:
        self.file = file
        self.line = line

    def __str__(self) -> str:
        return self.file if self.line is None else f"{self.file}, line {self.line}"

    def at(self, line: int | None) -> Place:
        """Return another place in the same file."""
        return Place(self.file, line)

    def key(self, parent: Map, key: str) -> Place:
        """Return the place of a key; that of the map where it does not have the key."""
        return self.at(parent.lines.get(key, parent.line))

    def value(self, parent: Map, key: str) -> Place:
        """Return the place of a key's value."""
        return self.at(parent.value_lines.get(key, parent.line))


class _Loader(yaml.SafeLoader):
    """YAML's safe subset, with a key given twice refused, and what is nested too deep: reading that takes the square of
    its length."""

    def fetch_more_tokens(self) -> Any:
        if self.flow_level + len(self.indents) > DEEPEST:
            raise yaml.MarkedYAMLError(problem=f"nested more than {DEEPEST} deep", problem_mark=self.get_mark())
        return super().fetch_more_tokens()


def _map(loader: yaml.SafeLoader, node: yaml.MappingNode) -> Map:
    own = {id(key_node) for key_node, _ in node.value}
    loader.flatten_mapping(node)
    merged: set[str] = set()
    found = Map(node.start_mark.line + 1)
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise yaml.MarkedYAMLError(problem=f"the key {key!r} is not text", problem_mark=key_node.start_mark)
        if key in found and key not in merged:
            raise yaml.MarkedYAMLError(problem=f"the key '{key}' is there twice", problem_mark=key_node.start_mark)
        if id(key_node) not in own:
            merged.add(key)  # by `<<`: what the map says itself goes before it
        else:
            merged.discard(key)
        found[key] = loader.construct_object(value_node, deep=True)
        found.lines[key] = key_node.start_mark.line + 1
        found.value_lines[key] = value_node.start_mark.line + 1
    return found


def _items(loader: yaml.SafeLoader, node: yaml.SequenceNode) -> Items:
    found = Items(node.start_mark.line + 1)
    for item in node.value:
        found.append(loader.construct_object(item, deep=True))
        found.lines.append(item.start_mark.line + 1)
    return found


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _map)
_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_SEQUENCE_TAG, _items)


def _check_size(document: yaml.Node) -> None:
    """Refuse a document that is a little text and, with its aliases and merged keys written out, endless.

    Raises:
        MarkedYAMLError: when it is.
    """
    sizes: dict[int, int] = {}
    depths: dict[int, int] = {}
    pending = [(document, False)]
    under_way: set[int] = set()
    while pending:
        node, done = pending.pop()
        parts: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            parts = list(node.value)
        key = id(node)
        if done:
            under_way.discard(key)
            sizes[key] = 1 + sum(sizes[id(part)] for part in parts)
            depths[key] = 1 + max((depths[id(part)] for part in parts), default=0)
            if sizes[key] > MOST_NODES or depths[key] > DEEPEST:
                problem = f"with its aliases written out it has more than {MOST_NODES} parts, or is nested too deep"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        elif key in under_way:
            raise yaml.MarkedYAMLError(problem="an alias of what it is itself a part of", problem_mark=node.start_mark)
        elif key not in sizes:
            under_way.add(key)
            pending.append((node, True))
            pending.extend((part, False) for part in parts if id(part) not in sizes)


def load_documents(text: str, file: str) -> list[tuple[Any, str]]:
    """Return the documents of YAML text, with `Map` and `Items` for their maps and lists, and the text of each.

    Args:
        text: the YAML.
        file: what messages call it.

    Raises:
        RecipeError: when it is no YAML, or has a key twice, or one that is not text.
    """
    found = []
    loader = None
    try:
        loader = _Loader(text)
        while loader.check_node():
            node = loader.get_node()
            assert node is not None
            _check_size(node)
            begin, end = node.start_mark.index, node.end_mark.index
            line = text.rfind("\n", 0, begin) + 1
            if not text[line:begin].strip():
                begin = line  # the indentation belongs to it
            found.append((loader.construct_document(node), text[begin:end]))
    except yaml.MarkedYAMLError as error:
        number = error.problem_mark.line + 1 if error.problem_mark else None
        raise RecipeError(f"{Place(file, number)}: {error.problem}: correct the YAML") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RecipeError(f"{file} is not YAML: {error}") from error
    except (KeyError, IndexError, AttributeError, TypeError, OverflowError) as error:
        # What PyYAML raises for explicit tags that do not fit, such as `!!bool 2` or `!!timestamp x`.
        raise RecipeError(f"{file} is not YAML: a value does not fit its tag ({error!r}): leave the tag out") from error
    finally:
        if loader is not None:
            loader.dispose()
    return [(found[0][0], text)] if len(found) == 1 else found
