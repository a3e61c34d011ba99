"""The patch stack of a base: its data, its patches in mail form, and what is done with them."""
