"""XML that a stranger wrote: elements with their lines, and limits on everything.

No entities, nothing fetched, and no DOCTYPE but the one that a format is known to have. What exceeds a limit, or is no
XML, is a `TopologyFileError` with the line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from xml.sax import SAXException, SAXParseException
from xml.sax.handler import ContentHandler
from xml.sax.xmlreader import AttributesImpl

from defusedxml.common import DefusedXmlException
from defusedxml.expatreader import DefusedExpatParser

from fuel_parallel.errors import DataError
from fuel_parallel.topology.cores import parse_mask
from fuel_parallel.topology.files.source import Source

MOST_ELEMENTS, DEEPEST, MOST_ATTRIBUTES, LONGEST = 200_000, 120, 64, 1 << 14
"""Of a file, of an element, of an element, and characters of a value. The largest real files have a tenth of these."""

MOST_BEFORE = 1000
"""Comments and the like before the first element."""

LARGEST_NUMBER = 1 << 63
"""No size in bytes is greater."""


@dataclass(eq=False, slots=True)
class Element:
    """An element, the line where it begins, and what is in it. `text` is what stands between its tags."""

    name: str
    line: int
    attributes: dict[str, str] = field(default_factory=dict)
    children: list[Element] = field(default_factory=list)
    text: str = ""

    def get(self, name: str) -> str:
        """An attribute, "" without it."""
        return self.attributes.get(name, "")

    def all(self, *names: str) -> Iterator[Element]:
        """The children of some names."""
        return (child for child in self.children if child.name in names)

    def walk(self) -> Iterator[Element]:
        """It and all below it, in the order of the file."""
        pending = [self]
        while pending:
            element = pending.pop()
            yield element
            pending.extend(reversed(element.children))


def root_name(text: str) -> str:
    """The name of the first element of a text that looks like XML, "" if it does not; for telling formats apart.

    >>> root_name('<?xml version="1.0"?><!-- what it is --><system version="1">')
    'system'
    """
    place = _prolog(text, frozenset())[0]
    name = _NAME.match(text, place) or _DOCTYPE.match(text, place)
    return name[1] if name else ""


def parse(source: Source, *, doctypes: frozenset[str] = frozenset()) -> Element:
    """The root of a file. `doctypes` are the DOCTYPEs that it may have, such as 'topology SYSTEM "hwloc.dtd"'.

    Raises `TopologyFileError`: no XML, cut off, beyond a limit, with entities.
    """
    parser = DefusedExpatParser(forbid_dtd=True)
    builder = _Builder(source, parser)
    parser.setContentHandler(builder)
    try:
        parser.feed(_prolog(source.text, doctypes)[1])
        parser.close()
    except SAXParseException as reason:
        raise source.error(
            f"this is no complete XML: {reason.getMessage()}; expected every element to be closed",
            line=reason.getLineNumber(),
        ) from None
    except DefusedXmlException:
        raise source.error(
            "it has a DOCTYPE or entities; topology files need none, remove the declaration", line=builder.line()
        ) from None
    except (SAXException, UnicodeError) as reason:
        raise source.error(f"this is no XML: {reason}", line=builder.line()) from None
    if builder.root is None:
        raise source.error("it holds no element")
    return builder.root


def integer(source: Source, element: Element, name: str) -> int | None:
    """A whole number of an attribute, decimal or 0x…; None without it. Raises `TopologyFileError`: no number."""
    text = element.get(name).strip()
    if not text:
        return None
    if re.fullmatch(r"-?[0-9]{1,20}|0[xX][0-9a-fA-F]{1,16}", text):
        found = int(text, 16 if text[:2].lower() == "0x" else 10)
        if abs(found) < LARGEST_NUMBER:
            return found
    raise source.error(
        f"{text[:40]!r} of <{element.name[:40]}> is no whole number; expected one such as 16",
        line=element.line,
        key=name,
    )


def natural(source: Source, element: Element, name: str) -> int | None:
    """Like `integer`, but not below 0."""
    found = integer(source, element, name)
    if found is not None and found < 0:
        raise source.error(f"{found} is below 0; expected a whole number from 0", line=element.line, key=name)
    return found


def decimal(source: Source, element: Element, name: str) -> float | None:
    """A number from 0 of an attribute; None without it. Raises `TopologyFileError`: no number, infinite, negative."""
    text = element.get(name).strip()
    if not text:
        return None
    if not re.fullmatch(r"[0-9]{1,15}(\.[0-9]{0,15})?", text):
        raise source.error(f"{text[:40]!r} is no number; expected one such as 15.75", line=element.line, key=name)
    return float(text)


def cores_of(source: Source, element: Element, name: str) -> tuple[int, ...]:
    """The cores of a mask in an attribute; none without it. Raises `TopologyFileError`: no mask."""
    text = element.get(name)
    try:
        return parse_mask(text) if text.strip() else ()
    except DataError as reason:
        raise source.error(str(reason), line=element.line, key=name) from None


_PROLOG = re.compile(r"\s++|<\?[^>]{0,400}\?>|<!--(?s:.*?)-->|<!DOCTYPE\s+([^>\[]{1,200})>")
_NAME = re.compile(r"<([A-Za-z_][A-Za-z0-9_.-]{0,60})(?=[\s/>])")

_DOCTYPE = re.compile(r"<!DOCTYPE\s{1,9}([A-Za-z_][A-Za-z0-9_.-]{0,60})")  # one that is refused


def _prolog(text: str, doctypes: frozenset[str]) -> tuple[int, str]:
    """Where the first element begins, and the text without the DOCTYPE that it may have; the lines stay.

    Any other DOCTYPE stays too, for the parser to refuse.
    """
    place, doctyped = 0, False
    for _ in range(MOST_BEFORE):
        found = _PROLOG.match(text, place)
        if found is None:
            break
        if found[1] is not None and not doctyped and " ".join(found[1].split()) in doctypes:
            text = text[:place] + re.sub(r"[^\n]", " ", found[0]) + text[found.end() :]
            doctyped = True
        place = found.end()
    return place, text


class _Builder(ContentHandler):
    """Builds the tree as the parser goes, and stops it at a limit."""

    def __init__(self, source: Source, parser: DefusedExpatParser) -> None:
        super().__init__()
        self.source, self._parser = source, parser
        self.root: Element | None = None
        self._open: list[Element] = []
        self._texts: list[list[str]] = []
        self._count = self._letters = 0

    def line(self) -> int:
        found = self._parser.getLineNumber()
        return found if isinstance(found, int) else 1

    def startElement(self, name: str, attrs: AttributesImpl) -> None:
        values = {str(key): str(value) for key, value in attrs.items()}
        longest = max(map(len, values.values()), default=0)
        self._count += 1
        self._letters = 0
        self._limit(self._count, MOST_ELEMENTS, "elements")
        self._limit(len(self._open) + 1, DEEPEST, "elements inside each other")
        self._limit(len(values), MOST_ATTRIBUTES, f"attributes of <{name[:40]}>")
        self._limit(longest, LONGEST, f"characters of a value of <{name[:40]}>")
        element = Element(name, self.line(), values)
        if self._open:
            self._open[-1].children.append(element)
        else:
            self.root = element
        self._open.append(element)
        self._texts.append([])

    def endElement(self, name: str) -> None:
        self._open.pop().text = "".join(self._texts.pop())

    def characters(self, content: str) -> None:
        self._letters += len(content)
        self._limit(self._letters, LONGEST, "characters between two elements")
        if content.strip():
            self._texts[-1].append(content)

    def _limit(self, found: int, most: int, what: str) -> None:
        if found > most:
            line = self.line()
            raise self.source.error(f"there are more than {most} {what}; no topology file has so many", line=line)
