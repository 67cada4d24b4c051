"""Vectors and scores: /v1/embeddings, /pooling, /classify, /score, /rerank

bodies.py   what a request may say
call.py     one such HTTP request: many texts, of which so many run at a time
runs.py     from a body to the numbers of its texts
encodings.py  numbers as bytes
answers.py  the answers, piece by piece
routes.py   the routes
"""
