"""Recipes: one YAML a deployment, readable by eugr's runner, with a block of our own."""
