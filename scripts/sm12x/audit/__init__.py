"""What machine code a file, folder, wheel or image holds, and how it will run on 12.0 and 12.1.

fatbin, sections and elf read device code, library reads one file of any kind, within the free
memory; model has the verdicts; scan and tars walk packages; policy judges; render and report write
text and JSON.
"""
