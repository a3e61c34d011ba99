"""What machine code a file, folder, wheel or image holds, and how it will run on 12.0 and 12.1.

fatbin, sections and elf read code, library one file of any kind; model says what it means; scan and
tars walk packages, in the memory that room gives; policy judges, render and report write text and
JSON.
"""
