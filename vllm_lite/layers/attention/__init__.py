"""A layer's attention: projections, norms of Q and K, rotation, and the latent and sparse kinds."""
