"""Towers: images in, vectors that a text model reads among those of tokens out.

tower.py     the base of all towers: their weights, and the blocks that they share
siglip.py    Idefics 3's and SmolVLM's, on tiles of one size
qwen.py      Qwen3.5's, on images of any size
"""
