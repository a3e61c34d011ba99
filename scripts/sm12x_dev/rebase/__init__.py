"""Porting a stack to another release: patches that merge, are upstream, or need a person."""
