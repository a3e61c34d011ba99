"""`python -P -m sm12x.runtime`: the image's entry point."""

from sm12x.runtime.entry import main

main()
