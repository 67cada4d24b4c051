"""Anthropic's API: /v1/messages and /v1/messages/count_tokens.

bodies.py   what a request may say
chats.py    such a body as a chat
answers.py  the answer, whole or as events
errors.py   errors in this API's form
routes.py   the routes
"""
