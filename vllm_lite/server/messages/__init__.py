"""Anthropic's API: /v1/messages and /v1/messages/count_tokens.

bodies.py   request bodies
chats.py    conversion of a body to a ChatBody
answers.py  the answer, whole or as events
errors.py   errors in this API's format
routes.py   the routes
"""
