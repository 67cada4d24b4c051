"""OpenAI's formats: what comes in, what goes out, and the document that describes both.

bodies.py     the fields of request bodies, and which others are refused or ignored
prompts.py    bodies to token ids
rendering.py  messages to text, by the model's chat template in a process of its own
chunks.py     the fields of answers: of each streamed chunk, and of the whole body
logprobs.py   log-probabilities in answers
errors.py     answers that are errors
openapi.py    /openapi.json and /docs
"""
