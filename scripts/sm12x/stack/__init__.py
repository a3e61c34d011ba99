"""The patch stack of a base: its data, its patch files, and applying them."""
