"""Recipes: one YAML per deployment, readable by eugr's runner, with a block of our own."""
