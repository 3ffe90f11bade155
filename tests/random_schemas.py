"""JSON schemas as people write them, by chance and repeatably, and schemas that no grammar can hold.

They are made of what is offered, without a look at what a grammar's compiler makes of it.
"""

import random
from typing import Any

# Names that are plain, that hold what JSON escapes, that are no ASCII, and that are keywords elsewhere.
_NAMES = (
    *("id", "name", "user_name", "email", "createdAt", "tags", "price", "status", "items", "type", "properties"),
    *("note", "$ref", "enum", "größe", "名前", "smile 😀", 'quo"te', "back\\slash", "a/b~c", "two words", "Ünï"),
    *("new\nline", "x"),
)
_WORDS = (
    *("red", "green", "in progress", "größer", "日本", "😀", 'say "hi"', "a\\b", "tab\there", "", "N/A", "true", "1"),
)
_PATTERNS = (
    *(r"^[A-Z]{2}-\d{3}$", r"^\+?[0-9]{6,12}$", r"^(red|green|blue)$", r"^[a-z0-9_]+$", r"^#[0-9a-fA-F]{6}$"),
    *(r"^v\d+\.\d+\.\d+$", r"^a", r"z$", r"[0-9]", r"^\S{1,8}$", r"^[^@ ]+@[a-z]+\.(com|org)$", r"^$|^x+$"),
    *(r"\d{2}:\d{2}", r"^\w{2,5}$", r"^[äöü]{1,3}$", r"^(?:ab|cd){1,3}$", r"^.{3}$", r"^[\w-]{1,10}$"),
    *(r"^\$\d+$", r"^a\"b\\c$"),
)
_FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")


class _Maker:
    """Makes one schema. `shared` are its `$defs`."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self.shared: dict[str, Any] = {}

    def whole(self) -> dict[str, Any]:
        made = self._object(3) if self._chance.random() < 0.85 else self.any(3)
        if self._chance.random() < 0.2:
            made["$schema"] = "https://json-schema.org/draft/2020-12/schema"
        return made | ({"$defs": self.shared} if self.shared else {})

    def any(self, depth: int) -> dict[str, Any]:
        """One of any kind, with at most `depth` others in one another below."""
        kinds = [self._text] * 4 + [self._number] * 3 + [self._choice] * 3 + [self._plain] * 2
        if depth:
            for kind in (self._object, self._array, self._either):
                kinds += [lambda kind=kind: kind(depth - 1)] * 3  # type: ignore[misc]
            kinds += [lambda: self._referred(depth - 1)] * 2 + [lambda: self._both(depth - 1)]
        made: dict[str, Any] = self._chance.choice(kinds)()
        if self._chance.random() < 0.2:
            made["description"] = "What it is for."
        return made

    def _plain(self) -> dict[str, Any]:
        return self._chance.choice(
            [{"type": "boolean"}, {"type": "null"}, {"type": ["boolean", "null"]}, {"type": ["string", "integer"]}]
        )

    def _text(self) -> dict[str, Any]:
        chance = self._chance
        made: dict[str, Any] = {"type": "string"}
        if (way := chance.random()) < 0.3:
            made["pattern"] = chance.choice(_PATTERNS)
        elif way < 0.5:
            made["format"] = chance.choice(_FORMATS)
        elif way < 0.8:
            made["maxLength"] = chance.randrange(1, 20)
            if chance.random() < 0.5:
                made["minLength"] = chance.randrange(made["maxLength"] + 1)
        if chance.random() < 0.2:
            made["type"] = ["string", "null"]
        return made

    def _number(self) -> dict[str, Any]:
        chance = self._chance
        made: dict[str, Any] = {"type": chance.choice(["integer", "integer", "number"])}
        low = chance.choice([-1000, -7, -1.5, 0, 0, 1, 0.25, 18, 1900])
        high = low + chance.choice([2, 2.5, 9, 100, 123456])
        if (way := chance.random()) < 0.5:
            made |= {chance.choice(["minimum", "exclusiveMinimum"]): low}
            made |= {chance.choice(["maximum", "exclusiveMaximum"]): high}
        elif way < 0.7:
            made |= {chance.choice(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]): low}
        elif way < 0.85:
            made["multipleOf"] = chance.choice([1, 2, 5, 100] if made["type"] == "integer" else [0.5, 2.5, 10, 0.25])
        return made

    def _choice(self) -> dict[str, Any]:
        chance = self._chance
        if (way := chance.random()) < 0.25:
            return {"const": chance.choice([*_WORDS, 0, -1.5, True, None, {"a": [1, None]}, [], {}, ["x", {"y": "ü"}]])}
        if way < 0.8:
            return {"type": "string", "enum": chance.sample(_WORDS, chance.randrange(1, 6))}
        return {"enum": chance.sample([*_WORDS, 1, 2.5, True, False, None, {"a": 1}, [1, 2], 10**12], 3)}

    def _array(self, depth: int) -> dict[str, Any]:
        chance = self._chance
        made: dict[str, Any] = {"type": "array"}
        if chance.random() < 0.75:
            made["items"] = self.any(depth)
        if chance.random() < 0.25:
            made["prefixItems"] = [self.any(depth) for _ in range(chance.randrange(1, 4))]
            if chance.random() < 0.5:
                made["items"] = False
        if chance.random() < 0.7:
            made["maxItems"] = chance.randrange(5)
        if chance.random() < 0.5:
            made["minItems"] = chance.randrange(made.get("maxItems", 3) + 1)
        if made.get("items") is False and made.get("minItems", 0) > len(made["prefixItems"]):
            made["minItems"] = len(made["prefixItems"])  # otherwise there is no such array
        return made

    def _object(self, depth: int) -> dict[str, Any]:
        chance = self._chance
        names = chance.sample(_NAMES, chance.randrange(1, 6))
        made: dict[str, Any] = {"type": "object", "properties": {name: self.any(depth) for name in names}}
        if chance.random() < 0.8:
            made["required"] = [name for name in names if chance.random() < 0.7]
            chance.shuffle(made["required"])
        if (way := chance.random()) < 0.6:
            made["additionalProperties"] = False
        elif way < 0.75:
            made["additionalProperties"] = self.any(0)
        elif way < 0.8:
            made["additionalProperties"] = True
        if chance.random() < 0.08:
            made["patternProperties"] = {r"^x-[a-z]{1,4}$": self.any(0)}
        if chance.random() < 0.06:
            made = {"type": "object", "additionalProperties": self.any(0), "maxProperties": chance.randrange(1, 4)}
            made["minProperties"] = chance.randrange(2)
        return made

    def _either(self, depth: int) -> dict[str, Any]:
        chance = self._chance
        if (way := chance.random()) < 0.35:
            return {"anyOf": [self.any(depth), {"type": "null"}]}
        if way < 0.6:
            return {"anyOf": [self.any(depth) for _ in range(chance.randrange(2, 4))]}
        if way < 0.75:
            return {"oneOf": [{"type": "integer", "minimum": 3}, {"type": "string", "maxLength": 4}, {"type": "null"}]}
        kinds = [self._object(depth) for _ in range(chance.randrange(2, 4))]
        for place, kind in enumerate(kinds):
            kind["properties"] = {"kind": {"const": f"k{place}"}} | kind.get("properties", {})
            kind["required"] = ["kind", *kind.get("required", [])]
        return {chance.choice(["oneOf", "anyOf"]): kinds}

    def _referred(self, depth: int) -> dict[str, Any]:
        name = self._chance.choice(["node", "money", "größe"])
        if name not in self.shared:
            self.shared[name] = {}  # what is made below may refer to it
            if name == "node":
                children = {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}
                value = self.any(0)
                self.shared[name] = {
                    "type": "object", "properties": {"value": value, "children": children}, "required": ["value"],
                    "additionalProperties": False,
                }  # fmt: skip
            else:
                made = self.any(depth)
                self.shared[name] = self._text() if "$ref" in made else made  # nothing may be itself alone
        return {"$ref": f"#/$defs/{name}"}

    def _both(self, depth: int) -> dict[str, Any]:
        first, second = self._object(depth), self._object(0)
        second = {
            "type": "object",
            "properties": {f"{name} too": one for name, one in second.get("properties", {}).items()},
            "required": [f"{name} too" for name in second.get("required", [])],
        }
        for key in ("additionalProperties", "minProperties", "maxProperties"):
            first.pop(key, None)
        if self._chance.random() < 0.5:
            return {"allOf": [first, second]}
        return first | {"allOf": [second]}


def random_schema(seed: int) -> dict[str, Any]:
    """One that JSON Schema's draft 2020-12 allows."""
    return _Maker(seed).whole()


