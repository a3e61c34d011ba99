"""Commits of a patched source tree, exported as patches again."""
