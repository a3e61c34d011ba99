"""`python -m sm12x`."""

from sm12x.cli import main

main()
