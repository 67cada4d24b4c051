"""Layers in numbers, as config.json describes them: rope, experts, recurrent layers, latents, poolers. No torch."""
