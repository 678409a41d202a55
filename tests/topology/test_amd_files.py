"""What people paste of `rocm-smi --showtopo` and `amd-smi topology`, as text and as JSON."""

from __future__ import annotations

import json
import re
import time
from itertools import combinations, permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuel_parallel.errors import TopologyError, TopologyFileError
from fuel_parallel.topology import DeviceTopology, Interconnect, Link, Origin, files
from fuel_parallel.topology.files import examine_text
from tests.topology.real_files import real


def rocm_table(title: str, rows: list[list[str]]) -> str:
    names = [f"GPU{n}" for n in range(len(rows))]
    lines = [f"{'':<7}" + "".join(f"{name:<13}" for name in names)]
    lines += [f"{name:<7}" + "".join(f"{cell:<13}" for cell in row) for name, row in zip(names, rows, strict=True)]
    return "\n".join([f" {title} ".center(80, "="), *lines, "", ""])


def amd_table(title: str, rows: list[list[str]]) -> str:
    names = [f"0000:{n + 1:02x}:00.0" for n in range(len(rows))]
    lines = [f"{'':<13}" + "".join(f"{name:<13}" for name in names)]
    lines += [f"{name:<13}" + "".join(f"{cell:<13}" for cell in row) for name, row in zip(names, rows, strict=True)]
    return "\n".join([f"{title} TABLE:", *lines, "", ""])


