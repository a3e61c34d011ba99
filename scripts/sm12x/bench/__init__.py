"""Benchmarks of a live server by pinned tools, and the evidence that is made of them."""
