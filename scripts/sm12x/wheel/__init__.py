"""From a patched source to an audited wheel: toolchain, native modules, wheel, ledger."""
