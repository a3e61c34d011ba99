"""From a base to an image: decide, fetch, compile, package, and record the result."""
