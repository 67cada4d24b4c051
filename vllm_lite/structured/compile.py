"""From what a user asks for to the text of a grammar that travels."""

from vllm_lite.protocol.structured import StructuredOutputsParams


def compile_grammar(wanted: StructuredOutputsParams) -> str:
    """Make the grammar of `wanted`, as SamplingParams.grammar carries it, and check it under the limits.

    It takes less than a millisecond for most, and up to a second for the largest, without the GIL: call it in a thread
    where others must not wait. Raises RequestError, which names the place: the JSON pointer of a schema, the line and
    column of a text.
    """
    raise NotImplementedError
