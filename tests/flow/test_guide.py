"""The guide's step, in a chain with the shipped ones."""

import re
import threading
from http.server import HTTPServer
from pathlib import Path

from killed_flows import SmallServer, prepare, quick_steps

from transect.flow.chain import FlowChain
from transect.flow.settings import FlowConfig

GUIDE = Path(__file__).parents[2] / "docs" / "extend" / "flow-step.md"


def test_the_guides_step_runs_is_skipped_and_survives_the_loss_of_its_file(tmp_path) -> None:
    (program,) = re.findall(
        r"```python title=\"src/transect/flow/steps/card.py\"\n(.*?)```", GUIDE.read_text(), re.DOTALL
    )
    names: dict = {"__name__": "card"}
    exec(compile(program.replace("from __future__ import annotations", ""), "card.py", "exec"), names)
    steps = {**quick_steps(), "card": names["CARD"]}
    steps = {each.name: each for each in sorted(steps.values(), key=lambda each: each.place)}
    assert list(steps)[4] == "card"
    server = HTTPServer(("127.0.0.1", 0), SmallServer)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        prepare(tmp_path / "flow", server.server_port)
        file = tmp_path / "flow" / "flow.toml"

        def run(*settings: str):
            return FlowChain(FlowConfig.from_toml(file, settings, steps), steps, tell=lambda line: None).run()

        assert [state.state for state in run()][4] == "left out"
        states = run("card.licence=MIT")
        assert [state.kept for state in states] == [True] * 4 + [False] + [True] * 3
        (card,) = (tmp_path / "flow").glob("flows/m/work/card-*/card.md")
        assert "# m-v1\n\nLicence: MIT\n" in card.read_text()
        card.unlink()
        assert not run("card.licence=MIT")[4].kept and card.exists()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
