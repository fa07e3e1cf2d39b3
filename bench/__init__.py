"""How fast the book decodes, beside others, on the machine this runs on. `python -m bench`."""
