"""A stack on another release: what merges, what is upstream, what is left to do."""
