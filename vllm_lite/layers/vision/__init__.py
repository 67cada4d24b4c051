"""Towers: images in, vectors that a text model reads among those of tokens out.

tower.py     the base of all towers: their weights, and the blocks that they share
siglip.py    SigLIP on tiles of one size; Idefics 3's and SmolVLM's
anyres.py    LLaVA's: CLIP or SigLIP on squares that are put together again
gemma.py     Gemma 3's, on squares; Gemma 4's, and what Gemma 4 Unified has in place of one, on images of any size
qwen.py      Qwen3.5's, on images of any size
pixtral.py   Pixtral's and Mistral 3's, on images of any size, in rows
"""
