"""Many names in one word, and back."""

from __future__ import annotations

import fnmatch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuel_parallel.errors import DataError
from fuel_parallel.topology.files.expressions import count, expand, fold, fold_set, matcher
from fuel_parallel.topology.files.units import (
    format_rate,
    format_size,
    format_time,
    parse_rate,
    parse_size,
    parse_time,
)

names = st.text("ab0123456789[]*,\\ /:", min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[3,1-2]x", ["n3x", "n1x", "n2x"]),
        ("n[08-10]", ["n08", "n09", "n10"]),
        ("n[8-10]", ["n8", "n9", "n10"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("a, b ,c[1-2]", ["a", "b", "c1", "c2"]),
        ("a b", ["a b"]),
        (r"a\[1\]\,b", ["a[1],b"]),
    ],
)
def test_expressions_stand_for_names_in_order(text, expected) -> None:
    assert expand(text, most=4) == expected
    assert count(text, most=4) == len(expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("n[1-5]", "stands for more than 4 names"),
        ("n[1-2]m[1-3]", "stands for more than 4 names"),
        ("n[1-999999999999999999]", "stands for more than 4 names"),
        ("n[2-1]", "'2-1' is no range; expected such as '0-7' or '001-032'"),
        ("n[]", "'' is no range"),
        ("n[1", "has a '[' that is not closed"),
        ("n]", "has a ']' that is not closed"),
        ("a,,b", "has an empty name"),
        ("", "has an empty name"),
        ("\\", "is not closed"),
    ],
)
def test_what_is_none_is_refused(text, message) -> None:
    with pytest.raises(DataError) as caught:
        expand(text, most=4)
    assert message in str(caught.value)


@given(st.lists(names, min_size=1, max_size=12))
def test_folding_keeps_names_and_their_order(some) -> None:
    assert expand(fold(some), len(some)) == some
    assert sorted(expand(fold_set(some), len(some))) == sorted(some)


@given(st.text("ab*", max_size=8).filter(lambda t: "*" in t), st.text("ab", max_size=8))
def test_stars_fit_as_a_shell_has_it(pattern, name) -> None:
    assert matcher(pattern)(name) == fnmatch.fnmatchcase(name, pattern)


def test_many_numbers_fold_into_one_expression() -> None:
    every = [f"n{n:03}/cuda:{g}" for n in range(1, 33) for g in range(8)]
    assert fold(every) == "n[001-032]/cuda:[0-7]"
    assert fold_set(reversed(every)) == "n[001-032]/cuda:[0-7]"


@given(st.floats(min_value=1e-300, max_value=1e300), st.integers(0, 2**60), st.booleans())
def test_units_are_read_as_they_are_written(number, size, bits) -> None:
    assert parse_rate(format_rate(number, bits=bits)) == number
    assert parse_time(format_time(number)) == number
    assert parse_size(format_size(size)) == size


def test_units_have_their_values() -> None:
    assert parse_rate("1 GB/s") * 2**20 == 1e9
    assert parse_rate("8 Gb/s") == parse_rate("8 Gbit/s") == parse_rate("8Gbps") == parse_rate("1000 MB/s")
    assert parse_rate("1 GiB/s") == 1024
    assert parse_time("2 ms") == 2000
    assert parse_size("1.5 KiB") == 1536
    assert parse_size("2 TB") == 2 * 10**12


@pytest.mark.parametrize("text", ["", "GB/s", "24", "24 gb", "-1 GB/s", "1e999 GB/s", "24 GB/s/s", "²4 GB/s", "0 GB/s"])
def test_other_rates_are_refused(text) -> None:
    with pytest.raises(DataError, match="is no bandwidth; expected"):
        parse_rate(text)
