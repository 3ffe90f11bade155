"""Schemas: what a grammar cannot hold is refused by its name, and what it can is handed on unchanged."""

from collections.abc import Callable
from typing import Any

import pytest

from runtime.errors import UserError
from runtime.sampling.json_schema import MAX_DEPTH, checked_schema
from runtime.sampling.structure import Structure

INTEGER: dict[str, Any] = {"type": "integer"}
ARRAY = {"type": "array", "items": INTEGER}
OBJECT = {"type": "object", "properties": {"a": INTEGER}}
TEXT = {"type": "string"}

# Keywords of JSON Schema's drafts, of OpenAPI, of validators, and of nobody.
UNKNOWN = """
if then else not contains minContains maxContains unevaluatedItems unevaluatedProperties propertyNames
dependentRequired dependentSchemas dependencies $dynamicRef $dynamicAnchor $recursiveRef $recursiveAnchor $anchor
$vocabulary id extends disallow divisibleBy contentEncoding contentMediaType contentSchema nullable xml externalDocs
example formatMinimum formatMaximum formatExclusiveMinimum regexp transform instanceof typeof uniqueItemProperties
allRequired anyRequired oneRequired patternRequired deepProperties deepRequired dynamicDefaults select selectCases
range exclusiveRange $async $data $merge $patch links media propertyOrder enumNames options x-guidance x-order
banana
""".split()  # noqa: SIM905 (easier to read than a list of texts)


@pytest.mark.parametrize("keyword", UNKNOWN)
def test_unknown_keywords_are_refused_by_their_name_wherever_they_are(keyword: str) -> None:
    places: list[Callable[[Any], Any]] = [
        lambda schema: schema,
        lambda schema: {"type": "object", "properties": {"x": schema}},
        lambda schema: {"type": "array", "items": schema},
        lambda schema: {"type": "array", "prefixItems": [True, schema]},
        lambda schema: {"anyOf": [INTEGER, {"allOf": [schema]}]},
        lambda schema: {"additionalProperties": schema},
        lambda schema: {"patternProperties": {"^a": schema}},
        lambda schema: {"$ref": "#/$defs/x", "$defs": {"x": schema}},
    ]
    for value in ({}, True, ["a"], 1):
        for place in places:
            with pytest.raises(UserError, match=rf"keyword {keyword.replace('$', '.')} .* cannot be enforced"):
                Structure.json_schema(place({**OBJECT, keyword: value}))
    # As a value it means nothing.
    schema = Structure.json_schema({"const": {keyword: 1}, "default": {keyword: 2}})
    assert schema.text == f'{{"const": {{"{keyword}": 1}}}}'


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({**TEXT, "format": "int32"}, "format"),
        ({**TEXT, "format": "regex"}, "format"),
        ({**ARRAY, "uniqueItems": True}, "uniqueItems"),
        ({**INTEGER, "minimum": 3, "exclusiveMinimum": True}, "exclusiveMinimum"),
        ({**INTEGER, "minimum": "3"}, "minimum"),
        ({**INTEGER, "multipleOf": 0}, "multipleOf"),
        ({"type": "number", "multipleOf": 0.01}, "multipleOf"),
        ({**INTEGER, "maximum": 10**400}, "maximum"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ({**OBJECT, "required": ["a"], "minProperties": 3}, "minProperties"),
        ({**TEXT, "minLength": -1}, "minLength"),
        ({**TEXT, "maxLength": 1.5}, "maxLength"),
        ({**TEXT, "pattern": 3}, "pattern"),
        ({**OBJECT, "required": "a"}, "required"),
        ({"type": "strin"}, "type"),
        ({"type": []}, "type"),
        ({"enum": []}, "enum"),
        ({"anyOf": []}, "anyOf"),
        ({"oneOf": {}}, "oneOf"),
        ({"properties": []}, "properties"),
        ({"$ref": "http://example.com/x"}, r"\$ref"),
        ({"$ref": "other.json#/x"}, r"\$ref"),
        ({"$ref": "#/$defs/y", "$defs": {"x": {}}}, r"\$ref"),
        ({"$ref": "#/default", "default": {"not": {}}}, r"\$ref"),
        ({"$ref": "#anchor"}, r"\$ref"),
        ({"$schema": "https://example.com/mine"}, r"\$schema"),
        ({"properties": {"a": {"$id": "b"}}}, r"\$id"),
        ({**OBJECT, "discriminator": {"propertyName": "a"}}, "discriminator"),
    ],
)
def test_values_that_cannot_be_held_to(schema: Any, keyword: str) -> None:
    with pytest.raises(UserError, match=f"keyword {keyword} "):
        Structure.json_schema(schema)


def test_what_describes_is_left_out_and_the_rest_is_handed_on() -> None:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://example.com/person",
        "title": "A person",
        "type": "object",
        "properties": {
            "title": {"type": ["string", "null"], "minLength": 1, "description": "of books"},
            "a/b~c": {"$ref": "#/$defs/n"},
            "again": {"$ref": "#/properties/a~1b~0c"},
            "tags": {"type": "array", "items": {"enum": ["x", 1]}, "uniqueItems": False, "maxItems": 2},
        },
        "required": ["title"],
        "additionalProperties": False,
        "$defs": {"n": {"oneOf": [{"const": 1}, {"const": 2}], "discriminator": {"propertyName": "k"}}},
    }
    assert checked_schema(schema) == {
        "type": "object",
        "properties": {
            "title": {"type": ["string", "null"], "minLength": 1},
            "a/b~c": {"$ref": "#/$defs/n"},
            "again": {"$ref": "#/properties/a~1b~0c"},
            "tags": {"type": "array", "items": {"enum": ["x", 1]}, "maxItems": 2},
        },
        "required": ["title"],
        "additionalProperties": False,
        "$defs": {"n": {"oneOf": [{"const": 1}, {"const": 2}]}},
    }
    assert checked_schema({"$ref": "#"}) == {"$ref": "#"} and checked_schema(True) is True


