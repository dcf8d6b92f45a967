"""Write the recorded results into the pages that quote them, so that no number is typed by hand.

A page has blocks ``<!-- results: NAME -->`` ... ``<!-- end -->``. Their text is made from the JSON files under
``benchmarks/results/``. The address of publication goes from ``pyproject.toml`` into ``mkdocs.yml`` in the same way.

    python benchmarks/render.py            rewrite the blocks
    python benchmarks/render.py --check    exit 1 if a block differs from the results
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import _paths  # noqa: F401
from benchmarks import gpu_queue, record
from benchmarks.checks import ladder as rungs
from benchmarks.checks import ladder_limits, numerics, speed_of_trees, structure
from benchmarks.compilers import follow
from benchmarks.compilers import ladder as compilers
from benchmarks.engine import (
    adapters,
    batching,
    cpu_bfloat16,
    cpu_peers,
    cpu_sets,
    cpu_vs_llamacpp,
    eagle,
    grammars,
    jump_ahead,
    long_prompts,
    serving_steps,
    shared_document,
    speculation,
    speculation_host,
    step_policy,
    structured_cost,
    structured_masks,
)
from benchmarks.engine import shapes as shapes_gpu
from benchmarks.explain import apply as explain_apply
from benchmarks.explain import faults as explain_faults
from benchmarks.explain import jobs as explain_jobs
from benchmarks.explain import large_trace, side_by_side, step_prediction
from benchmarks.explain import overhead as explain_overhead
from benchmarks.explain import programs as explain_programs
from benchmarks.explain import sums as explain_sums
from benchmarks.formats import quality as formats_quality
from benchmarks.ops import issue_rates, products_by_shape, products_fp8
from benchmarks.plan import cells as plan_cells
from benchmarks.plan import clocked as plan_clocked
from benchmarks.plan import fleet as plan_fleet
from benchmarks.plan import replicas as plan_replicas
from benchmarks.plan import scaling as plan_scaling
from benchmarks.plan import validation as plan_validation
from benchmarks.server import (
    clients,
    engine_threads,
    fair_sharing,
    hostile_schemas,
    http_vs_offline,
    request_walk,
    soak,
    turns_gpu,
    virtual_soak,
)
from benchmarks.server import load as serve_load
from benchmarks.server import load_cpu as serve_load_cpu
from benchmarks.tables import cards as card_tables
from benchmarks.tables import cluster as cluster_tables
from benchmarks.tables import engine as engine_tables
from benchmarks.tables import explain as explain_tables
from benchmarks.tables import formats as format_tables
from benchmarks.tables import front
from benchmarks.tables import invariant as invariant_tables
from benchmarks.tables import ladder as ladder_tables
from benchmarks.tables import moe as moe_tables
from benchmarks.tables import offload as offload_tables
from benchmarks.tables import ops as ops_tables
from benchmarks.tables import page as page_tables
from benchmarks.tables import pretrain as pretrain_tables
from benchmarks.tables import scaling as scaling_tables
from benchmarks.tables import search as search_tables
from benchmarks.tables import streaming as streaming_tables
from benchmarks.tables import train as train_tables
from benchmarks.tables import tuning as tuning_table
from benchmarks.train import cpu_lora, data_formats, offload_peers, precisions, rollout
from transect.learn.ladder import chapters, map_page
from transect.learn.record import ROADS

PAGES = [record.ROOT / "README.md", *sorted((record.ROOT / "docs").rglob("*.md"))]
SITE = record.ROOT / "mkdocs.yml"
TRAINED_ON_TWO = [f"h200/train_parallel_{run}.json" for run in ("1b", "3b", "8b", "again")]
GPUS = ("h100", "h200")
SEARCHES = ("cpu/search.json", "h200/search.json", "h200/search_long.json")
BLOCK = re.compile(r"(<!-- results: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _recorded(*names: str) -> list[dict[str, Any]]:
    """Load those of some results that exist."""
    return [_load(name) for name in names if (record.RESULTS / name).exists()]


def _everywhere(name: str, machines: Sequence[str] = ("cpu", *GPUS)) -> list[dict[str, Any]]:
    """Load a result of several machines, where it exists."""
    return _recorded(*(f"{machine}/{name}.json" for machine in machines))


def _load(name: str) -> dict[str, Any]:
    return json.loads((record.RESULTS / name).read_text())


def _origin(result: dict[str, Any], runs: int) -> str:
    machine = result["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    return (
        f"\n`{result['command']}` on {machine['cores']} cores of an {machine['processor']} "
        f"({result.get('kernels', 'C++ kernels')}), Python {machine['python']}, {versions}, "
        f"{record.made_at([machine])}, median of {runs} rounds.\n"
    )


def _here(result: dict[str, Any]) -> str:
    """Name command, machine and commit of a result."""
    machine = result["environment"]
    where = f"{machine['cores']} cores of an {machine['processor']}"
    return f"\n`{result['command']}` on {where}, Python {machine['python']}, {record.made_at([machine])}.\n"


def llamacpp() -> str:
    """Render the race against llama.cpp."""
    result = _load("cpu/llamacpp.json")
    runs = next(iter(result["work"].values()))["ratio"]["runs"]
    return cpu_vs_llamacpp.table(result) + "\n" + _origin(result, runs)


def llamacpp_formats() -> str:
    """Render the same race on files of several formats."""
    return cpu_vs_llamacpp.format_table(_load("cpu/llamacpp_formats.json"))


def issue_rates_table() -> str:
    """Render the scheduler time of a product on the tensor cores."""
    return issue_rates.table(_load("h200/issue_rates.json"))


def batching_table() -> str:
    """Render continuous against static batching."""
    result = _load("cpu/batching.json")
    runs = next(iter(result["work"].values()))["continuous"]["output_tokens_per_second"]["runs"]
    return batching.table(result) + "\n" + _origin(result, runs)


def precision_table() -> str:
    """Render pretraining in bfloat16 beside float32."""
    return precisions.table(_load("cpu/precisions.json"))


def formats_by_quality() -> str:
    """Render perplexity and bits of number formats on a processor."""
    return formats_quality.table(_load("cpu/formats_quality.json"))


def step_policies() -> str:
    """Render the simulated sizes of steps while requests arrive one by one."""
    return step_policy.table(_load("cpu/step_policy.json"))


def step_policies_long() -> str:
    """Render the same with long prompts among short ones."""
    return step_policy.long_table(_load("cpu/step_policy.json"))


def lora() -> str:
    """Render LoRA fine-tuning against transformers + PEFT."""
    result = _load("cpu/lora.json")
    return cpu_lora.table(result) + "\n" + _origin(result, result["work"]["rows"]["ratio"]["runs"])


def lora_parts() -> str:
    """Render the products and the attention of that, on one thread."""
    result = _load("cpu/lora_parts.json")
    return cpu_lora.parts_table(result) + "\n" + _origin(result, 7).replace("median of 7 rounds", "best of 7")


def walk() -> str:
    """Render one request through the code, stage by stage."""
    result = _load("cpu/request_walk.json")
    origin = _origin(result, result["rounds"]).replace("median of", f"medians of {result['steps']} steps, fastest of")
    return request_walk.table(result) + "\n" + origin


def http() -> str:
    """Render HTTP against the engine alone."""
    result = _load("cpu/http.json")
    return http_vs_offline.table(result) + "\n" + _origin(result, result["ratio"]["runs"])


def gpu_engine(table: Callable[[dict[str, dict[str, Any]]], str]) -> Callable[[], str]:
    """Return a function that renders one of the tables of the engine on one GPU."""
    return lambda: table(engine_tables.load())


def gpu_training(table: Callable[[dict[str, Any]], str], name: str = "train") -> Callable[[], str]:
    """Return a function that renders one of the tables of training on one GPU."""
    return lambda: table(_load(f"h200/{name}.json"))


def clients_table() -> str:
    """Render other projects' clients, by feature."""
    result = _load("cpu/clients.json")
    machine = result["environment"]
    origin = f"`{result['command']}`, Python {machine['python']}, {record.made_at(result['clients'].values())}."
    return f"{clients.table(result)}\n{origin}\n"


