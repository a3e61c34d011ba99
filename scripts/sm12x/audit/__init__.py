"""What machine code a shared library holds, and how it will run on 12.0 and 12.1.

fatbin and elf read, model says what it means, scan walks files, policy judges, render and report
write text and JSON.
"""
