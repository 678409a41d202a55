"""How much text is looked at for what people paste: tools for one machine print little, and line by line takes time."""

from __future__ import annotations

from fuel_parallel.topology.files.source import COLOURS, Source

MOST = 2 << 20
"""Characters: 64 GPUs in the JSON of `amd-smi` are about one million."""


def beginning(source: Source) -> str:
    """What may say of which format a text is, without colours."""
    return COLOURS.sub("", source.text[:MOST])


def check_size(source: Source, most: int = MOST) -> None:
    """Raises `TopologyFileError` when a text is longer than any tool's about one machine."""
    if len(source.text) > most:
        raise source.error(
            f"{len(source.text)} characters; what these tools print of one machine has at most {most}: paste only that"
        )