def sinks() -> str:
    """Decode steps of gpt-oss's shape, by either kernel for its decode rows."""
    found = _load("h200/sinks.json")
    lines = ["| rows | Triton's, ms | streamed, ms |", "|---|---|---|"]
    for count, times in found["rows"].items():
        cells = [f"{times[way]['median'] * 1e3:.2f}" for way in ("tiles", "streamed")]
        lines.append(f"| {count} | {' | '.join(cells)} |")
    machine, apart = found["environment"], found["logprobs"]
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    lines.append(
        f"\n`{found['command']}` on one {found['gpu']}, gpt-oss-20b's shape in bfloat16, contexts of "
        f"{found['context']:,} tokens, {packages}, {record.made_at([machine])}. Log-probabilities of the first decode "
        f"step differ by up to {apart['apart']:.2f}, in batches of 16 and 8 by one kernel by "
        f"{apart['apart_by_batch']:.2f}."
    )
    return "\n".join(lines) + "\n"


def number_formats() -> str:
    """Render number formats on one GPU."""
    return format_tables.table(_load("h200/formats.json"), _load("h200/engine_llama-3.1-8b.json"))


def decoder_layer() -> str:
    """Render one layer in a CUDA graph, with each fusion off separately."""
    from benchmarks.engine import decoder_layer  # loads torch

    return decoder_layer.table(_load("h200/decoder_layer.json"))


def int4_variants() -> str:
    """Render a decode step with 4-bit weights, over the versions of its kernels."""
    result = _load("h200/int4_variants.json")
    first = result["step_s"]["bf16"]
    lines = ["| weights | " + " | ".join(f"ms, batch {rows}" for rows in first) + " |", "|---" * (1 + len(first)) + "|"]
    for name, steps in result["step_s"].items():
        cells = (f"{1e3 * t['median']:.2f} ({first[rows]['median'] / t['median']:.2f}x)" for rows, t in steps.items())
        lines.append(f"| {result['what'][name]} | " + " | ".join(cells) + " |")
    machine = result["environment"]
    return "\n".join(lines) + f"\n\n{result['model']}, {machine['gpu']}, {record.made_at([machine])}.\n"


