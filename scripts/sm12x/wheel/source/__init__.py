"""The sources that are compiled: the patched release, and third-party ones."""
