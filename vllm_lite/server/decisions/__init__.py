"""Typed decisions over HTTP: /v1/systemone, with the fields of vLLM

bodies.py   the request body
routes.py   the route: from a body to the answers of its questions
"""
