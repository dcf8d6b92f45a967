"""How a machine is connected, from what the system says of it."""

from transect.cli.hardware import topology_rows
from transect.hardware.topology import Link, NumaNode, Topology, described, link_kinds, numa_nodes, topology

TABLE = """
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-47\t0
GPU1\tNV18\t X \tPHB\tSYS\t0-47\t0
GPU2\tSYS\tPHB\t X \tSYS\t48-95\t1
NIC0\tPIX\tSYS\tSYS\t X

Legend:
  X    = Self
"""


def test_links_are_those_of_the_table():
    kinds = link_kinds(TABLE)
    assert kinds == {(0, 1): "NV18", (0, 2): "SYS", (1, 0): "NV18", (1, 2): "PHB", (2, 0): "SYS", (2, 1): "PHB"}
    assert described("NV18") == "NVLink, 18 links" and described("PHB").startswith("PCIe")
    assert link_kinds("") == {} and described("") == "not known"


def test_nodes_are_those_of_linux(tmp_path):
    for number, (cpus, memory) in enumerate([("0-3", 1000), ("4-7", 2000)]):
        folder = tmp_path / f"node{number}"
        folder.mkdir()
        (folder / "cpulist").write_text(f"{cpus}\n")
        (folder / "meminfo").write_text(f"Node {number} MemTotal:       {memory} kB\nNode {number} MemFree: 1 kB\n")
    (tmp_path / "node2").mkdir()  # says nothing
    assert numa_nodes(tmp_path) == (NumaNode(0, "0-3", 1_024_000), NumaNode(1, "4-7", 2_048_000))
    assert numa_nodes(tmp_path / "none") == ()


def test_rows():
    found = Topology((NumaNode(0, "0-3", 10**9),), (Link(0, 1, "NVLink, 18 links", 380e9), Link(0, 2, "SYS")))
    assert topology_rows(found) == [
        ("NUMA node 0", "CPUs 0-3, 1.0 GB"),
        ("GPU 0 to GPU 1", "NVLink, 18 links, 380 GB/s each way"),
        ("GPU 0 to GPU 2", "SYS"),
    ]
    assert topology(measure=False).nodes == numa_nodes()
