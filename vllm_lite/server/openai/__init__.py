"""OpenAI's formats: request bodies, answers, and the OpenAPI document.

bodies.py     the fields of request bodies, and the fields that are refused or ignored
decoding.py   decodes JSON into declared types
forms.py      the constraints on an answer's form and its tools, under all their names
grammars.py   makes the grammar that is sent to the engine of both
formats.py    the model's formats of tool calls and reasoning
prompts.py    tokenizes the prompts of bodies
steady.py     removes the parts of system messages that differ from request to request
rendering.py  renders messages by the model's chat template in a process of its own
chunks.py     the fields of answers: of each streamed chunk, and of the whole body
parsing.py    splits a message into content, reasoning and calls while it arrives
parsed.py     the answers of chats that are split
logprobs.py   log-probabilities in answers
errors.py     error answers
openapi.py    /openapi.json
"""