def operators_reference() -> str:
    """Render every operator of the registry: math, shapes, implementations, accuracy."""
    from transect.ops.registry import all_ops
    from transect.ops.tools.reference import page

    return page(all_ops())


def all_number_formats() -> str:
    """Render every record of a number format."""
    from transect.spec.numbers.page import page

    return page()


def model_families() -> str:
    """Render every record of a model family, and the stacks that its tiny model could run on with heads and experts
    of 64."""
    from dataclasses import replace

    from transect.models import fused_stack, native
    from transect.spec.families.family import TINY
    from transect.spec.families.registry import families
    from transect.spec.hf import from_hf

    rows = ["| `model_type` | models | on a CPU | on a GPU | special features | GGUF |", "|---|---|---|---|---|---|"]
    for name, family in families().items():
        config = from_hf(TINY | {"model_type": name, **family.tiny})
        moe = config.moe and replace(config.moe, expert_dim=64, shared_dim=64 * bool(config.moe.shared_dim))
        config = replace(config, head_dim=64, moe=moe)
        refusals = native.refusal(config, 16), fused_stack.refusal(config)
        runs = " | ".join("kernels" if refusal is None else "layers" for refusal in refusals)
        rows.append(f"| `{name}` | {family.models} | {runs} | {', '.join(config.beyond_stacks)} | `{family.gguf}` |")
    return "\n".join(rows) + "\n"


def training_settings() -> str:
    """Render every setting of a training run."""
    from transect.spec.settings import table
    from transect.train.config import TrainConfig
    from transect.train.config.defaults import BY_TASK

    return "\n".join(table(TrainConfig, by_task=BY_TASK))


def flow_settings() -> str:
    """Render every setting of a flow: of its steps, then of the measures of its gate."""
    from transect.flow.gate.registry import measures
    from transect.flow.steps.registry import steps
    from transect.spec.settings import table

    tables = [*((step.settings, f"{name}.") for name, step in steps().items())]
    tables += [(measure.settings, f'gate.NAME, measure = "{name}".') for name, measure in measures().items()]
    return "\n".join(line for kind, where in tables for line in table(kind, where))


def serving_settings() -> str:
    """Render every setting of an engine and of a server, by group."""
    from transect.cli.serve import NO_OPTIONS
    from transect.engine.config import EngineConfig
    from transect.engine.executors.gpu.options import GPUOptions
    from transect.server.options import ServerOptions
    from transect.spec.settings import options_table

    kinds = (ServerOptions, EngineConfig, GPUOptions)
    return "\n".join(options_table(*kinds, without=("model",), unnamed=NO_OPTIONS))


def environment_variables() -> str:
    """Render the environment variables that belong to no single option."""
    from transect.cli.environment import VARIABLES

    return "\n".join(["| variable | |", "|---|---|", *(f"| `{name}` | {text} |" for name, text in VARIABLES.items())])


def kills() -> str:
    """Render checkpoints after kills in the middle of their writing."""
    result, run = _load("cpu/kill_checkpoints.json"), _load("cpu/kill_training.json")
    ranks = _load("cpu/kill_ranks.json")
    first, second = ranks["kills_of_the_first_rank"], ranks["kills_of_the_second_rank"]
    return (
        f"`{result['command']}`: {result['kills']} kills, {result['kills_within_a_write']} of them within a write; the "
        f"{result['checkpoints_found_and_whole']} checkpoints found afterwards were all complete.\n\n"
        f"`{run['command']}`: {run['kills']} kills of a GRPO run with adapters, {run['kills_within_a_write']} of them "
        f"within a write and {run['kills_between_steps_of_a_rollout']} between two optimizer steps of one rollout; the "
        f"run was resumed each time, ended {run['runs_that_reached_their_end_with_the_same_bits']} times, "
        "and every loss, adapter and optimizer state was bit-identical to an undisturbed run.\n\n"
        f"`{ranks['command']}`: {first + second} kills of one of two ranks with sharded weights, {first} of the first "
        f"and {second} of the second, {ranks['kills_within_a_write']} of them within a write; the other rank ended by "
        f"itself, the {ranks['checkpoints_read_after_a_kill_all_whole']} checkpoints found afterwards were complete "
        "on both, and the run that reached its end had losses, weights and states bit-identical to an undisturbed "
        "run.\n"
    )


def serving_kills() -> str:
    """Render kills of a rank of a server under load, on processors and on GPUs."""
    paths = ("cpu/kill_serving_ranks.json", "h200/kill_serving_ranks.json")
    return "\n".join(_kills(_load(path)) for path in paths if (record.RESULTS / path).exists())


