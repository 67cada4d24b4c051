"""OpenAI's formats: what comes in, what goes out, and the document that describes both.

bodies.py     the fields of request bodies, and which others are refused or ignored
decoding.py   JSON into declared types
forms.py      the form that an answer must have, and the tools that it may call, under all their names
grammars.py   both, made into the grammar that travels
formats.py    how the model writes calls and reasoning
prompts.py    bodies to token ids
steady.py     system messages without what differs from request to request
rendering.py  messages to text, by the model's chat template in a process of its own
chunks.py     the fields of answers: of each streamed chunk, and of the whole body
parsing.py    a message taken apart while it arrives: content, reasoning, calls
parsed.py     the fields of chats that are taken apart
logprobs.py   log-probabilities in answers
errors.py     answers that are errors
openapi.py    /openapi.json
"""
