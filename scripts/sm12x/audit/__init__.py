"""What machine code a shared library holds, and how it will run on 12.0 and 12.1."""
