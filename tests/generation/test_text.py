"""Text comes in whole characters, all of it, and ends before a stop string wherever its tokens were cut."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from fuel_parallel.generation import TextStream


def decode(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode(errors="replace")


# Few characters of one to four bytes, so that stop strings occur, and bytes that are none.
texts = st.text("abé€𝄞", max_size=40)
raw = st.binary(max_size=40)


def pieces_of(data: bytes, stops: Sequence[str] = ()) -> tuple[list[str], TextStream]:
    stream = TextStream(decode, b"before ", stops)
    pieces = [stream.push(token) for token in data]
    return [*pieces, stream.finish()], stream


@given(raw | texts.map(str.encode))
def test_all_text_comes(data: bytes) -> None:
    pieces, stream = pieces_of(data)
    assert "".join(pieces) == stream.text == decode(data)


@given(texts)
def test_characters_come_whole_and_at_once(text: str) -> None:
    pieces, _ = pieces_of(text.encode())
    at = 0
    for character in text:
        at += len(character.encode())
        assert pieces[at - 1] == character
        assert not any(pieces[at - len(character.encode()) : at - 1])


def ended(text: str, stops: Sequence[str]) -> str:
    """The text up to the first stop string that is complete."""
    for end in range(len(text) + 1):
        at = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if at:
            return text[: min(at)]
    return text


@given(texts, st.lists(st.text("abé€", min_size=1, max_size=4), max_size=3))
def test_nothing_of_a_stop_string_is_said(text: str, stops: list[str]) -> None:
    pieces, stream = pieces_of(text.encode(), stops)
    assert "".join(pieces) == stream.text == ended(text, stops)
    assert stream.stopped == any(stop in text for stop in stops)


@given(texts, st.lists(st.text("abé€", min_size=1, max_size=4), max_size=3), st.data())
def test_where_tokens_are_cut_makes_no_difference(text: str, stops: list[str], data: st.DataObject) -> None:
    """Tokens of several characters: the text is that of single bytes."""
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(text) - 1)))))
    words = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    stream = TextStream(lambda tokens: "".join(words[token] for token in tokens), (), stops)
    said = "".join(stream.push(token) for token in range(len(words))) + stream.finish()
    assert said == ended(text, stops)
