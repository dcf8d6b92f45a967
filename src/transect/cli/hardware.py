"""``transect hardware``: this machine's device and its measured ceilings, or a preset's published figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ..costs.ceilings import Ceilings
    from ..hardware.topology import Topology

Rows = list[tuple[str, str]]


def command(
    device: Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu, cuda, cuda:1.")] = "auto",
    again: Annotated[bool, typer.Option("--again", help="Measure even if this device was measured before.")] = False,
    preset: Annotated[
        str | None, typer.Option(help="Show the data sheet of a device; `list` names the presets.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, in bytes, seconds and FLOP/s.")] = False,
) -> None:
    """Measure what this machine's GPU or CPU can do: bandwidth, matrix rates, launch cost, host link."""
    if preset is None:
        _measured(device, again, json)
    elif preset == "list":
        from ..costs.presets import PRESETS

        _show("presets", [(name, made.device) for name, made in PRESETS.items()], list(PRESETS) if json else None)
    else:
        from dataclasses import asdict

        from ..costs.presets import preset as find

        made = find(preset)
        rows = [("device", made.device), ("source", made.source), *ceiling_rows(made.ceilings())]
        _show(f"{made.name}, as published", rows, asdict(made) if json else None)


def _measured(which: str, again: bool, json: bool) -> None:
    from dataclasses import asdict

    from ..hardware.device import detect
    from ..hardware.measured import cache_file
    from ..hardware.topology import topology
    from ..ops.cpu.ceilings import device_measurement

    found = detect(which)
    measured = device_measurement(found, again=again)
    limits = measured.ceilings
    rows = [("device", found.name)]
    if found.kind != "cpu":
        rows += [("target", f"{found.target}, {found.units} multiprocessors"), ("driver", found.driver)]
    rows += [("torch", found.torch), *ceiling_rows(limits)]
    if measured.multiply_adds is not None:
        rows.append(("multiply-adds float32", f"{measured.multiply_adds / 1e12:.2f} TFLOP/s"))
    around = topology()
    rows += topology_rows(around)
    rows += [("measured", f"{measured.at}, others used {measured.load:.0%}"), ("kept in", str(cache_file(found)))]
    facts = {"device": asdict(found), **asdict(measured), "topology": asdict(around)}
    _show("measured", rows, facts if json else None)


def topology_rows(found: Topology) -> Rows:
    """List NUMA nodes and links, one a line."""
    rows = [
        (f"NUMA node {node.number}", f"CPUs {node.cpus}, {node.memory_bytes / 1e9:.1f} GB")
        for node in found.nodes
        if node.cpus
    ]
    for link in found.links:
        rate = f", {link.bytes_per_second / 1e9:.0f} GB/s each way" if link.bytes_per_second else ""
        rows.append((f"GPU {link.first} to GPU {link.second}", f"{link.kind}{rate}"))
    return rows


def ceiling_rows(limits: Ceilings) -> Rows:
    """List each ceiling with its unit."""
    rows = [("memory", f"{limits.memory_bytes / 1e9:.1f} GB")] if limits.memory_bytes else []
    rows += [
        ("read", f"{limits.read_bytes_per_second / 1e9:.1f} GB/s"),
        ("copy (read + written)", f"{limits.copy_bytes_per_second / 1e9:.1f} GB/s"),
    ]
    if limits.update_bytes_per_second:
        rows.append(("update in place (read + written)", f"{limits.update_bytes_per_second / 1e9:.1f} GB/s"))
    for dtype, rate in limits.flops_per_second.items():
        rows.append((f"matmul {dtype}", f"{rate / 1e12:.2f} TFLOP/s"))
    if limits.launch_seconds:
        rows.append(("eager launch", f"{limits.launch_seconds * 1e6:.2f} us"))
    for name, link in (
        ("host to device", limits.host_to_device_bytes_per_second),
        ("device to host", limits.device_to_host_bytes_per_second),
    ):
        if link:
            rows.append((name, f"{link / 1e9:.1f} GB/s"))
    return rows


def _show(title: str, rows: Rows, as_json: Any) -> None:
    if as_json is not None:
        from json import dumps

        print(dumps(as_json, indent=1))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    Console().print(table, highlight=False)
