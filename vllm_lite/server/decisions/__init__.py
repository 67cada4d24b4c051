"""Typed decisions over HTTP: /v1/systemone, with the fields of vLLM

bodies.py   what a request may say
routes.py   the route: from a body to the answers of its questions
"""
