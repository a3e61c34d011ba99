"""Layers that know nothing of this project: errors, processes, git, the package index, progress."""
