"""Step parts: each feature's columns of the persistent batch, and its hooks around the forward pass"""
