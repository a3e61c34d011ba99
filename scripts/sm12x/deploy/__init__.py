"""Renders recipes for docker, compose, shells, llama-swap and Nomad; pure functions."""
