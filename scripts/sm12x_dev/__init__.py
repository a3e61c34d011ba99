"""For those who maintain the stack: patches, witnesses, locks and pages. It never ships."""