def capture_cost() -> str:
    """Render the cost of captures for a server without a model."""
    result = _load("cpu/capture_cost.json")
    ratio = result["tokens_per_s_ratio"]
    before, after = (result[kind]["processor_us_per_token"]["median"] for kind in ("without", "capturing"))
    return (
        f"Every request captured, {result['streams']} streams from a server whose engine costs nothing: "
        f"{ratio['median']:.3f} of the tokens per second without captures ({ratio['min']:.3f} to {ratio['max']:.3f} in "
        f"{ratio['runs']} rounds, in turns), and {after:.1f} instead of {before:.1f} us of the server's processor time "
        f"per token.{_gaps(result)}\n"
        f"{_here(result)}"
    )


def _gaps(result: dict[str, Any]) -> str:
    """Render the 99th percentile of gaps with captures beside that without; empty if it was not measured."""
    found = result.get("gap_p99")
    if found is None:
        return ""
    low, high = found["interval"]
    return (
        f" With steps of {found['step_ms']:.0f} ms, 99% of the gaps between two pieces of a stream are below "
        f"{found['capturing_ms']:.2f} ms instead of {found['without_ms']:.2f} ms: a ratio of {found['ratio']:.3f} (95% "
        f"interval {low:.3f} to {high:.3f})."
    )


def drift() -> str:
    """Render false alarms of the watch for drift, and the share of planted drifts that it finds."""
    result = _load("cpu/drift.json")
    windows, counts = result["false_alarms"]["windows"], result["false_alarms"]["alarmed_at"]
    shares = list(next(iter(result["found"].values())))
    said = ", ".join(f"{count} at a rate of {float(rate):g}" for rate, count in counts.items())
    lines = [
        f"Of {windows:,} windows without drift, alarms in {said}. Planted drifts, by the share of changed requests in "
        f"a window of 256; each cell is the share of {result['trials']} windows that raised an alarm:",
        "",
        "| drift | " + " | ".join(f"{float(share):.0%}" for share in shares) + " |",
        "|---|" + "---|" * len(shares),
    ]
    for name, found in result["found"].items():
        lines.append(f"| {name} | " + " | ".join(f"{value:.0%}" for value in found.values()) + " |")
    return "\n".join([*lines, _here(result)])


def fleet(table: Callable[[Any], str], name: str) -> Callable[[], str]:
    """Render a result of a fleet; nothing before it was recorded."""
    path = record.RESULTS / "cpu" / f"{name}.json"
    return lambda: f"{table(json.loads(path.read_text()))}\n" if path.exists() else ""


def fleet_settings() -> str:
    """Render the settings of a fleet file, without those of ``serve``."""
    from transect.cluster.settings import LinkSettings, RaySettings, ReplicaSettings, ScalingSettings
    from transect.spec.settings import table

    kinds = {"replicas": ReplicaSettings, "links": LinkSettings, "scaling": ScalingSettings, "ray": RaySettings}
    return "\n".join(line.replace("## ", "### ", 1) for name, kind in kinds.items() for line in table(kind, f"{name}."))


def fail_over() -> str:
    """Render kills and stops of replicas, and the cost of replicas while nothing fails."""
    found, cost = _load("cpu/fail_over.json"), _load("cpu/replica_cost.json")
    pauses = []
    for name, what in (("SIGKILL", "kills"), ("SIGSTOP", "a stop")):
        gap = found.get(f"gap_{name}_s")
        if gap is None:
            continue
        most = f"median {gap['median']:.2f} s, at most {gap['max']:.2f} s, predicted {gap['predicted']:.2f} s"
        most = f"{most} ({gap['runs']} rounds)"
        pauses.append(f"after {what} {most}")
    alone, behind = cost["alone"], cost["replicas"]
    more, ratio = cost["first_token_ms_more"], cost["tokens_per_s_ratio"]
    pairs = {
        "first token at one stream, ms": "first_token_ms",
        f"tokens/s of {cost['streams']} streams": "tokens_per_s",
        "CPU time of the HTTP process per token, µs": "processor_us_per_token",
    }
    cut = _load("cpu/continuations.json")
    costs = [f"{what} {_spread(behind[key])} against {_spread(alone[key])}" for what, key in pairs.items()]
    quiet = (
        f" The longest pause in a round's streams, with no other work on the machine: {'; '.join(pauses)}. The "
        "prediction is the detection time plus a prefill of the longest prompt and answer at the measured rate."
        if pauses
        else ""
    )
    return (
        f"`{found['command']}`: {found['signals']} signals at random tokens to three replicas of {found['model']}, "
        f"{found['kills']} of them `kill -9` and {found['stops']} SIGSTOP. Of {found['answers']} answers "
        f"{found['broken']} were dropped and {found['differing']} differed from the undisturbed answer.{quiet} The "
        f"longest pause of all rounds, on a busy machine, was {found['longest_gap_s']:.0f} s. "
        f"Left out: {found['left_out']}. "
        f"On {found['runs'][-1]['processor']}, {record.made_at(found['runs'])}.\n\n"
        f"`{cut['command']}`: {cut['workloads']:,} workloads with {cut['continued']:,} answers cut after every token "
        f"and continued on a checking device, and {cut['runs']:,} workloads with {cut['continued_in_runs']:,} on the "
        f"CPU's engine with a small model: none differed. "
        f"On {cut['environment']['processor']}, {record.made_at([cut['environment']])}.\n\n"
        f"`{cost['command']}`: an engine behind replicas compared with the same engine alone, without a model "
        f"and without failures, median and extremes of {alone['tokens_per_s']['runs']} rounds: {'; '.join(costs)}. "
        f"Within a round replicas add {more['median']:.2f} ms ({more['min']:.2f} to {more['max']:.2f}) to the first "
        f"token, and reach {ratio['median']:.3f} ({ratio['min']:.3f} to {ratio['max']:.3f}) of the tokens/s. On a "
        f"2-core machine ({cost['processor']}), {record.made_at([cost])}.\n"
    )


