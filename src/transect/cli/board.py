"""``transect board``: training runs and reports in the browser."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

MOST_RUNS = 12
"""Runs of a folder that are shown, the newest first."""
MOST_BYTES = 64 * 2**20
"""Longest report that is sent to the browser."""


def command(
    paths: Annotated[
        list[Path], typer.Argument(help="Runs, folders of runs, flows, JSON of explain, roofline and others, traces.")
    ],
    host: Annotated[str, typer.Option(help="Local address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 for any free one.", min=0, max=65535)] = 0,
    preset: Annotated[str | None, typer.Option(help="Device of traces; default: this machine.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Print the contents as JSON and exit.")] = False,
) -> None:
    """Show runs, flows and reports in the browser: curves, samples, memory, findings, rooflines.

    The page reads runs and flows again as they grow. Ctrl-C ends it.
    """
    import json

    import uvicorn

    from ..server.page.board import create_board
    from ..server.process import bind, url_of

    read = Reports(paths, preset)
    found = read()
    if once:
        print(json.dumps(found))
        return
    sock = bind(host, port)
    sock.listen()
    count = f"{len(found)} report" + ("s" if len(found) != 1 else "")
    print(f"transect: {count} on {url_of(sock)}/#/reports (Ctrl-C ends)", flush=True)
    uvicorn.Server(uvicorn.Config(create_board(read), log_level="error", lifespan="off")).run(sockets=[sock])


class Reports:
    """The reports at some paths.

    Args:
        paths: of runs, folders of runs, flows (their files or directories), and other files.
        preset: device of traces; None for this machine.

    Raises:
        ValueError: a path holds nothing that can be shown.
    """

    def __init__(self, paths: list[Path], preset: str | None = None) -> None:
        from ..flow.settings import flow_folder, read_flow
        from ..server.page.flows import is_flow
        from ..train.loop.overview import runs_in

        self._preset = preset
        self._runs: list[Path] = []
        self._flows: list[Path] = []
        self._files: list[dict[str, Any]] = []
        for path in paths:
            if path.suffix == ".toml":
                self._flows.append(flow_folder(read_flow(path), path))
            elif is_flow(path):
                self._flows.append(path)
            elif path.is_dir():
                self._runs += runs_in(path)[:MOST_RUNS]
            else:
                self._files.append({"name": path.name, "content": self._content(path)})

    def __call__(self) -> list[dict[str, Any]]:
        """Return the reports; flows and runs as they are now. Numbers that JSON lacks are None."""
        from ..server.page.flows import finite, flow_reports
        from ..train.loop.overview import overview

        runs = [{"name": path.name, "content": finite(overview(path))} for path in self._runs]
        return [*flow_reports(self._flows), *runs, *self._files]

    def _content(self, path: Path) -> Any:
        import json

        from ..server.page.flows import finite

        if path.suffix == ".jsonl":
            raise ValueError(f"{path} is a log: name the directory of the run, {path.parent}")
        if path.name.endswith((".gz", ".sqlite")):
            return self._explained(path)
        try:
            if path.stat().st_size <= MOST_BYTES:
                content = json.loads(path.read_text(encoding="utf-8"))
                if not (isinstance(content, dict) and "traceEvents" in content):
                    return finite(content)
        except OSError as error:
            raise ValueError(f"{path} cannot be read ({error.strerror})") from None
        except ValueError:
            raise ValueError(f"{path} is not JSON: name a run, a report (--json FILE) or a trace") from None
        return self._explained(path)

    def _explained(self, path: Path) -> Any:
        """Return the explanation of a trace."""
        from ..costs.presets import preset as find
        from ..explain.program.explain import explain_trace, machine_ceilings
        from ..explain.program.trace_file import read_trace
        from ..server.page.flows import finite

        print(f"transect: {path} is a trace, which is explained now", file=sys.stderr)
        ceilings = machine_ceilings() if self._preset is None else find(self._preset).ceilings()
        return finite(explain_trace(read_trace(path), ceilings).to_dict())
