"""What people paste of `nvidia-smi topo -m` and `nvidia-smi -L`."""

from __future__ import annotations

import re
import time
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuel_parallel.topology import Origin
from fuel_parallel.topology.files import examine_text
from tests.topology.nvidia_smi_texts import (
    ACCESS,
    LIST,
    MIG,
    TITLES,
    TWO_AND_A_CARD,
    outcome,
    path,
    paths,
    read,
    refused,
)

# Every oddity.


def test_a_matrix_with_a_legend_of_cards() -> None:
    reading = examine_text(TWO_AND_A_CARD)
    t = reading.topology
    assert [d.id for d in t.devices] + [n.id for n in t.nics] == ["cuda:0", "cuda:1", "nic:mlx5_3"]
    assert (path(t, "cuda:0", "nic:mlx5_3"), path(t, "cuda:1", "nic:mlx5_3")) == ("PIX", "SYS")
    assert [(d.cores, d.numa) for d in t.devices] == [("0-7", 0), ("8-15", 1)]
    assert reading.notes == ()


ODDITIES = {
    "colours": TWO_AND_A_CARD.replace("\tGPU0\tGPU1", "\x1b[4m\tGPU0\tGPU1\x1b[0m", 1).replace(
        "PIX", "\x1b[31mPIX\x1b[0m"
    ),
    "colours without their escape": TWO_AND_A_CARD.replace("\tGPU0\tGPU1", "[4m\tGPU0\tGPU1").replace(
        "ID\n", "ID[0m\n"
    ),
    "carriage returns": TWO_AND_A_CARD.replace("\n", "\r\n"),
    "indented": re.sub("^", "    ", TWO_AND_A_CARD, flags=re.MULTILINE),
    "spaces": TWO_AND_A_CARD.replace("\t\tN/A", "\tN/A").expandtabs(),
    "a prompt and a log around": f"[me@n1 ~]$ nvidia-smi topo -m\n{TWO_AND_A_CARD}\n[me@n1 ~]$ exit\nlogout\n",
    "lines doubled": TWO_AND_A_CARD.replace("\n", "\n\n"),
    "tabs lost": TWO_AND_A_CARD.replace("GPU1\tNIC0", "GPU1NIC0")
    .replace("NV4\t X ", "NV4X")
    .replace("X \tNV4", "XNV4"),
    "broken by the terminal": TWO_AND_A_CARD.replace("\tPIX\t0-7", "\n\tPIX\t0-7").replace(
        "\tNIC0\tCPU", "\n\tNIC0\tCPU"
    ),
    "fenced": f"```\n{TWO_AND_A_CARD}```\n",
    "access below": f"{TWO_AND_A_CARD}\n$ nvidia-smi topo -p2p r\n{ACCESS}",
}


@pytest.mark.parametrize("text", ODDITIES.values(), ids=list(ODDITIES))
def test_however_it_is_pasted_it_is_the_same(text: str) -> None:
    assert read(text) == read(TWO_AND_A_CARD)


def test_affinity_may_be_missing_empty_or_unknown() -> None:
    bare = read("\tGPU0\tGPU1\nGPU0\tX\tSYS\nGPU1\tSYS\tX\n")
    assert [(d.cores, d.numa) for d in bare.devices] == [("", None)] * 2
    empty = read(f"\tGPU0\tGPU1{TITLES}\nGPU0\t X \tSYS\t\t\t\tN/A\nGPU1\tSYS\t X \t0-3\tN/A\t\tN/A\n")
    assert [(d.cores, d.numa) for d in empty.devices] == [("", None), ("0-3", None)]
    several = read(f"\tGPU0{TITLES}\nGPU0\t X \t0-7\t0-1\t\t2\n")
    assert [(d.cores, d.numa) for d in several.devices] == [("0-7", None)]


def test_what_a_lone_word_after_spaces_means_is_unknown() -> None:
    reading = examine_text("     GPU0  CPU Affinity  NUMA Affinity\nGPU0  X    0-3\n")
    assert [(d.cores, d.numa) for d in reading.topology.devices] == [("", None)]
    assert reading.notes == ("line 2: cannot tell which of CPU Affinity, NUMA Affinity '0-3' is; left unknown",)


