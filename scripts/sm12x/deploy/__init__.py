"""Renders recipes for what runs them: pure functions from a recipe to a text."""
