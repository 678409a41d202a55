"""A topology in a terminal: a tree of machines, parts and links, in colour."""

from __future__ import annotations

from fuel_parallel.topology.text import outline
from fuel_parallel.topology.topology import DeviceTopology


def show(t: DeviceTopology) -> None:
    """Prints the outline, each level of it as a branch."""
    from rich.console import Console
    from rich.text import Text
    from rich.tree import Tree

    first, *rest = outline(t)
    tree = Tree(Text(first, style="bold"), guide_style="dim")
    machine = part = tree
    for line in rest:
        words = line.strip()
        if not line.startswith(" "):
            machine = tree.add(Text(words, style="bold cyan"))
        elif words.startswith("- "):
            part.add(Text(words.removeprefix("- "), style="dim"))
        else:
            name, space, facts = words.partition(" ")
            part = machine.add(Text.assemble((name, "green"), space + facts))
    Console().print(tree)