def test_schemas_that_are_none_and_too_deep_ones() -> None:
    for schema in ("object", 3, None, [INTEGER], {"items": 3}):
        with pytest.raises(UserError, match="must be an object, true or false"):
            Structure.json_schema(schema)
    deep: Any = INTEGER
    for _ in range(300):
        deep = {"type": "object", "properties": {"a": deep}}
    with pytest.raises(UserError, match=f"at most {MAX_DEPTH} deep"):
        Structure.json_schema(deep)
    deeper: Any = 1
    for _ in range(10_000):
        deeper = [deeper]
    with pytest.raises(UserError, match="schema must be JSON"):
        Structure.json_schema({"const": deeper})
    with pytest.raises(UserError, match="NaN"):
        Structure.json_schema({"const": float("nan")})
    with pytest.raises(UserError, match="schema must be JSON"):
        Structure.json_schema({"const": {1, 2}})


def test_other_structures_are_looked_at() -> None:
    for make, message in [
        (lambda: Structure("xml"), "kind of structure must be one of json_schema"),  # type: ignore[arg-type]
        (lambda: Structure.json_object("wide"), "whitespace must be compact or pretty"),  # type: ignore[arg-type]
        (lambda: Structure.regex(""), "regex is empty"),
        (lambda: Structure.regex("a" * 20_000), "takes 20000 bytes"),
        (lambda: Structure.regex("\ud800"), "half of a surrogate pair"),
        (lambda: Structure.choice([]), "at least one text"),
        (lambda: Structure.choice(["a", ""]), "at least one text"),
        (lambda: Structure.choice("ab"), "at least one text"),
        (lambda: Structure.choice(["\udcff"]), "half of a surrogate pair"),
        (lambda: Structure.lark("start: x\nx[temperature=0.5]: /a+/"), "gives a rule temperature"),
        (lambda: Structure.lark("start: x\nx[stop=/a/, max_tokens=5]: /a+/"), "gives a rule max_tokens"),
        (lambda: Structure.lark('start: %json {"type": "object", "not": {}}'), "keyword not "),
        (lambda: Structure.lark("start: %json {"), "what follows %json"),
        (lambda: Structure.lark("x" * 70_000), "takes 70000 bytes"),
        (lambda: Structure.json_schema({"enum": ["x" * 300_000]}), "at most 256000"),
    ]:
        with pytest.raises(UserError, match=message):
            make()
    assert Structure.lark('start: "[" /max_tokens/ "]" %json {"type": "integer"}').kind == "lark"
    assert Structure.choice(["ä", "b"]) == Structure("choice", '["ä", "b"]')


def test_where_the_compiler_and_validators_differ_it_gets_a_narrower_schema() -> None:
    assert checked_schema({"type": "number", "exclusiveMinimum": 0, "maximum": 5}) == {
        "type": "number", "minimum": 1e-9, "maximum": 5,
    }  # fmt: skip
    both = {"type": ["number", "null"], "exclusiveMaximum": 1, "maximum": 0.5, "exclusiveMinimum": 1900}
    assert checked_schema(both) == {"type": ["number", "null"], "maximum": 0.5, "minimum": 1900 + 1900e-9}
    whole = {"type": "integer", "exclusiveMinimum": 0}
    assert checked_schema(whole) == whole
    for form in ("date", "time", "date-time", "hostname"):
        assert len(checked_schema({"format": form})["allOf"]) == 1
    assert checked_schema({"format": "uuid"}) == {"format": "uuid"}


def test_references_are_found_however_they_are_spelled() -> None:
    definitions = {"größe": INTEGER, "List[int]": INTEGER, "a b": INTEGER, "x%y": INTEGER, "a/b": INTEGER}
    for spelled, handed_on in [
        ("größe", "gr%C3%B6%C3%9Fe"),
        ("gr%C3%B6%C3%9Fe", "gr%C3%B6%C3%9Fe"),
        ("List[int]", "List%5Bint%5D"),
        ("a b", "a%20b"),
        ("x%25y", "x%25y"),
        ("x%y", "x%25y"),
        ("a~1b", "a~1b"),
    ]:
        checked = checked_schema({"$ref": f"#/$defs/{spelled}", "$defs": definitions})
        assert checked["$ref"] == f"#/$defs/{handed_on}"


def test_what_takes_long_to_look_at_is_refused_at_once() -> None:
    """A name of a megabyte above many others; lines and brackets that an expression would try again and again."""
    below = {str(i): True for i in range(1000)}
    with pytest.raises(UserError, match="at most 256000"):
        Structure.json_schema({"properties": {"n" * 1_000_000: {"properties": below}}})
    name = "n" * 100_000
    with pytest.raises(UserError, match="keyword not ") as caught:
        Structure.json_schema({"properties": {name: {"properties": below | {"x": {"not": {}}}}}})
    assert len(str(caught.value)) < 500
    for grammar in ("\n" * 60_000, "a[\n" * 20_000, "x[temperature" * 4_000):
        assert Structure.lark(grammar).text == grammar
    for grammar in ('start: x\nx\t[stop="b",\n temperature = 1]: /a/', "x[temperature=1]: /a/"):
        with pytest.raises(UserError, match="temperature"):
            Structure.lark(grammar)
    assert Structure.lark('start: "[temperature=" /[0-9]/ "]"').kind == "lark"
