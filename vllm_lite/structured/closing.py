"""Close the objects of a schema that names their properties and does not say whether there may be others.

JSON Schema lets others stand. A function takes only the arguments that it names, and a small model that may go on with
names of its own often does not come to an end: LangChain's and LiteLLM's calls of the demo model were all cut.
"""

from vllm_lite.structured.schema import Schema, mapped, subschemas

_SPLIT = ("anyOf", "oneOf", "$ref", "patternProperties")
"""Beside `properties` these say more about the same object, which a closed part would forbid."""


def closed(schema: Schema) -> Schema:
    """Return a copy whose objects have no other properties than those named.

    It is the schema as it is where parts of it describe one object together, since parts that are closed one by one
    would contradict each other.
    """
    if not _is_one_by_one(schema):
        return schema

    def visit(_: str, part: Schema) -> Schema:
        return {**part, "additionalProperties": False} if _names_all(part) else dict(part)

    return mapped(schema, visit)


def _names_all(part: Schema) -> bool:
    return "properties" in part and "additionalProperties" not in part and "patternProperties" not in part


def _is_one_by_one(schema: Schema) -> bool:
    """Whether each object is described in one place."""
    left = [schema]
    while left:
        part = left.pop()
        if "allOf" in part or ("properties" in part and any(key in part for key in _SPLIT)):
            return False
        left += [inner for _, inner in subschemas(part)]
    return True
