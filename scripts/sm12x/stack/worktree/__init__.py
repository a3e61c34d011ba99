"""Source trees: unpacked, and patched strictly."""
