"""Source trees: unpacked, patched strictly, and exported as patches again."""
