"""The experts of a layer: the router, and the products of the experts that it chooses."""