# Three GPUs in a row: 0 and 1, and 1 and 2 are joined; from 0 to 2 everything goes through 1. Hops do not say so.
WEIGHTS = [["0", "15", "30"], ["15", "0", "15"], ["30", "15", "0"]]
HOPS = [["0", "1", "1"], ["1", "0", "1"], ["1", "1", "0"]]
TYPES = [["0", "XGMI", "XGMI"], ["XGMI", "0", "XGMI"], ["XGMI", "XGMI", "0"]]
NUMA = "".join(
    f"GPU[{n}]\t\t: (Topology) Numa Node: {n // 2}\nGPU[{n}]\t\t: (Topology) Numa Affinity: {n // 2}\n"
    for n in range(3)
)
ROCM = (
    " ROCm System Management Interface ".center(80, "=")
    + "\n"
    + rocm_table("Weight between two GPUs", WEIGHTS)
    + rocm_table("Hops between two GPUs", HOPS)
    + rocm_table("Link Type between two GPUs", TYPES)
    + f"{' Numa Nodes '.center(80, '=')}\n{NUMA}{' End of ROCm SMI Log '.center(80, '=')}\n"
)
ROCM_JSON = json.dumps(
    {
        "system": {
            f"(Topology) {what} between DRM devices {a} and {b}": rows[a][b]
            for what, rows in (("Weight", WEIGHTS), ("Hops", HOPS), ("Link type", TYPES))
            for a, b in combinations(range(3), 2)
        }
    }
    | {f"card{n}": {"(Topology) Numa Node": str(n // 2), "(Topology) Numa Affinity": str(n // 2)} for n in range(3)}
)

AMD_TYPES = [["SELF", "XGMI", "XGMI"], ["XGMI", "SELF", "XGMI"], ["XGMI", "XGMI", "SELF"]]
BANDWIDTHS = [["N/A", "50000-100000", "0-0"], ["50000-100000", "N/A", "50000-50000"], ["0-0", "50000-50000", "N/A"]]
AMD = (
    amd_table("ACCESS", [["ENABLED"] * 3] * 3)
    + amd_table("WEIGHT", WEIGHTS)
    + amd_table("HOPS", HOPS)
    + amd_table("LINK TYPE", AMD_TYPES)
    + amd_table("NUMA BW", BANDWIDTHS)
)
BUSES = ["0000:01:00.0", "0000:02:00.0", "0000:03:00.0"]
AMD_NEW: list[dict[str, Any]] = [
    {
        "gpu": a,
        "bdf": BUSES[a],
        "links": [
            {
                "gpu": b,
                "bdf": BUSES[b],
                "weight": int(WEIGHTS[a][b]),
                "link_status": "ENABLED",
                "link_type": AMD_TYPES[a][b],
                "num_hops": int(HOPS[a][b]),
                "bandwidth": BANDWIDTHS[a][b],
            }
            for b in range(3)
        ],
    }
    for a in range(3)
]
AMD_OLD: list[dict[str, Any]] = [
    {
        "gpu": a,
        "link_accessibility": {f"gpu_{b}": "ENABLED" for b in range(3)},
        "weight": {f"gpu_{b}": int(WEIGHTS[a][b]) for b in range(3)},
        "hops": {f"gpu_{b}": int(HOPS[a][b]) for b in range(3)},
        "link_type": {f"gpu_{b}": AMD_TYPES[a][b] for b in range(3)},
        "numa_bandwidth": {f"gpu_{b}": BANDWIDTHS[a][b] for b in range(3)},
    }
    for a in range(3)
]


def read(text: str) -> DeviceTopology:
    return examine_text(text).topology


def link(t: DeviceTopology, a: int, b: int) -> Link:
    found = t.link(f"rocm:{a}", f"rocm:{b}")
    assert found is not None
    return found


def refused(text: str) -> str:
    with pytest.raises(TopologyFileError) as error:
        examine_text(text, "topo.txt")
    return str(error.value)


def outcome(text: str) -> str:
    """The error, if there is one: of the only kind that there may be."""
    try:
        examine_text(text)
    except TopologyError as reason:
        return str(reason)
    return ""


# Files of others, read by hand.


def test_four_gpus_on_pci_whose_end_is_cut_off() -> None:
    reading = files.examine(real("rocmsmi_4gpu_pcie_hops3_truncated.txt"))
    t = reading.topology
    assert (reading.format.name, t.device_ids()) == ("rocm-smi", ["rocm:0", "rocm:1", "rocm:2", "rocm:3"])
    assert {link(t, a, b) for a in range(4) for b in range(4) if a != b} == {
        Link(interconnect=Interconnect.PCIE, path="PCIE, weight 52")
    }
    assert {d.numa for d in t.devices} == {None}
    assert reading.notes == (
        "no NUMA nodes are given; which domain each GPU is next to is unknown",
        "the end of the output is cut off; there may be more GPUs and NUMA nodes than it shows",
    )


def test_a_row_that_is_cut_is_refused() -> None:
    with pytest.raises(TopologyFileError, match=r"line 21: the row of GPU3 in 'link type' is cut: it has 1 cells of 4"):
        files.read(real("rocmsmi_4xmi210_xgmi_cut_mid_row.txt"))


def test_numa_nodes_alone() -> None:
    reading = files.examine(real("rocmsmi_showtoponuma_8gpu.txt"))
    assert [d.numa for d in reading.topology.devices] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert list(reading.topology.connections()) == []
    assert reading.notes == ("NUMA nodes only: how the GPUs are linked is unknown; `rocm-smi --showtopo` says it",)


def test_tables_side_by_side_are_somebody_s_own() -> None:
    with pytest.raises(TopologyFileError, match="line 1: tables side by side, which `rocm-smi` does not print"):
        files.read(real("rocmsmi_side_by_side_handmade_4xmi50.txt"))


def test_several_pieces_of_json_are_refused_and_a_whole_one_is_read() -> None:
    path = real("amdsmi_topology_json_excerpt.txt")
    with pytest.raises(TopologyFileError, match="line 60: a second JSON text"):
        files.read(path)
    lines = path.read_text().split("\n")
    t = read("\n".join(lines[:56]))  # that of the previous version
    assert t.device_ids() == ["rocm:0", "rocm:1"]
    assert link(t, 0, 1) == Link(interconnect=Interconnect.PCIE, path="PCIE, weight 40")
    # That of the new one has a comma after its last key, `"bandwidth": "N/A",`, and "..." for what was left out. Python
    # before 3.13 points behind the comma.
    assert refused("\n".join(lines[57:])).startswith(("topo.txt, line 15: no JSON: ", "topo.txt, line 16: no JSON: "))


# rocm-smi.


@pytest.mark.parametrize("text", [ROCM, ROCM_JSON, f"WARNING: a card sleeps\n{ROCM_JSON}\n"])
def test_rocm_smi(text: str) -> None:
    reading = examine_text(text)
    t = reading.topology
    assert (reading.format.name, t.device_ids()) == ("rocm-smi", ["rocm:0", "rocm:1", "rocm:2"])
    assert [d.numa for d in t.devices] == [0, 0, 1]
    assert [n.index for n in t.numa_domains] == [0, 1]
    assert link(t, 0, 1) == Link(interconnect=Interconnect.INFINITY_FABRIC, path="XGMI, weight 15")
    assert (t.bandwidth_mb_s("rocm:0", "rocm:1"), reading.notes) == (None, ())


def test_weights_and_not_hops_say_which_gpus_have_a_link_of_their_own() -> None:
    far = link(read(ROCM), 0, 2)
    assert (far.interconnect, far.path) == (Interconnect.UNKNOWN, "XGMI, weight 30, through other GPUs")
    assert link(read(ROCM), 1, 2).interconnect is Interconnect.INFINITY_FABRIC


ODDITIES = {
    "carriage returns": ROCM.replace("\n", "\r\n"),
    "colours": ROCM.replace("XGMI", "\x1b[32mXGMI\x1b[0m"),
    "warnings between": ROCM.replace("\n\n", "\nWARNING: \t One or more commands failed\n\n"),
    "a warning in a table": ROCM.replace("GPU1   15", "WARNING: something\nGPU1   15"),
    "spaces at the end lost": "\n".join(line.rstrip() for line in ROCM.split("\n")),
    "indented": re.sub("^", "    ", ROCM, flags=re.MULTILINE),
    "a prompt around": f"$ rocm-smi --showtopo\n{ROCM}$ exit\n",
    "titles between dashes": re.sub("=+( .* between .* )=+", r"------\1------", ROCM),
    "titles bare": re.sub("=+ ?(.*?) ?=+", r"\1", ROCM),
    "broken by the terminal": ROCM.replace("XGMI         0 ", "XGMI\n         0 "),
}


@pytest.mark.parametrize("text", ODDITIES.values(), ids=list(ODDITIES))
def test_however_it_is_pasted_it_is_the_same(text: str) -> None:
    assert read(text) == read(ROCM)


@pytest.mark.parametrize("word", ["XXXX", "N/A"])
def test_a_kind_that_is_unknown_is_not_slow(word: str) -> None:
    t = read(ROCM.replace("XGMI", word))
    assert link(t, 0, 1) == Link(path="weight 15")
    reading = examine_text(rocm_table("Link Type between two GPUs", [["0", word], [word, "0"]]))
    assert reading.topology.link("rocm:0", "rocm:1") is None
    assert "no link is known from rocm:0 to rocm:1, rocm:1 to rocm:0: that is unknown, and not slow" in reading.notes


def test_a_table_may_be_missing() -> None:
    types = examine_text(rocm_table("Link Type between two GPUs", TYPES))
    assert link(types.topology, 0, 1).path == "XGMI"
    assert "there is no table of weights; they are unknown" in types.notes
    weights = examine_text(rocm_table("Weight between two GPUs", WEIGHTS))
    assert link(weights.topology, 0, 1) == Link(path="weight 15")


def test_lines_about_cards_name_them() -> None:
    card = "GPU[0]\t\t: Card series: \t\tAMD INSTINCT MI250\nGPU[0]\t\t: PCI Bus: 0000:C1:00.0\n"
    device = read(ROCM + card).device("rocm:0")
    assert (device.name, device.bus) == ("AMD INSTINCT MI250", "0000:c1:00.0")


def test_a_machine_without_numa() -> None:
    t = read(re.sub(r"Node: \d", "Node: -1", ROCM))
    assert ({d.numa for d in t.devices}, t.numa_domains) == ({None}, [])


@pytest.mark.parametrize("text", [ROCM, AMD], ids=["rocm-smi", "amd-smi"])
def test_a_text_that_is_cut_anywhere_is_refused_or_says_what_is_missing(text: str) -> None:
    whole = read(text)
    for end in range(0, len(text.rstrip()) - 1, 7):
        if outcome(text[:end]):
            continue
        reading = examine_text(text[:end])
        if len(text[:end].split()) == 1 and reading.format.name == "hostfile":
            continue  # one word is the name of a host
        assert reading.topology.device_ids() == whole.device_ids()
        for a, b in permutations(range(3), 2):
            found, right = reading.topology.link(f"rocm:{a}", f"rocm:{b}"), link(whole, a, b)
            assert found == right or reading.notes
            assert found is None or found.interconnect in (Interconnect.UNKNOWN, right.interconnect)


# amd-smi.


@pytest.mark.parametrize("text", [AMD, json.dumps(AMD_NEW), json.dumps(AMD_OLD, indent=4)], ids=["text", "new", "old"])
def test_amd_smi(text: str) -> None:
    reading = examine_text(f"$ amd-smi topology\n{text}\n$\n")
    t = reading.topology
    assert (reading.format.name, t.device_ids(), reading.notes) == ("amd-smi", ["rocm:0", "rocm:1", "rocm:2"], ())
    near = link(t, 0, 1)
    assert (near.interconnect, near.count, near.origin) == (Interconnect.INFINITY_FABRIC, 2, Origin.STATED)
    assert near.bandwidth_mb_s == pytest.approx(95367.43)  # 100000 * 10**6 / 2**20: both links of the pair
    assert (link(t, 1, 2).bandwidth_mb_s, link(t, 1, 2).count) == (pytest.approx(47683.72), 1)
    assert link(t, 0, 2) == Link(path="XGMI, weight 30, through other GPUs")
    assert [d.bus for d in t.devices] == (["", "", ""] if '"link_accessibility"' in text else BUSES)


def test_a_bandwidth_of_nothing_means_no_link_of_their_own() -> None:
    t = read(amd_table("LINK TYPE", AMD_TYPES) + amd_table("NUMA BW", BANDWIDTHS))
    assert link(t, 0, 2) == Link(path="XGMI, through other GPUs")
    assert link(t, 0, 1).path == "XGMI"


def test_bandwidths_that_are_unknown_stay_so() -> None:
    rows = [["N/A"] * 3] * 3
    t = read(AMD.replace(amd_table("NUMA BW", BANDWIDTHS), amd_table("NUMA BW", rows)))
    assert (link(t, 0, 1).bandwidth_mb_s, link(t, 0, 1).count) == (None, 1)


def test_bandwidths_may_differ_from_those_of_the_way_back() -> None:
    t = read(AMD.replace("50000-100000", "50000-150000", 1))
    assert (link(t, 0, 1).count, link(t, 1, 0).count) == (3, 2)


def test_json_of_some_tables_only() -> None:
    some = [{k: v for k, v in gpu.items() if k in ("gpu", "link_type")} for gpu in AMD_OLD]
    assert link(read(json.dumps(some)), 0, 1) == Link(interconnect=Interconnect.INFINITY_FABRIC, path="XGMI")


def changed(value: list[dict[str, Any]], **changes: Any) -> str:
    return json.dumps([value[0] | changes, *value[1:]])


REFUSED = {
    ROCM.replace("GPU2   30           15           0 ", "GPU2   30           15 "): (
        "line 6: the row of GPU2 in 'weight' is cut: it has 2 cells of 3; those under GPU2 are missing"
    ),
    ROCM.replace("GPU2   30           15           0 ", ""): "line 2: 'weight' lacks the rows of GPU2",
    ROCM.replace(
        "15           30", "15           45"
    ): "line 4, weight, GPU0 to GPU2: found '45', but line 6, weight, GPU2",
    ROCM.replace("GPU0   0 ", "GPU0   7 ", 1): "line 4, weight, GPU0 to GPU0: found '7', expected 0, SELF or N/A",
    ROCM.replace("XGMI", "WARP"): "line 16, link type, GPU0 to GPU1: found 'WARP', expected XGMI, PCIE, or N/A",
    ROCM.replace("30", "thirty"): "line 4, weight, GPU0 to GPU2: found 'thirty', expected a number",
    ROCM.replace("30", "9" * 60): "line 4, weight, GPU0 to GPU2: found '999",
    ROCM.replace("GPU1   15", "GPU0   15"): "line 5: a second row of GPU0 in 'weight'",
    ROCM.replace("GPU1   15", "GPU8   15"): "line 5: no column for the row of GPU8 in 'weight'",
    ROCM.replace("Hops between", "Weight between"): "line 8: a second 'weight'; the first is in line 2",
    ROCM + rocm_table("Link Accessibility between two GPUs", TYPES).replace("Accessibility", "Colour"): (
        "expected a title such as 'Weight between two GPUs'"
    ),
    ROCM.replace("GPU[2]", "GPU[5]"): "GPU[5] is in none of the tables",
    ROCM.replace("Numa Node: 0", "Numa Node: zero"): "GPU[0]: found 'zero', expected a number",
    ROCM + "GPU[0] : (Topology) Numa Node: 1\n": "GPU[0]: NUMA node 1, but 0 before",
    "== Weight between two GPUs ==\n": "line 1: 'weight' has no table",
    ROCM_JSON[:-20]: "line 1: no JSON: ",
    ROCM_JSON.replace('"card1"', '"card0"'): "line 1: the key 'card0' is there twice",
    AMD.replace("XGMI         SELF", "XGMI         PCIE"): "LINK TYPE, 0000:02:00.0 to 0000:02:00.0: found 'PCIE'",
    AMD.replace(
        "50000-100000", "100000-50000"
    ): "NUMA BW, 0000:01:00.0 to 0000:02:00.0: found '100000-50000', expected MB/s",
    AMD.replace("0000:02:00.0", "0000:01:00.0"): "line 8: 'WEIGHT' has two columns called 0000:01:00.0",
    AMD + AMD: "a second 'ACCESS'",
    json.dumps(AMD_NEW) + "\n" + json.dumps(AMD_OLD): "line 2: a second JSON text",
    json.dumps(AMD_NEW[:2]): "gpu 0, links[2], weight: GPU 2 has no entry of its own",
    json.dumps([*AMD_OLD, AMD_OLD[0]]): "[3], gpu: a second GPU 0",
    changed(AMD_OLD, gpu="x"): "[0], gpu: found 'x', expected a number from 0 to 9999",
    changed(AMD_OLD, gpu=True): "[0], gpu: found True",
    changed(AMD_OLD, weight=[1]): "gpu 0, weight: expected an object",
    changed(AMD_OLD, weight={"x": 1}): "gpu 0, weight: found 'x', expected a key such as 'gpu_0'",
    changed(AMD_OLD, weight={"gpu_1": {}}): "gpu 0, weight, gpu_1: found an object, expected a word or a number",
    changed(AMD_OLD, weight={"gpu_1": 1.5}): "gpu 0, weight, gpu_1: found 1.5",
    changed(AMD_NEW, bdf="here"): "gpu 0, bdf: found 'here', expected a PCI address",
    changed(AMD_NEW, bdf=BUSES[1]): "gpu 1, bdf: GPUs 0 and 1 have the same address",
    changed(AMD_NEW, links=[{"bdf": 1}]): "gpu 0, links[0]: 'gpu' is missing",
    changed(AMD_NEW, links=[7]): "gpu 0, links[0]: found 7, expected an object with 'gpu'",
    changed(AMD_NEW, links=AMD_NEW[0]["links"] * 2): "gpu 0, links[3]: a second link to GPU 0",
    '[{"gpu": 0, "link_type": NaN}]': "line 1: no JSON that a tool wrote: NaN is no number",
    '[{"gpu": 0, "link_type": {"gpu_0": ' + "9" * 5000 + "}}]": "line 1: no JSON that a tool wrote:",
    '[{"gpu": 0, "link_type": ' + "[" * 100_000: "line 1: no JSON that a tool wrote: nested too deeply",
    '[{"gpu": 0, "colour": 1}]  "link_type":': "gpu 0: neither 'links' nor 'weight' nor 'link_type'",
}


@pytest.mark.parametrize(("text", "reason"), REFUSED.items(), ids=range(len(REFUSED)))
def test_what_cannot_be_told_is_refused_with_its_place(text: str, reason: str) -> None:
    message = refused(text)
    assert message.startswith("topo.txt, ")
    assert reason in message


@pytest.mark.parametrize(
    "text",
    [
        "== Weight between two GPUs ==\n" + " ".join(f"GPU{n}" for n in range(2000)) + "\n",
        "== Weight between two GPUs ==\nGPU0 GPU1\n" + "GPU0 1 2\n" * 100_000,
        "== Weight between two GPUs ==\nGPU0 GPU1\nGPU0 0\n" + "5\n" * 100_000,
        "".join(f"GPU[{n}] : (Topology) Numa Node: 0\n" for n in range(10_000)),
        "".join(f"{chr(65 + n % 26)}{chr(65 + n // 26 % 26)} TABLE:\n" for n in range(100_000)) + "HOPS TABLE:\n",
        " Weight between two GPUs " + "=" * 1_000_000 + "\n" + "=" * 1_000_000,
        json.dumps([{"gpu": n, "link_type": {f"gpu_{m}": "PCIE" for m in range(300)}} for n in range(300)]),
        json.dumps([{"gpu": n, "link_type": {}} for n in range(5000)]),
        "GPU[0] : (Topology) Numa Node: 0\n" * 200_000,
        "[ \n" * 100_000 + '"gpu" "link_type":',
        "\n".join('{"gpu": 0, "link_type": 1}' for _ in range(100_000)),
    ],
    ids=range(11),
)
def test_a_file_that_wants_our_time_does_not_get_it(text: str) -> None:
    start = time.process_time()
    assert 0 < len(outcome(text)) < 1000
    assert time.process_time() - start < 5


@given(st.integers(1, 6), st.data())
def test_any_machine_is_read_back_from_every_shape(size: int, data: st.DataObject) -> None:
    ways = {p: data.draw(st.sampled_from([("XGMI", 15), ("PCIE", 40)])) for p in combinations(range(size), 2)}

    def rows(index: int, own: str) -> list[list[str]]:
        return [[own if a == b else str(ways[min(a, b), max(a, b)][index]) for b in range(size)] for a in range(size)]

    rocm = rocm_table("Weight between two GPUs", rows(1, "0")) + rocm_table("Link Type between two GPUs", rows(0, "0"))
    amd = amd_table("WEIGHT", rows(1, "0")) + amd_table("LINK TYPE", rows(0, "SELF"))
    for text in (rocm, amd):
        t = read(text)
        assert len(t) == size
        assert {p: link(t, *p).path for p in ways} == {p: f"{kind}, weight {w}" for p, (kind, w) in ways.items()}


@given(
    st.sampled_from([ROCM, ROCM_JSON, AMD, json.dumps(AMD_NEW), json.dumps(AMD_OLD, indent=1)]),
    st.lists(
        st.tuples(
            st.integers(0, 1500),
            st.integers(0, 40),
            st.sampled_from(["", "\n", " ", "X", "9", "GPU1 ", "é", ":", '"', "{", "[", "null", "-1"]),
        ),
        max_size=3,
    ),
)
def test_no_damage_raises_anything_else(text: str, edits: list[tuple[int, int, str]]) -> None:
    for start, length, word in edits:
        text = text[:start] + word + text[start + length :]
    assert outcome(text).startswith("the text") or not outcome(text)
