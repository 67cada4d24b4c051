"""The API of llama.cpp's server: /completion, /infill, /apply-template, and what its web clients read first.

bodies.py       request bodies
completions.py  conversion of a body to prompts and a CompletionBody
answers.py      the answer, whole or event by event
errors.py       errors in this API's format
information.py  /props and /slots
routes.py       the routes that take a prompt
"""
