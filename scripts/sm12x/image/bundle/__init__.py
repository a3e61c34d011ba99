"""From a base to an image: what is decided, fetched, compiled and packed, and the record of it."""
