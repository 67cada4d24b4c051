"""Experts on a GPU: the choice by tokens, their order, and their products."""