# A keyword, and a schema that it makes one which no grammar holds.
UNHELD: tuple[tuple[str, dict[str, Any]], ...] = (
    ("not", {"type": "string", "not": {"const": "x"}}),
    ("if", {"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}}),
    ("then", {"type": "object", "then": {"required": ["b"]}}),
    ("else", {"type": "object", "else": False}),
    ("dependentSchemas", {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}}),
    ("dependentRequired", {"type": "object", "dependentRequired": {"a": ["b"]}}),
    ("dependencies", {"type": "object", "dependencies": {"a": ["b"]}}),
    ("uniqueItems", {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}),
    ("contains", {"type": "array", "contains": {"const": 1}}),
    ("minContains", {"type": "array", "minContains": 2}),
    ("propertyNames", {"type": "object", "propertyNames": {"pattern": "^a"}}),
    ("unevaluatedProperties", {"type": "object", "unevaluatedProperties": False}),
    ("unevaluatedItems", {"type": "array", "unevaluatedItems": False}),
    ("$dynamicRef", {"$dynamicRef": "#node"}),
    ("$anchor", {"type": "integer", "$anchor": "here"}),
    ("$ref", {"$ref": "https://example.com/person.json"}),
    ("$ref", {"$ref": "#/$defs/missing"}),
    ("format", {"type": "string", "format": "credit-card"}),
    ("format", {"type": "string", "format": "json-pointer"}),
    ("contentEncoding", {"type": "string", "contentEncoding": "base64"}),
    ("nullable", {"type": "string", "nullable": True}),
    ("pattern", {"type": "string", "pattern": r"^(?=.*\d).{8,}$"}),
    ("pattern", {"type": "string", "pattern": r"^(a+)\1$"}),
    ("multipleOf", {"type": "number", "multipleOf": 0.01}),
    ("minProperties", {"type": "object", "minProperties": 3}),
    ("maxProperties", {"type": "object", "properties": {"a": {}, "b": {}}, "maxProperties": 1}),
    ("oneOf", {"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 3}]}),
    ("exclusiveMinimum", {"type": "number", "minimum": 0, "exclusiveMinimum": True}),
    ("$id", {"type": "object", "properties": {"a": {"$id": "https://example.com/a", "type": "string"}}}),
    ("required", {"type": "object", "properties": {"a": {"type": "string", "required": True}}}),
)
