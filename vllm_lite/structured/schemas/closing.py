"""Close the objects of a schema that names their properties and does not say whether there may be others.

JSON Schema lets others stand. A function takes only the arguments that it names, and a small model that may go on with
names of its own often does not come to an end: LangChain's and LiteLLM's calls of the demo model were all cut.
"""

from vllm_lite.structured.schemas.schema import Schema, check_depth, mapped, subschemas

_DESCRIPTIONS = ("properties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref")
"""Two of these describe one object together, and a closed one of them would forbid what the other names."""


def closed(schema: Schema) -> Schema:
    """Return a copy whose objects have no other properties than those named.

    It is the schema as it is where parts of it describe one object together, since parts that are closed one by one
    would contradict each other. Raises RequestError for one that is nested too deeply.
    """
    check_depth(schema)
    if not _is_one_by_one(schema):
        return schema

    def visit(_: str, part: Schema) -> Schema:
        return {**part, "additionalProperties": False} if _names_all(part) else dict(part)

    return mapped(schema, visit)


def _names_all(part: Schema) -> bool:
    """Whether an object with no others than its named properties can be valid, and nothing is said of others."""
    named, required = part.get("properties"), part.get("required", ())
    if not isinstance(named, dict) or "additionalProperties" in part or not isinstance(required, list | tuple):
        return False
    least = part.get("minProperties", 0)
    return all(name in named for name in required) and isinstance(least, int) and least <= len(named)


def _is_one_by_one(schema: Schema) -> bool:
    """Whether each object is described in one place."""
    left = [schema]
    while left:
        part = left.pop()
        parts = part.get("allOf", ())
        if sum(key in part for key in _DESCRIPTIONS) > 1 or not isinstance(parts, list | tuple) or len(parts) > 1:
            return False
        left += [inner for _, inner in subschemas(part)]
    return True
