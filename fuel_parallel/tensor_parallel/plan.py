"""`LayerParallelPlan`: which layer of a dense model is split how, by the names of layers; also as a TOML file."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from fuel_parallel.errors import ArgumentError, DataError
from fuel_parallel.name_patterns import NamePattern
from fuel_parallel.tensor_parallel.ready_plans import READY


@dataclass(frozen=True)
class LayerRule:
    """One line of a plan.

    Args:
        layers: The names of the layers: `*` stands for any characters between two dots, `**` for any at all.
        style: How they are split, one of `tensor_parallel.STYLES` or one that was registered.
        options: Of the style, such as `gather_output` for `column`.
        optional: It is no mistake when no layer has such a name.
    """

    layers: str
    style: str
    options: Mapping[str, Any] = field(default_factory=dict)
    optional: bool = False

    def __post_init__(self) -> None:
        NamePattern(self.layers)

    def names(self, layer: str) -> bool:
        """Whether the rule is about the layer of this dotted name.

        >>> rule = LayerRule("blocks.*.up", "column")
        >>> rule.names("blocks.11.up"), rule.names("blocks.11.mlp.up"), LayerRule("**.up", "column").names("a.b.up")
        (True, False, True)
        """
        return NamePattern(self.layers).captures(layer) is not None


class LayerParallelPlan:
    """An ordered table of layers and styles; of the rules that name a layer the first counts.

    Args:
        rules: Each a `LayerRule`; or a dict of layers to styles, for rules without options.

    Raises `ArgumentError` for names that are none, and for two rules about the same names.

    >>> print(LayerParallelPlan({"blocks.*.up": "column", "blocks.*.down": "row"}))
    layers         style   options
    blocks.*.up    column
    blocks.*.down  row
    """

    def __init__(self, rules: Iterable[LayerRule] | Mapping[str, str]) -> None:
        if isinstance(rules, Mapping):
            rules = [LayerRule(layers, style) for layers, style in rules.items()]
        self.rules = tuple(rules)
        seen: set[str] = set()
        for rule in self.rules:
            if rule.layers in seen:
                raise ArgumentError(f"plan: two rules are about {rule.layers!r}, and the second would never count")
            seen.add(rule.layers)

    @classmethod
    def ready(cls, name: str, *, sequence_dim: int | None = None) -> LayerParallelPlan:
        """The plan for models whose layers are named as those of "llama", "gpt2" or "bert" are in transformers.

        With `sequence_dim`, between the layers each rank has its part of the sequence, which lies in that dimension.
        Only "llama" can do that: the others add positions of the whole sequence.

        >>> LayerParallelPlan.ready("llama").rule_for("layers.0.mlp.down_proj").style
        'row'
        """
        if name not in READY:
            raise ArgumentError(f"plan: there is none that is called {name!r}; ready are {', '.join(READY)}")
        lines = READY[name]
        if sequence_dim is None:
            lines = tuple(line for line in lines if line[1] != "sequence")
            return cls([LayerRule(layers, style, options, optional) for layers, style, options, optional in lines])
        able = [plan for plan in READY if any(line[1] == "sequence" for line in READY[plan])]
        if name not in able:
            raise ArgumentError(
                f"plan: {name!r} cannot be split along the sequence; ready for that are {', '.join(able)}"
            )
        on_parts = {"sequence_dim": sequence_dim}
        return cls(
            [
                LayerRule(layers, style, options if style == "sequence" else {**options, **on_parts}, optional)
                for layers, style, options, optional in lines
            ]
        )

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> LayerParallelPlan:
        """The plan of a TOML file. Raises `DataError` with the file, the rule and the key that is wrong."""
        try:
            found = tomllib.loads(Path(path).read_bytes().decode())
        except OSError as reason:
            raise DataError(f"{path}: {reason.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as reason:
            raise DataError(f"{path}: not TOML: {reason}") from None
        try:
            written = msgspec.convert(found, _File).rule
            return cls([LayerRule(one.layers, one.style, one.options, one.optional) for one in written])
        except msgspec.ValidationError as reason:
            raise DataError(
                f"{path}: {reason}; expected [[rule]] tables with layers and style, and perhaps options and optional"
            ) from None
        except ArgumentError as reason:
            raise DataError(f"{path}: {reason}") from None

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as TOML; `read` gives it back."""
        import tomlkit

        document = tomlkit.document()
        tables = tomlkit.aot()
        for rule in self.rules:
            table = tomlkit.table()
            table.update({"layers": rule.layers, "style": rule.style})
            if rule.options:
                options = tomlkit.inline_table()
                options.update(dict(rule.options))
                table["options"] = options
            if rule.optional:
                table["optional"] = True
            tables.append(table)
        document["rule"] = tables
        try:
            Path(path).write_text(tomlkit.dumps(document), encoding="utf-8")
        except OSError as reason:
            raise DataError(f"{path}: {reason.strerror}") from None

    def rule_for(self, layer: str) -> LayerRule | None:
        """The rule that counts for a layer; None if it stays as it is."""
        return next((rule for rule in self.rules if rule.names(layer)), None)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LayerParallelPlan) and self.rules == other.rules

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"LayerParallelPlan({list(self.rules)})"

    def __str__(self) -> str:
        rows = [("layers", "style", "options")]
        for rule in self.rules:
            options = [f"{name}={value}" for name, value in rule.options.items()] + ["optional"] * rule.optional
            rows.append((rule.layers, rule.style, ", ".join(options)))
        return table(rows)


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """Rows of texts in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


class _Rule(msgspec.Struct, forbid_unknown_fields=True):
    layers: str
    style: str
    options: dict[str, bool | int | str] = {}
    optional: bool = False


class _File(msgspec.Struct, forbid_unknown_fields=True):
    rule: list[_Rule]
