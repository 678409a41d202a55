"""Topology files: every format that can be read or written, found by what is in the file and not by its name.

`read(path)` gives the topology; `examine(path)` says besides which format it was, and what in it is worth a warning.
`write(topology, "native")` gives the text of a file.
"""

from fuel_parallel.topology.files.formats import FORMATS, Format, Reading, detect, examine, examine_text, read, write

__all__ = ["FORMATS", "Format", "Reading", "detect", "examine", "examine_text", "read", "write"]
