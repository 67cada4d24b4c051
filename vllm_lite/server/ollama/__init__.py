"""Ollama's API below /api, which editors and desktop clients speak.

bodies.py       request bodies
chats.py        conversion of a body to a ChatBody or CompletionBody
answers.py      the answer, whole or line by line
errors.py       errors in this API's format
information.py  the description of the model
routes.py       the routes
"""
