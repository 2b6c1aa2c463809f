"""Names, types and ranges of overrides, on a small tree of dataclasses."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any, Literal, Optional, Union

import pytest

from skyrl_qwen38.overrides import ConfigError, Range, check_keys, check_values, describe, leaves


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Inner:
    size: int = 1
    rate: float = 0.5
    names: list[str] = field(default_factory=list)
    kind: Literal["a", "b"] = "a"


@dataclass
class Root:
    inner: Inner = field(default_factory=Inner)
    maybe: Optional[Inner] = None  # noqa: UP045 (SkyRL writes it so)
    noted: Annotated[Inner, "doc"] = field(default_factory=Inner)
    on: bool = False
    text: str = ""
    text_or_none: Optional[str] = None  # noqa: UP045
    either: Union[bool, int] = True  # noqa: UP007
    colour: Colour = Colour.RED
    free: dict[str, Any] = field(default_factory=dict)
    anything: Any = None


RANGES = [Range("*.size", 1, 8), Range("*.rate", 0, low_open=True)]


@pytest.mark.parametrize(
    "values",
    [
        {"inner": {"size": 1, "rate": 2, "names": ["a"], "kind": "b"}},
        {"inner": {"rate": 1e-9, "names": []}, "maybe": {"size": 8}, "noted": {"size": 2}},
        {"on": True, "text": "1", "text_or_none": None, "either": 3, "colour": "blue"},
        {"maybe": None, "free": {"not": {"checked": 1}}, "anything": object()},
    ],
)
def test_right_values_pass(values):
    check_values(Root, values, RANGES)
    check_keys(Root, values)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"inner": {"size": "x"}}, "inner.size must be a whole number, not the text 'x'"),
        ({"inner": {"size": True}}, "inner.size must be a whole number, not true"),
        ({"inner": {"size": 2.0}}, "inner.size must be a whole number, not 2.0"),
        ({"inner": {"size": None}}, "inner.size must be a whole number, not null"),
        ({"inner": {"size": 9}}, "inner.size must be at least 1 and at most 8, not 9"),
        ({"maybe": {"size": 0}}, "maybe.size must be at least 1 and at most 8, not 0"),
        ({"noted": {"size": 0}}, "noted.size must be at least 1 and at most 8, not 0"),
        ({"inner": {"rate": 0}}, "inner.rate must be above 0, not 0"),
        ({"inner": {"rate": float("inf")}}, "inner.rate must be a finite number, not inf"),
        ({"inner": {"rate": "fast"}}, "inner.rate must be a number, not the text 'fast'"),
        ({"inner": {"names": "a"}}, "must be a list, each element text, not the text 'a'; write 'inner.names=[a]'"),
        ({"inner": {"names": ["a", 1]}}, "inner.names must be a list, each element text, not ['a', 1]"),
        ({"inner": {"kind": "c"}}, "inner.kind must be a or b, not the text 'c'"),
        ({"inner": 3}, "inner must be a group of settings, not 3"),
        ({"on": 1}, "on must be true or false, not 1"),
        ({"on": "yes"}, "on must be true or false, not the text 'yes'"),
        ({"text": 12}, "text must be text, not 12; to pass it as text write 'text=\"12\"'"),
        ({"text": True}, "text must be text, not true; to pass it as text write 'text=\"true\"'"),
        ({"text": None}, "text must be text, not null"),
        ({"either": "x"}, "either must be true or false or a whole number, not the text 'x'"),
        ({"colour": "green"}, "colour must be red or blue, not the text 'green'"),
        ({"free": [1]}, "free must be a dictionary, not [1]"),
    ],
)
def test_a_wrong_value_is_one_sentence(values, sentence):
    with pytest.raises(ConfigError) as error:
        check_values(Root, values, RANGES)
    assert sentence in str(error.value)


def test_a_documented_type_wins_over_the_annotation():
    with pytest.raises(ConfigError):
        check_values(Root, {"text": ["a"]})
    check_values(Root, {"text": ["a"]}, wider={"text": str | list[str]})


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"iner": {"size": 1}}, "iner.size is not a setting; did you mean inner.size?"),
        ({"inner": {"siez": 1}}, "inner.siez is not a setting; did you mean inner.size?"),
        ({"maybe": {"text": "a"}}, "maybe.text is not a setting; did you mean text?"),
        ({"maybe": {"names_": []}}, "maybe.names_ is not a setting; did you mean maybe.names?"),
        ({"qqqqqq": 1}, "qqqqqq is not a setting; `trainer.`"),
        ({"qqqqqq": {}}, "qqqqqq is not a setting"),
    ],
)
def test_a_wrong_key_suggests_the_nearest(values, sentence):
    check_values(Root, values)
    with pytest.raises(ConfigError) as error:
        check_keys(Root, values)
    assert str(error.value).startswith(sentence)


def test_leaves_walk_optional_and_annotated_groups():
    paths = [path for path, _ in leaves(Root)]
    assert {"inner.size", "maybe.size", "noted.size", "free", "anything"} <= set(paths)
    assert "inner" not in paths


@pytest.mark.parametrize(
    ("annotation", "words"),
    [(list[int], "a list, each element a whole number"), (int | None, "a whole number or null"), (list, "a list")],
)
def test_annotations_are_described_in_words(annotation, words):
    assert describe(annotation) == words
