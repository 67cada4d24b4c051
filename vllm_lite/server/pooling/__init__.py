"""Vectors and scores: /v1/embeddings, /pooling, /classify, /score, /rerank

bodies.py   request bodies
call.py     one HTTP request: many texts, of which a bounded number runs at a time
runs.py     runs the texts of a body in the engine
encodings.py  encodes numbers as bytes
answers.py  the answers, piece by piece
routes.py   the routes
"""
