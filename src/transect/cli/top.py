"""``transect top``: the present work of a server, refreshed every second."""

from __future__ import annotations

from typing import Annotated

import typer


def command(
    url: Annotated[str, typer.Argument(help="The server, such as http://localhost:8000; or a decision log.")],
    window: Annotated[float, typer.Option(help="Seconds to show.", min=0.1)] = 10.0,
    every: Annotated[float, typer.Option(help="Seconds between updates.", min=0.1)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show once and exit.")] = False,
    preset: Annotated[str | None, typer.Option(help="Floors of this device.")] = None,
    api_key: Annotated[
        str | None, typer.Option(help="The operator's key of the server.", envvar="TRANSECT_API_KEY")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False,
) -> None:
    """Watch a server: the time of its steps by cause, MBU and MFU, the queue, KV blocks, waiting requests.

    Each engine, or replica of a fleet, is shown. A server that answered once is polled again when it is silent.
    """
    import sys
    import time
    from json import dumps

    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from ..explain.engine.live import view
    from ..explain.engine.rates import rates_for
    from ..explain.engine.sources import NoLogYet, NoServer, open_logs, server_url
    from ..explain.engine.work import StepWork

    def look() -> str:
        logs = open_logs(url, api_key)
        found = [view(log, StepWork.of(log.header, rates_for(log.header, preset)), window=window) for log in logs]
        if json:
            numbered = [{"engine": log.name or n} if len(found) > 1 or log.name else {} for n, log in enumerate(logs)]
            return "\n".join(dumps(name | each.to_dict()) for name, each in zip(numbered, found, strict=True))
        rows = []
        for number, (log, each) in enumerate(zip(logs, found, strict=True)):
            title = log.name or (f"engine {number}" if len(found) > 1 else "")
            rows += [title, *each.lines()] if title else each.lines()
        return "\n".join(rows)

    def patient(first: bool = False) -> str:
        try:
            return look()
        except NoLogYet as error:
            if first and isinstance(error, NoServer):
                raise
            return dumps({"error": str(error)}) if json else f"{error}\n(asked again every {every:g} s)"

    if once or server_url(url) is None:
        print(look())
        return
    now = patient(first=True)
    if json or not sys.stdout.isatty():
        while True:
            print(now, flush=True)
            time.sleep(every)
            now = patient()
    with Live(Text(now), console=Console(), refresh_per_second=4) as screen:
        while True:
            time.sleep(every)
            screen.update(Text(patient()))
