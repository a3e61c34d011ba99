"""One address for models that take turns on the same GPUs; docs/pool.md says what it promises.

``state`` and ``policy`` decide, and know neither clock nor network. ``engines`` asks the servers,
``rotation`` carries the swaps out, and ``gateway`` passes requests on.
"""
