"""Ollama's API below /api, which editors and desktop clients speak.

bodies.py       what a request may say
chats.py        such a body as a chat or a completion
answers.py      the answer, whole or line by line
errors.py       errors in this API's form
information.py  the model as this API describes it
routes.py       the routes
"""
