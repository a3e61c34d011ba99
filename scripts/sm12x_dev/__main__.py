"""`python -m sm12x_dev`."""

from sm12x_dev.cli import main

main()
