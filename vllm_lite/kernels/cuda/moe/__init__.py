"""Experts on a GPU: routing, sorting, and their products."""