def test_gpus_that_disagree_about_a_domain_leave_its_cores_unknown() -> None:
    reading = examine_text(f"\tGPU0\tGPU1{TITLES}\nGPU0\tX\tSYS\t0-3\t0\t\tN/A\nGPU1\tSYS\tX\t4-7\t0\t\tN/A\n")
    assert [n.cores for n in reading.topology.numa_domains] == [""]
    assert "GPUs next to NUMA domain 0 name different cores" in reading.notes[0]


def test_a_cell_that_is_unknown_is_no_slow_link() -> None:
    reading = examine_text("\tGPU0\tGPU1\nGPU0\tX\tN/A\nGPU1\tN/A\tX\n")
    assert reading.topology.link("cuda:0", "cuda:1") is None
    assert reading.notes == ("line 2: GPU0 to GPU1 is N/A: left unknown",)


def test_cards_whose_columns_or_rows_were_cut_off_keep_what_the_rest_says() -> None:
    header, *rows = TWO_AND_A_CARD.split("\n")[:4]
    no_row = examine_text("\n".join([header, *rows[:2]]))
    assert path(no_row.topology, "cuda:0", "nic:NIC0") == "PIX"
    assert "there is no row of NIC0: what only it says is unknown" in no_row.notes[-1]
    no_column = examine_text("\tGPU0\tGPU1\nGPU0\tX\tNV4\nGPU1\tNV4\tX\nNIC0\tPIX\tSYS\nNIC1\tSYS\tPIX\n")
    assert path(no_column.topology, "cuda:1", "nic:NIC1") == "PIX"
    assert no_column.topology.link("nic:NIC0", "nic:NIC1") is None


def test_the_model_of_the_gpus_gives_nvlinks_their_bandwidth() -> None:
    link = read(LIST + TWO_AND_A_CARD).link("cuda:0", "cuda:1")
    assert link is not None
    assert (link.bandwidth_mb_s, link.origin) == (pytest.approx(4 * 20e9 / 2**20), Origin.ASSUMED)
    card = read(LIST + TWO_AND_A_CARD).link("cuda:0", "nic:mlx5_3")
    assert card is not None
    assert card.bandwidth_mb_s is None
    strange = read(LIST.replace("A100-SXM4-80GB", "Z9000") + TWO_AND_A_CARD).link("cuda:0", "cuda:1")
    assert strange is not None
    assert strange.bandwidth_mb_s is None


def test_the_overview_gives_models_and_addresses() -> None:
    overview = "".join(
        f"|   {n}  NVIDIA H100 80GB HBM3          On  |   00000000:{bus}:00.0 Off |                    0 |\n"
        for n, bus in enumerate(("1B", "43"))
    )
    assert read(overview).device_ids() == ["cuda:0", "cuda:1"]
    t = read(overview + TWO_AND_A_CARD)
    assert [(d.name, d.bus) for d in t.devices] == [
        ("NVIDIA H100 80GB HBM3", "0000:1b:00.0"),
        ("NVIDIA H100 80GB HBM3", "0000:43:00.0"),
    ]
    assert t.bandwidth_mb_s("cuda:0", "cuda:1") == pytest.approx(4 * 20.6e9 / 2**20)


