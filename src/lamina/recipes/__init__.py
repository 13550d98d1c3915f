"""Recipes: from data to model, engine, corpus, plan and optimiser in one call. Nothing in them is read from private data."""

from lamina.recipes.images import images
from lamina.recipes.recipe import Recipe

__all__ = ["Recipe", "images"]
