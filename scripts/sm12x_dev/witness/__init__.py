"""Tests of the patches on both sources: witnesses, mutations, the release's own tests."""
