"""Recipes: model, features, plan, engine and optimiser for given data in one call. No setting is read from private data."""

from lamina.recipes.images import images
from lamina.recipes.recipe import Recipe
from lamina.recipes.signals import beats_autoencoder, ecg, glucose
from lamina.recipes.tabular import tabular

__all__ = ["Recipe", "beats_autoencoder", "ecg", "glucose", "images", "tabular"]
