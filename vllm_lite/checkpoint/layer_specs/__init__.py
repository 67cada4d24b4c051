"""Specs of layers from config.json: rope, experts, recurrent layers, latents, poolers. No torch."""
