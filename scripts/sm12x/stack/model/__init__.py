"""What a stack is: its base, its patches, and the lines that they change."""
