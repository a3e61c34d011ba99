"""`python -m sm12x.image.inside`: the image's entry point."""

from sm12x.image.inside.entry import main

main()