def test_a_list_alone_has_instances_and_no_links() -> None:
    reading = examine_text(MIG)
    assert [(d.id, d.name) for d in reading.topology.devices] == [
        ("cuda:0:mig:0", "NVIDIA H100 80GB HBM3 MIG 3g.40gb"),
        ("cuda:0:mig:1", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"),
        ("cuda:1", "NVIDIA H100 80GB HBM3"),
    ]
    assert reading.topology.bandwidth_mb_s("cuda:0:mig:0", "cuda:1") is None
    assert "how they are linked is unknown" in reading.notes[0]


def test_a_matrix_does_not_show_mig() -> None:
    reading = examine_text(MIG + TWO_AND_A_CARD)
    assert [d.id for d in reading.topology.devices] == ["cuda:0", "cuda:1"]
    assert any("GPU0 is split into 2 MIG instances" in note for note in reading.notes)


@pytest.mark.parametrize(
    "text", [TWO_AND_A_CARD.replace("NV#", "NVX"), f"$ nvidia-smi topo -mp\n{TWO_AND_A_CARD}"], ids=["legend", "prompt"]
)
def test_the_matrix_of_pci_alone_may_hide_nvlinks(text: str) -> None:
    (note,) = examine_text(text).notes
    assert "which hides NVLinks" in note


def test_what_access_does_not_work_is_noted() -> None:
    notes = examine_text(TWO_AND_A_CARD + ACCESS).notes
    assert ["peer-to-peer access does not work from GPU0 to GPU1 (GNS)" in note for note in notes] == [True]
    assert examine_text(TWO_AND_A_CARD + ACCESS.replace("GNS\t", "OK\t")).notes == ()


def test_what_access_does_not_work_is_noted_below_a_list_too() -> None:
    reading = examine_text(LIST + ACCESS)
    assert (len(reading.topology), list(reading.topology.connections())) == (2, [])
    assert "line 3: peer-to-peer access does not work from GPU0 to GPU1 (GNS)" in reading.notes[0]


REFUSED = {
    ACCESS: "line 1: this is a matrix of `nvidia-smi topo -p2p`",
    TWO_AND_A_CARD.replace("GPU1\tNV4\t X \tSYS\t8-15\t1\t\tN/A", "GPU1\tNV4"): (
        "line 3: the row of GPU1 is cut: it has 1 cells of 3; those under GPU1, NIC0 are missing"
    ),
    TWO_AND_A_CARD.replace("GPU1\tNV4\t", "GPU1\tNV2\t"): (
        "line 3, GPU1 to GPU0: found NV2, but line 2 says NV4 of the way back, from GPU0 to GPU1"
    ),
    TWO_AND_A_CARD.replace("GPU0\t X ", "GPU0\tPIX"): "line 2, GPU0 to GPU0: found PIX, expected X",
    TWO_AND_A_CARD.replace("NV4", "X"): "line 2, GPU0 to GPU1: found X, expected a way to another device",
    TWO_AND_A_CARD.replace("NV4", "FAST"): "line 2: the cell of GPU0 under GPU1 is 'FAST'; expected X, NV#",
    TWO_AND_A_CARD.replace("NV4", "NV0"): "line 2: found NV0, expected NV1 to NV72",
    TWO_AND_A_CARD.replace("NV4", "NV" + "9" * 5000): "line 2: found NV999",
    TWO_AND_A_CARD.replace("GPU1\tNV4", "GPU0\tNV4"): "line 3: a second row of GPU0",
    TWO_AND_A_CARD.replace("\tGPU1\tNIC0", "\tGPU0\tNIC0"): "line 1: two columns are called GPU0",
    TWO_AND_A_CARD.replace("\tGPU1\tNIC0", "\tGPU7\tNIC0"): "line 4: the rows of GPU7 are missing",
    TWO_AND_A_CARD.replace("\tNIC0\tCPU", "\tCPU"): "line 2: the row of GPU0 has more cells than the header (line 1)",
    TWO_AND_A_CARD.replace("0-7", "7-0"): "line 2, CPU Affinity: found '7-0', expected a list such as '0-3,8'",
    TWO_AND_A_CARD.replace("0-7", "0-99999"): "line 2, CPU Affinity: found '0-99999'",
    TWO_AND_A_CARD + TWO_AND_A_CARD: "line 14: a second matrix; the first is in line 1",
    TWO_AND_A_CARD + "  NIC1: mlx5_3\n": "line 14: NIC1 and NIC0 are both called mlx5_3",
    TWO_AND_A_CARD + "  NIC0: mlx5_4\n": "line 14: NIC0 is called mlx5_4 here and mlx5_3 before",
    TWO_AND_A_CARD.replace("GPU1", "mlx5_3"): "line 1: the legend calls NIC0 mlx5_3, which has a column of its own",
    TWO_AND_A_CARD.replace(
        "NIC0\tPIX", "GPU2\tPIX"
    ): "line 4: a row of GPU2, for which the header (line 1) has no column",
    TWO_AND_A_CARD.split("\n", 1)[1]: "line 1: rows of `nvidia-smi topo -m` without its header",
    TWO_AND_A_CARD.split("\n", 1)[0]: "line 1: rows of `nvidia-smi topo -m` without its header, or a header without",
    LIST + LIST: "line 3: a second GPU 0",
    LIST.replace("a1", "a0"): "line 2: GPU-a0 is listed twice",
    MIG.replace("Device  1", "Device  0"): "line 3: two MIG instances of a GPU have the number 0",
    "No devices were found\n": "line 1: an error of nvidia-smi and no matrix: that machine shows no GPU",
}


@pytest.mark.parametrize(("text", "reason"), REFUSED.items(), ids=range(len(REFUSED)))
def test_what_cannot_be_told_is_refused_with_its_place(text: str, reason: str) -> None:
    assert f"topo.txt, {reason}" in refused(text)


@pytest.mark.parametrize(
    "text",
    [
        "GPU0 X\n" * 1_000_000,
        "GPU0 X\n" * 50_000,
        "GPU0 GPU1 CPU Affinity\n" * 15_000,
        "".join(f"\tGPU{n}" for n in range(9000)) + "\nGPU0\tX\n",
        "\tGPU0\n" + "GPU0\tX\n" * 100_000,
        "GPU0\nGPU0 X\n\n" * 100_000,
        "\tGPU0\tGPU1\n" + "NIC1\n" * 100_000,
        "\tGPU0" + TITLES + "\nGPU0\tX\t" + "0-65535," * 100_000 + "\n",
        "\tGPU0" + TITLES + "\nGPU0\tX\t" + "1\n" * 100_000,
        "\tGPU0" + "\nNIC0" * 100_000 + " X",
        "GPU0" + " " * 1_000_000 + "\nCPU Affinity",
        "GPU 0: " + "a " * 500_000 + "(UUID: x)\nGPU0 X",
        "".join(f"GPU {n}: A (UUID: GPU-{n})\n" for n in range(10_000)),
        "GPU0 X" + "NV1" * 300_000,
        "\tGPU0\nGPU0\tX\n" + "1" * 60_000 + "!\n",
    ],
    ids=range(15),
)
def test_a_file_that_wants_our_time_does_not_get_it(text: str) -> None:
    start = time.process_time()
    assert len(outcome(text)) < 1000
    assert time.process_time() - start < 5


@pytest.mark.parametrize("text", [TWO_AND_A_CARD, ODDITIES["spaces"]], ids=["tabs", "spaces"])
def test_a_text_that_is_cut_anywhere_is_refused_or_right_about_its_gpus(text: str) -> None:
    whole = read(text)
    for end in range(len(text)):
        if not outcome(text[:end]):
            reading = examine_text(text[:end])
            if len(text[:end].split()) == 1 and reading.format.name == "hostfile":
                continue  # one word is the name of a host
            t = reading.topology
            assert t.device_ids() == whole.device_ids()
            assert path(t, "cuda:0", "cuda:1") == "NV4"
            assert all(
                (d.cores, d.numa) in (("", None), (w.cores, w.numa))
                for d, w in zip(t.devices, whole.devices, strict=True)
            )


WAYS = st.sampled_from(["NV1", "NV12", "PIX", "PXB", "PHB", "NODE", "SYS"])


@st.composite
def matrices(draw: st.DrawFn) -> dict[tuple[int, int], str]:
    size = draw(st.integers(1, 6))
    return {pair: draw(WAYS) for pair in combinations(range(size), 2)} | {(size - 1, size - 1): "X"}


@given(matrices(), st.sampled_from(["\t", "  ", "\t ", "     "]), st.booleans(), st.booleans())
def test_any_matrix_is_read_back(ways: dict[tuple[int, int], str], gap: str, indent: bool, titles: bool) -> None:
    size = max(b for _, b in ways) + 1
    names = [f"GPU{n}" for n in range(size)]
    tail = [gap + "0-3" + gap + "0" + gap + "N/A" if titles else ""] * size
    cells = [[ways.get((min(a, b), max(a, b)), "X") if a != b else "X" for b in range(size)] for a in range(size)]
    header = gap + gap.join(names) + (gap.join(["", *TITLES.split("\t")[1:]]) if titles else "")
    rows = [gap.join([name, *row]) + end for name, row, end in zip(names, cells, tail, strict=True)]
    text = "\n".join(("  " * indent) + line for line in [header, *rows])
    t = read(text)
    assert paths(t, size) == {pair: way for pair, way in ways.items() if way != "X"}
    assert {(d.cores, d.numa) for d in t.devices} == {("0-3", 0) if titles else ("", None)}


@given(
    st.sampled_from([TWO_AND_A_CARD, LIST + TWO_AND_A_CARD + ACCESS, MIG, ODDITIES["spaces"]]),
    st.lists(
        st.tuples(
            st.integers(0, 600),
            st.integers(0, 40),
            st.sampled_from(["", "\n", "\t", "X", "9", "NV", "GPU1 ", "é", ":"]),
        ),
        max_size=3,
    ),
)
def test_no_damage_raises_anything_else(text: str, edits: list[tuple[int, int, str]]) -> None:
    for start, length, word in edits:
        text = text[:start] + word + text[start + length :]
    assert outcome(text).startswith("the text") or not outcome(text)
