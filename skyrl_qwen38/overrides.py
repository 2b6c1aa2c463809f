"""Checks `key.path=value` overrides against a tree of dataclasses: names, types and ranges.

SkyRL's parser checks key names only, one level at a time, and prints every valid field of that level. Here a wrong key
is answered with the nearest right one, and a value of the wrong type or outside its range is refused, each in one
sentence and before anything is built.

Annotations are read as they are. A field annotated with a plain `dict` (or `Any`) is a free-form place: what is below
it is not checked here.
"""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any


class ConfigError(ValueError):
    """A setting is wrong. The message is one sentence: which setting, what is wrong, what to do."""


@dataclasses.dataclass(frozen=True)
class Range:
    """Bounds of a number. `pattern` is matched against the dotted path as file names are (`*.lr`)."""

    pattern: str
    low: float
    high: float = math.inf
    low_open: bool = False

    def __contains__(self, value: float) -> bool:
        return (self.low < value if self.low_open else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        low = f"{'above' if self.low_open else 'at least'} {self.low:g}"
        return low if self.high == math.inf else f"{low} and at most {self.high:g}"


def check_values(
    schema: type, values: Mapping[str, Any], ranges: Sequence[Range] = (), wider: Mapping[str, Any] | None = None
) -> None:
    """Check the type and range of every value whose key exists.

    Args:
        schema: the root dataclass.
        values: nested dictionaries as parsed.
        ranges: the first range whose pattern matches a number's path bounds it.
        wider: dotted path → annotation that replaces the field's own, where the library documents more than it
            annotates.

    Raises:
        ConfigError: on the first wrong value.
    """
    for path, annotation, value in _known_values(schema, values, ""):
        annotation = (wider or {}).get(path, annotation)
        if not _fits(value, annotation):
            raise ConfigError(
                f"{path} must be {describe(annotation)}, not {_show(value)}{_hint(path, value, annotation)}"
            )
        for number in value if isinstance(value, list) else [value]:
            if not isinstance(number, int | float) or isinstance(number, bool):
                continue
            if not math.isfinite(number):
                raise ConfigError(f"{path} must be a finite number, not {number}")
            bounds = next((r for r in ranges if fnmatchcase(path, r.pattern)), None)
            if bounds is not None and number not in bounds:
                raise ConfigError(f"{path} must be {bounds}, not {number}")


def check_keys(schema: type, values: Mapping[str, Any]) -> None:
    """Check that every key exists.

    Raises:
        ConfigError: naming the first key that does not, with the nearest one that does.
    """
    for path in _unknown_paths(schema, values, ""):
        raise ConfigError(f"{path} is not a setting{_suggestion(path, [p for p, _ in leaves(schema)])}")


def leaves(schema: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, annotation) of every setting that is not a group."""
    for name, annotation in typing.get_type_hints(schema).items():
        path = f"{prefix}{name}"
        if (group := _group(annotation)) is not None:
            yield from leaves(group, f"{path}.")
        else:
            yield path, annotation


def nearest(word: str, words: Sequence[str], cutoff: float = 0.6) -> str | None:
    """The most similar of `words`, or None if none is `cutoff` similar (0: anything, 1: equal)."""
    return next(iter(difflib.get_close_matches(word, words, n=1, cutoff=cutoff)), None)


def describe(annotation: Any) -> str:
    """An annotation in the words of an error message."""
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}
    if annotation in names:
        return names[annotation]
    if _group(annotation) is not None:
        return "a group of settings"
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(argument) for argument in arguments)
    if origin is typing.Literal:
        return " or ".join(str(choice) for choice in arguments)
    if origin is list:
        return f"a list, each element {describe(arguments[0])}" if arguments else "a list"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return " or ".join(str(member.value) for member in annotation)
    return "a dictionary" if (origin or annotation) is dict else "a list" if annotation is list else str(annotation)


def _known_values(schema: type, values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any, Any]]:
    annotations = typing.get_type_hints(schema)
    for name, value in values.items():
        if name not in annotations:
            continue
        group = _group(annotations[name])
        if group is not None and isinstance(value, Mapping):
            yield from _known_values(group, value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", annotations[name], value


def _unknown_paths(schema: type, values: Mapping[str, Any], prefix: str) -> Iterator[str]:
    annotations = typing.get_type_hints(schema)
    for name, value in values.items():
        if name not in annotations:
            yield from _paths_below(value, f"{prefix}{name}")
        elif (group := _group(annotations[name])) is not None and isinstance(value, Mapping):
            yield from _unknown_paths(group, value, f"{prefix}{name}.")


def _paths_below(value: Any, path: str) -> Iterator[str]:
    if not isinstance(value, Mapping) or not value:
        yield path
        return
    for name, below in value.items():
        yield from _paths_below(below, f"{path}.{name}")


def _suggestion(path: str, known: Sequence[str]) -> str:
    """A right name in a wrong place is found by its last word, a misspelt one by likeness."""
    same_name = [p for p in known if p.rpartition(".")[2] == path.rpartition(".")[2]]
    best = nearest(path, same_name, cutoff=0) or nearest(path, known)
    return (
        f"; did you mean {best}?" if best else "; `trainer.`, `generator.`, `data.` and `environment.` start them all"
    )


def _group(annotation: Any) -> type | None:
    """The dataclass behind `T`, `T | None` or `Annotated[T, …]`."""
    if typing.get_origin(annotation) is typing.Annotated:
        return _group(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return next((g for a in typing.get_args(annotation) if (g := _group(a)) is not None), None)
    return annotation if isinstance(annotation, type) and dataclasses.is_dataclass(annotation) else None


def _fits(value: Any, annotation: Any) -> bool:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return True
    if origin is typing.Annotated:
        return _fits(value, arguments[0])
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, argument) for argument in arguments)
    if origin is typing.Literal:
        return any(value == choice and type(value) is type(choice) for choice in arguments)
    if (origin or annotation) is list:
        return isinstance(value, list) and all(_fits(v, arguments[0]) for v in value if arguments)
    if (origin or annotation) is dict or _group(annotation) is not None:
        return isinstance(value, Mapping)
    if annotation in (int, float):
        return isinstance(value, int | annotation) and not isinstance(value, bool)
    if issubclass(annotation, Enum):
        return value in [member.value for member in annotation]
    return isinstance(value, annotation)


def _show(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"the text {value!r}" if isinstance(value, str) else f"{value!r}"


def _hint(path: str, value: Any, annotation: Any) -> str:
    """How to write what was probably meant, where the shell or YAML took it for something else."""
    if _fits("", annotation) and not isinstance(value, list | Mapping) and value is not None:
        return f"; to pass it as text write '{path}=\"{str(value).lower() if isinstance(value, bool) else value}\"'"
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is list and arguments and _fits(value, arguments[0]):
        return f"; write '{path}=[{value}]'"
    return ""