def _spread(values: dict[str, float]) -> str:
    return f"{values['median']:,.1f} ({values['min']:,.1f} to {values['max']:,.1f})"


def _kills(found: dict[str, Any]) -> str:
    others = " and the others their answers" if found["clients_with_one_error"] < found["clients"] else ""
    gpus = len(found["each"][0]["gpu_mib_more"])
    held = " and no GPU memory was held" if gpus else ""
    where = f"{gpus} NVIDIA H200" if gpus else found["runs"][-1]["processor"]
    first = sum(not each.get("rank", 1) for each in found["each"])
    which = (
        f"one of which was killed under load ({first} times the first)"
        if first
        else "the second of which was killed under load"
    )
    return (
        f"`{found['command']}`: {found['kills']} servers on two ranks, {which}, "
        f"{found['clean']} of them without a fault: {found['clients_with_one_error']} of {found['clients']} clients "
        f"got one error within {math.ceil(10 * found['slowest_told_s']) / 10} s{others}, `/health` was red, the "
        f"server reported one error and exited with 1, no process remained{held}, and the next server started. On "
        f"{where}, {record.made_at(found['runs'])}.\n"
    )


def pretrain(table: Callable[[dict[str, Any]], str], run: str) -> Callable[[], str]:
    """Return a function that renders one of the tables of a pretraining run on one GPU."""
    return lambda: table(_load("h200/pretrain.json")[run])


def pretrain_published() -> str:
    """Render pretraining on Tiny Shakespeare beside nanoGPT's published losses."""
    runs = (_load(f"{machine}/pretrain.json")["shakespeare"] for machine in ("h200", "cpu"))
    return pretrain_tables.beside_published(*runs)


def once_recorded(name: str, command: str, table: Callable[[dict[str, Any]], str]) -> Callable[[], str]:
    """Return a function that renders a result, or the command that records it while there is none. A GPU's result may
    be of either card."""
    missing = f"Not recorded yet: `python {command}` writes this table.\n"
    names = (name, name.replace("h100/", "h200/"))
    return lambda: next(map(table, _recorded(*names)), missing)


def followed(part: str, key: str) -> Callable[[], str]:
    """Return a function that renders an excerpt of what a compiler made of softmax."""
    return lambda: follow.page(part, key, _load("cpu/compilers_followed.json"))


