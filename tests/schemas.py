"""Checks JSON against the schemas in `docs/schemas`, which use a part of JSON Schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "docs" / "schemas"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))

TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
    "null": type(None),
    "array": list,
    "object": dict,
}
ANNOTATIONS = {"$schema", "$defs", "title", "description"}
KEYWORDS = {"type", "enum", "anyOf", "items", "minItems", "properties", "required",
            "additionalProperties", "$ref"}  # fmt: skip


def check(name: str, value: Any) -> None:
    """Raises AssertionError, which says where, if a value is not as the schema says."""
    schema = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    errors = _errors(schema, value, name, schema)
    assert errors == [], "\n".join(errors)


def _errors(schema: Any, value: Any, place: str, root: Any) -> list[str]:
    """What is wrong with a value and all that is in it."""
    if "$ref" in schema:
        schema = root["$defs"][schema["$ref"].removeprefix("#/$defs/")]
    unknown = schema.keys() - ANNOTATIONS - KEYWORDS
    assert not unknown, f"{place}: this check does not know {unknown}"
    if "anyOf" in schema:
        found = [_errors(branch, value, place, root) for branch in schema["anyOf"]]
        return [] if [] in found else [f"{place}: {value!r} fits nothing of {schema['anyOf']}"]
    if "enum" in schema and value not in schema["enum"]:
        return [f"{place}: {value!r} is none of {schema['enum']}"]
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    if types and not any(_is_of(kind, value) for kind in types):
        return [f"{place}: {value!r} is no {' or '.join(types)}"]
    errors: list[str] = []
    if isinstance(value, list):
        if len(value) < schema.get("minItems", 0):
            errors.append(f"{place}: has {len(value)} items")
        for index, item in enumerate(value):
            errors += _errors(schema.get("items", {}), item, f"{place}[{index}]", root)
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        others = schema.get("additionalProperties", {})
        missing = [key for key in schema.get("required", []) if key not in value]
        errors += [f"{place}: {key} is missing" for key in missing]
        for key, item in value.items():
            if key in properties:
                errors += _errors(properties[key], item, f"{place}.{key}", root)
            elif others is False:
                errors.append(f"{place}: {key} is not in the schema")
            else:
                errors += _errors(others, item, f"{place}.{key}", root)
    return errors


def _is_of(kind: str, value: Any) -> bool:
    """Whether a value is of a type of JSON; Python's booleans are integers, JSON's are not."""
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, TYPES[kind])
