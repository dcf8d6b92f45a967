"""``transect serve``: the OpenAI-compatible server."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..engine.executors.gpu.options import GPUOptions
from ..server.options import ServerOptions
from ..spec.settings import settings_of
from .engine_options import BUILTIN, HOW_IT_RUNS, ModelArgument, engine_config, engine_settings, takes
from .settings import WORDS, ConfigFile

if TYPE_CHECKING:
    from ..engine.config import EngineConfig
    from ..engine.frontends.async_engine import AsyncEngine


REREADS = "transect.rereads"
"""Key of a context's ``meta``: a list that receives the configuration instead of starting a server."""
NO_OPTIONS = (
    *("eos_token_ids", "batching", "longest_first", "first_device", "decisions", "max_prompts"),
    *(each.name for each in settings_of(GPUOptions) if each.name not in HOW_IT_RUNS),
)
"""Settings for programs, tests and benchmarks."""
ENGINE = engine_settings(without=("model", *NO_OPTIONS))
SERVER = tuple(each for each in settings_of(ServerOptions) if each.name not in NO_OPTIONS)


@takes(*SERVER, *ENGINE, max_queue_bytes=512 * 2**20, max_queue_wait=120.0)
def command(
    context: typer.Context,
    model: ModelArgument = BUILTIN,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="Require a key from this file: one per line, or JSON lines with key, "
            "name, weight, requests_per_minute, tokens_per_minute, parallel.",
            rich_help_panel="Server",
        ),
    ] = None,
    config: ConfigFile = None,
    **settings: Any,
) -> int:
    """Serve a model through an OpenAI-compatible HTTP API. SIGTERM lets running requests finish."""
    import asyncio

    from ..engine.frontends.replicas import Replicas, start_engines
    from ..hardware.cores import confine
    from ..parallel.gathering import under_torchrun
    from ..server.hand_over import Inherited, Successor
    from ..server.http.clients import keys_in
    from ..server.operations.request_log import configure
    from ..server.process import abandoned, bind, bind_unix, serve, url_of

    names = settings.pop("model_names")
    given = {each.name: settings.pop(each.name) for each in SERVER if each.name in settings}
    given = {name: value for name, value in given.items() if value is not None}
    options = ServerOptions(
        **given | {"api_keys": (*given.get("api_keys", ()), *(keys_in(api_key_file) if api_key_file else ()))},
        model_names=names or (model,),
        # More prompts than may wait would never fit, however often they came back.
        max_prompts=min(settings["max_queue"] or ServerOptions.max_prompts, ServerOptions.max_prompts),
    )
    if (options.lora_modules or options.allowed_lora_dir) and not settings["enable_lora"]:
        raise ValueError("--lora-modules and --allowed-lora-dir serve adapters beside the model: add --enable-lora")
    rereads = context.meta.get(REREADS)
    if rereads is not None:
        rereads.append((engine_config(model, **settings), options.drain_timeout_s))
        return 0
    configure(options.request_log, options.log_level)
    follows = under_torchrun() and os.environ["RANK"] != "0"
    uds = options.uds
    inherited = Inherited()
    sock = None if follows else inherited.listening()
    if sock is None and not follows:
        sock = bind(options.host, options.port) if uds is None else bind_unix(uds)
    engine_settings = engine_config(model, **settings)
    if follows:
        from ..engine.ranks import follow_rank_0

        follow_rank_0(engine_settings)
        return 0
    assert sock is not None
    listening = sock

    print(f"transect: loading {model}", file=sys.stderr, flush=True)

    def ready(engine: AsyncEngine) -> None:
        info, replicas = engine.info, engine_settings.data_parallel_size
        url = url_of(sock, "http" if options.ssl_certfile is None else "https")
        said = (
            f"transect: ready on {url}",
            f"page {url}/" if options.page and uds is None else "",
            f"model {options.model_names[0]}",
            f"context {info.max_model_len} tokens",
            f"KV cache {info.kv_tokens} tokens" + (f" x {replicas}" if replicas > 1 else ""),
            info.kernels,
            str(engine.sampling_defaults),
            f"loaded in {info.load_seconds:.1f} s",
            str(engine_settings),
        )
        print(" | ".join(filter(None, said)), flush=True)
        inherited.say_ready()

    async def reload(engine: Any) -> None:
        if not isinstance(engine, Replicas):
            raise ValueError("an engine whose ranks share experts cannot be replaced while it runs: restart the server")
        await engine.reload(*reread(context))
        confine(engine.info.cores_left)

    async def start() -> Any:
        engine = await start_engines(engine_settings, replaceable=True)
        confine(engine.info.cores_left)
        return engine

    def restart() -> Successor:
        return Successor(listening)

    # Of a closed terminal SIGHUP means the end, as ever.
    again = None if sys.stdin is not None and sys.stdin.isatty() else reload
    alone = not under_torchrun()
    try:
        restarting = restart if alone else None
        return asyncio.run(
            serve(start, options, sock, ready=ready, reload=again, restart=restarting, held=inherited.held)
        )
    finally:
        if uds is not None and abandoned(uds):  # else a successor listens there
            Path(uds).unlink(missing_ok=True)


def reread(context: Any) -> tuple[EngineConfig, float]:
    """Read the engine's configuration and ``--drain-timeout`` again, from the command line, the environment and the
    file of ``--config``.

    Raises:
        ValueError: they are at fault.
    """
    found: list[tuple[EngineConfig, float]] = []
    fresh = context.command.make_context(context.info_name, list(context.meta[WORDS]), parent=context.parent)
    fresh.meta[REREADS] = found
    with fresh:
        context.command.invoke(fresh)
    return found[0]