BLOCKS: dict[str, Callable[[], str]] = {
    "compilers-ladder": once_recorded("cpu/compilers.json", "benchmarks/compilers/ladder.py", compilers.table),
    "compilers-gpu": once_recorded(
        "h100/compilers.json", "benchmarks/compilers/ladder.py --device cuda", compilers.table
    ),
    "compilers-planes": once_recorded(
        "cpu/compilers.json",
        "benchmarks/compilers/ladder.py",
        lambda ladder: follow.planes_table(_load("cpu/compilers_followed.json"), ladder),
    ),
    "learn-map": map_page,
    **{f"learn-{road}": partial(chapters, road) for road in ROADS},
    "shared-document": once_recorded(
        "cpu/shared_document.json", "benchmarks/engine/shared_document.py", shared_document.table
    ),
    "page-frames": lambda: page_tables.frames(_load("cpu/page_frames.json")),
    "page-probabilities": lambda: page_tables.probabilities(_load("cpu/token_probabilities.json")),
    "learn-alarms": once_recorded("cpu/ladder.json", "benchmarks/checks/ladder.py", rungs.alarms_table),
    "learn-gpu": once_recorded("h200/ladder.json", "benchmarks/checks/ladder.py --device cuda", rungs.kernels_table),
    "learn-limits": once_recorded("cpu/ladder_limits.json", "benchmarks/checks/ladder_limits.py", ladder_limits.table),
    "cpu-bfloat16": once_recorded("cpu/cpu_bfloat16.json", "benchmarks/engine/cpu_bfloat16.py", cpu_bfloat16.table),
    "cpu-peers": once_recorded("cpu/cpu_peers.json", "benchmarks/engine/cpu_peers.py", cpu_peers.table),
    "cpu-peers-shapes": once_recorded(
        "cpu/cpu_peers_shapes.json",
        "benchmarks/engine/cpu_peers.py --shapes 1.7b,4b,mixture --rounds 1 --repeats 1 --settings 1",
        cpu_peers.table,
    ),
    "cpu-sets": once_recorded("cpu/cpu_sets.json", "benchmarks/engine/cpu_sets.py", cpu_sets.table),
    "offload-peers": once_recorded("h100/offload_peers.json", "benchmarks/train/offload_peers.py", offload_peers.table),
    "compilers-roles": lambda: follow.roles_table(_load("cpu/compilers_followed.json")),
    **{f"compilers-{name}": followed(*place) for name, place in follow.EXCERPTS.items()},
    "operators-reference": operators_reference,
    "operators-results": ops_tables.page,
    "cards": card_tables.predictions,
    "targets": card_tables.targets,
    "portable": card_tables.portable,
    "clone": front.clone,
    "lead": front.lead,
    "first-answer": front.first_answer,
    "figures": front.figures,
    "support": front.support,
    "numerics": numerics.page,
    "tuning": tuning_table.table,
    "clients": clients_table,
    "llamacpp": llamacpp,
    "llamacpp-formats": llamacpp_formats,
    "batching": batching_table,
    "precisions": precision_table,
    "formats-quality": formats_by_quality,
    "step-policy": step_policies,
    "step-policy-long": step_policies_long,
    "lora": lora,
    "lora-parts": lora_parts,
    "request-walk": walk,
    "http": http,
    "engine-gpu": gpu_engine(engine_tables.main_table),
    "number-formats": number_formats,
    "number-formats-all": all_number_formats,
    "families": model_families,
    "sinks": sinks,
    "engine-gpu-short": gpu_engine(engine_tables.short_table),
    "engine-gpu-energy": gpu_engine(engine_tables.energy_table),
    "engine-gpu-startup": gpu_engine(engine_tables.startup_table),
    "engine-gpu-walk": gpu_engine(engine_tables.walk_table),
    "engine-gpu-host": gpu_engine(engine_tables.host_table),
    "engine-gpu-parts": gpu_engine(engine_tables.parts_table),
    "engine-gpu-ablation": gpu_engine(engine_tables.ablation_table),
    "engine-gpu-deterministic": gpu_engine(engine_tables.deterministic_table),
    "invariant": lambda: invariant_tables.table(_load("h200/invariant.json")),
    "zero-inference": lambda: streaming_tables.table(_load("h200/zero_inference.json")),
    "scaling": lambda: scaling_tables.table(scaling_tables.load()),
    "scaling-layouts": lambda: scaling_tables.layouts_table(
        _load("h200/tp_llama-3.1-8b.json")["sections"], _load("h200/layouts_llama-3.1-8b.json")["sections"]
    ),
    "scaling-sums": lambda: scaling_tables.sums_table(_load("h200/collectives_2.json")),
    "engine-gpu-http": lambda: engine_tables.http_table(_load("h200/engine_http.json")),
    "products-by-shape": lambda: products_by_shape.page(_load("h200/products_by_shape.json")),
    "products-fp8": lambda: products_fp8.page(_load("h200/products_fp8.json")),
    "products-int8": lambda: products_fp8.page(_load("h200/products_int8.json")),
    "products-blocks": lambda: products_fp8.page(_load("h200/products_blocks.json")),
    "products-many": lambda: products_by_shape.many_page(_load("h200/products_many.json")),
    "shapes": lambda: shapes_gpu.page(_load("h200/shapes.json")),
    "long-prompts": lambda: long_prompts.page(_load("h200/long_prompts.json")),
    "train-moe": lambda: train_tables.families(_load("h200/train_moe.json")),
    "train-families": lambda: train_tables.families(_load("h200/train_families.json")),
    "serve-load": lambda: serve_load.page(_load("h200/serve_load.json")),
    "serve-load-sglang": lambda: serve_load.page(_load("h200/serve_load_sglang.json")),
    "serve-load-sglang-40": lambda: serve_load.page(_load("h200/serve_load_sglang_40.json")),
    "serve-load-prefixes": lambda: serve_load.page(_load("h200/serve_load_prefixes.json")),
    "serve-load-chats": lambda: serve_load.page(_load("h200/serve_load_chats.json")),
    "serve-load-before": lambda: serve_load.page(_load("h200/serve_load_before.json")),
    "serve-load-cpu": lambda: serve_load_cpu.page(_load("cpu/serve_load.json")),
    "engine-gpu-peers": lambda: engine_tables.peers_table(_load("h200/engine_peers.json")),
    "moe-decode": lambda: moe_tables.decode(_load("h200/moe_gpu.json")),
    "moe-products": lambda: moe_tables.products(_load("h200/moe_ops.json")),
    "decoder-layer": decoder_layer,
    "memory-bound": ops_tables.memory_bound,
    "memory-bound-short": ops_tables.memory_bound_short,
    "many-rows": ops_tables.many_rows,
    "many-rows-alone": ops_tables.many_rows_alone,
    "issue-rates": issue_rates_table,
    "ladder": ladder_tables.table,
    "structured-masks": lambda: structured_masks.table(_load("cpu/structured_masks.json")),
    "speculation-gpu": lambda: speculation.grid_table(_load("h200/speculation_grid.json")),
    "speculation-cpu": lambda: speculation.grid_table(_load("cpu/speculation_grid.json")),
    "speculation-bars": lambda: speculation.bars_table(
        {
            "planted acceptance, 8B shape, GPU": _load("h200/speculation_grid.json")["cells"],
            "planted acceptance, 135M, CPU": _load("cpu/speculation_grid.json")["cells"],
            "EAGLE-3 head, 135M, GPU": _load("h200/eagle.json")["heads"]["trained"],
            "EAGLE-3 head, 135M, CPU": _load("cpu/eagle.json")["heads"]["trained"],
        }
    ),
    "speculation-host": lambda: speculation_host.host_table(_load("cpu/speculation_host.json")),
    "speculation-tasks": lambda: speculation.tasks_table(_load("cpu/speculation_tasks.json")),
    "speculation-tasks-gpu": once_recorded(
        "h100/speculation_tasks.json", "benchmarks/engine/speculation.py tasks --deterministic", speculation.tasks_table
    ),
    "speculation-tasks-gpu-ordinary": lambda: speculation.tasks_table(_load("h200/speculation_tasks_ordinary.json")),
    "speculation-pair": once_recorded(
        "cpu/speculation_pair.json", "benchmarks/engine/speculation.py pair --draft DIRECTORY", speculation.pair_table
    ),
    "speculation-pair-gpu": once_recorded(
        "h100/speculation_pair.json", "benchmarks/engine/speculation.py pair --draft DIRECTORY", speculation.pair_table
    ),
    "adapters": lambda: adapters.table(_load("h200/adapters.json"), _load("h200/adapters_all_matrices.json")),
    "adapters-deterministic": lambda: adapters.table(_load("h200/adapters_deterministic.json")),
    "adapters-cpu": lambda: adapters.table(_load("cpu/adapters.json")),
    "eagle": lambda: eagle.eagle_table(_load("cpu/eagle.json")),
    "eagle-gpu": once_recorded(
        "h100/eagle.json", "benchmarks/engine/eagle.py measure --folder DIRECTORY --device cuda", eagle.eagle_table
    ),
    "rollout": lambda: rollout.rollout_table(_load("cpu/rollout.json")),
    "search-stopping": lambda: search_tables.stopping(_load("cpu/search_stopping.json")),
    "search": lambda: search_tables.tables(_recorded(*SEARCHES)),
    "jump-ahead": lambda: jump_ahead.table(_load("cpu/jump_ahead.json")),
    "beside-heavy-work": lambda: fair_sharing.beside_table(_load("cpu/fair_sharing.json")),
    "virtual-soak": lambda: virtual_soak.table(_load("cpu/virtual_soak.json")),
    "soak": once_recorded("cpu/soak.json", "benchmarks/server/soak.py --minutes 10 --window 30", soak.table),
    "soak-hour": once_recorded("cpu/soak_hour.json", "benchmarks/server/soak.py", soak.table),
    "server-threads": once_recorded(
        "cpu/server_threads.json", "benchmarks/server/engine_threads.py", engine_threads.table
    ),
    "beside-heavy-work-gpu": once_recorded("h200/turns.json", "benchmarks/server/turns_gpu.py", turns_gpu.table),
    "hostile-schemas": lambda: hostile_schemas.table(_load("cpu/hostile_schemas.json")),
    "explain-sums-gpu": lambda: explain_sums.table(_load("h200/explain_sums.json")),
    "worked-product": lambda: explain_tables.product(_load("h200/explain_matmul.json")),
    "explain-faults-cpu": lambda: explain_faults.table(_load("cpu/explain_faults.json")),
    "explain-programs-cpu": lambda: explain_programs.table(_load("cpu/explain_programs.json")),
    "explain-programs-strangers": lambda: explain_programs.table(_load("cpu/explain_programs_strangers.json")),
    "explain-programs-gpu": lambda: "\n".join(map(explain_programs.table, _everywhere("explain_programs", GPUS))),
    "explain-overhead": lambda: "\n".join(map(explain_overhead.table, _everywhere("explain_overhead"))),
    "explain-jobs": lambda: "\n".join(map(explain_jobs.table, _everywhere("explain_jobs"))),
    "explain-side-by-side": lambda: side_by_side.table(_load("cpu/explain_side_by_side.json")),
    "explain-faults-gpu": lambda: explain_faults.table(_load("h200/explain_faults.json")),
    "worked-gelu": lambda: explain_tables.gelu(_load("h200/explain_gelu.json")),
    "explain-apply-cpu": lambda: "".join(map(explain_apply.table, _recorded("cpu/explain_apply.json"))),
    "explain-apply-gpu": lambda: explain_apply.table(_load("h200/explain_apply.json")),
    "plan-validation-cpu": lambda: plan_validation.cpu_table(_load("cpu/plan_validation.json")),
    "plan-cells-h200": lambda: plan_cells.table(_load("h200/plan_cells.json")),
    "plan-clocked": lambda: plan_clocked.table(_load("cpu/plan_clocked.json")),
    "plan-validation-h200": lambda: plan_validation.h200_table(_load("h200/plan_validation.json")),
    "plan-speed": lambda: plan_validation.speed_table(_load("h200/plan_validation.json")),
    "plan-replicas": lambda: "".join(map(plan_replicas.table, _recorded("cpu/plan_replicas.json"))),
    "plan-fleet": lambda: plan_fleet.table(_load("cpu/plan_fleet.json")),
    "plan-fleet-arithmetic": lambda: plan_fleet.arithmetic(_load("cpu/plan_fleet.json")),
    "plan-fleet-memory": lambda: plan_fleet.memory_table(_load("cpu/plan_fleet.json")),
    "plan-scaling": lambda: plan_scaling.table(_load("cpu/plan_scaling.json")),
    "step-prediction-cpu": lambda: step_prediction.table(_load("cpu/step_prediction.json")),
    "worked-xor-gpu": lambda: explain_tables.xor_to_llm(_load("h200/explain_xor.json")),
    "worked-xor-cpu": lambda: explain_tables.xor_to_llm(_load("cpu/explain_xor.json")),
    "worked-generate": lambda: explain_tables.generate(_load("h200/explain_generate.json")),
    "worked-recommender": lambda: explain_tables.recommender(_load("h200/explain_recommender.json")),
    "explain-sums-cpu": lambda: explain_sums.table(_load("cpu/explain_sums.json")),
    "large-trace": lambda: large_trace.table(_load("cpu/large_trace.json")),
    "serving-steps": lambda: serving_steps.table(_load("h200/serving_steps.json")),
    "step-prediction": lambda: step_prediction.table(_load("h200/step_prediction.json")),
    "structured-cost": lambda: structured_cost.table(_load("h200/structured_cost.json")),
    "int4-variants": int4_variants,
    "grammars": lambda: grammars.table(_load("cpu/grammars.json")),
    "kills": kills,
    "serving-kills": serving_kills,
    "fail-over": fail_over,
    "fleet-settings": fleet_settings,
    "fleet-drills": fleet(cluster_tables.drills, "fleet_drills"),
    "fleet-predicted": fleet(cluster_tables.predicted, "fleet_predicted"),
    "ray-layer": fleet(cluster_tables.ray_layer, "ray_layer"),
    "two-hosts": fleet(cluster_tables.two_hosts, "two_hosts"),
    "data-formats": lambda: data_formats.rendered(_load("cpu/data_formats.json")),
    "structure": lambda: structure.table(_load("cpu/structure.json")),
    "speed-of-trees": lambda: speed_of_trees.table(_load("cpu/speed_of_trees.json")),
    "speed-of-trees-gpu": lambda: speed_of_trees.table(_load("h200/speed_of_trees.json")),
    "training-settings": training_settings,
    "flow-settings": flow_settings,
    "serving-settings": serving_settings,
    "capture-cost": capture_cost,
    "drift": drift,
    "environment-variables": environment_variables,
    "pretrain-published": pretrain_published,
    "pretrain-curve": pretrain(pretrain_tables.library_curve, "library"),
    "pretrain-kinds": pretrain(pretrain_tables.library_kinds, "library"),
    "pretrain-samples": pretrain(lambda result: pretrain_tables.samples(result, 6), "library"),
    "pretrain-race": pretrain(pretrain_tables.race, "race"),
    "train-offload": offload_tables.table,
    "train-gpu": gpu_training(train_tables.race),
    "train-gpu-before": gpu_training(train_tables.race, "train_before"),
    "train-gpu-memory": gpu_training(train_tables.memory),
    "train-parallel": lambda: train_tables.spread(*map(_load, TRAINED_ON_TWO)),
    "train-predicted": lambda: train_tables.predicted(*map(_load, TRAINED_ON_TWO)),
    "gpu-queue": lambda: gpu_queue.table(gpu_queue.queue()),
    "train-slow-links": lambda: train_tables.slow_links(_load("cpu/onebit.json")),
}


def rendered(text: str) -> str:
    """Replace the blocks of a page by the present results.

    Raises:
        KeyError: a block has no entry in ``BLOCKS``.
        FileNotFoundError: a block without a recorded result.
    """
    return BLOCK.sub(lambda match: match[1] + BLOCKS[match["name"]]() + match[3], text)


def main() -> int:
    stale = []
    for path in [*PAGES, SITE]:
        text = path.read_text()
        fresh = front.with_repo_url(text) if path == SITE else rendered(text)
        if fresh != text:
            stale.append(str(path.relative_to(record.ROOT)))
            if "--check" not in sys.argv:
                path.write_text(fresh)
    if stale and "--check" in sys.argv:
        print(f"not what the results say: {', '.join(stale)}; run python benchmarks/render.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
