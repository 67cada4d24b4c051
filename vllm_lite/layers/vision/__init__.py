"""Vision towers: they turn images into vectors that a text model reads in the place of token embeddings.

attention.py  what patches attend to: their image, or a window of it
tower.py      the base of all towers: their weights, and the blocks that they share
siglip.py     SigLIP on tiles of one size; Idefics 3's and SmolVLM's
anyres.py     LLaVA's: CLIP or SigLIP on squares that are put together again
gemma.py      Gemma 3's, on squares; Gemma 4's, and what Gemma 4 Unified has in place of one, on images of any size
qwen.py       those of Qwen3-VL and Qwen3.5, on images of any size
qwen2.py      those of Qwen2-VL and Qwen2.5-VL
pixtral.py    Pixtral's and Mistral 3's, on images of any size, in rows
"""
