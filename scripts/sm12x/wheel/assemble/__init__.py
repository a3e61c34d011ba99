"""The wheel, put together from the official one, the patched files and the compiled modules."""
