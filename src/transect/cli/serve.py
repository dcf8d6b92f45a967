"""``transect serve``: the OpenAI-compatible server."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .engine_options import (
    BUILTIN,
    Adapter,
    ChatTemplateText,
    CheckPlans,
    DataParallel,
    DecisionLog,
    FillSteps,
    GenerationConfig,
    JumpAhead,
    MaxBatchedTokens,
    MaxMixedTokens,
    MaxModelLen,
    MaxNumSeqs,
    ModelArgument,
    OverrideGenerationConfig,
    PrefixCaching,
    Revision,
    SpeculativeSettings,
    TokenizerName,
    TokenizerRevision,
    engine_config,
    how_it_runs,
    takes,
    where_it_runs,
)
from .settings import ARGUMENTS, ConfigFile

if TYPE_CHECKING:
    from ..engine.config import EngineConfig
    from ..engine.frontends.async_engine import AsyncEngine

REREADS = "transect.rereads"
"""Key of a context's ``meta``: a list that gets the configuration, in place of a server that starts."""


@takes(where_it_runs, how_it_runs)
def command(
    context: typer.Context,
    model: ModelArgument = BUILTIN,
    host: Annotated[str, typer.Option(help="Local address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for any free one.")] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="Name that requests use; may be given again. Default: MODEL."),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="Demand this key; may be given again.", envvar="TRANSECT_API_KEY"),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="Demand one of the keys in this file, one a line (`ps` does not show them)."),
    ] = None,
    max_queue: Annotated[int, typer.Option(min=1, help="Requests that may wait; more are answered with 429.")] = 256,
    request_timeout: Annotated[float | None, typer.Option(help="Seconds that a request may take in all.")] = None,
    max_body_bytes: Annotated[int, typer.Option(help="Longest request body.")] = 8 * 1024 * 1024,
    max_connections: Annotated[
        int | None, typer.Option(min=1, help="Clients connected at the same time. Default: what `ulimit -n` allows.")
    ] = None,
    receive_timeout: Annotated[
        float, typer.Option(help="Seconds for the head of a request, and the beginning of its body, to arrive.")
    ] = 20.0,
    keep_alive: Annotated[
        int, typer.Option(min=0, help="Seconds that a connection stays open after an answer, for the next request.")
    ] = 5,
    tool_call_parser: Annotated[
        str, typer.Option(help="Form of tool calls: hermes, qwen3_coder, mistral_v11 ...; auto asks the template.")
    ] = "auto",
    reasoning_parser: Annotated[
        str,
        typer.Option(help="How thoughts are marked: qwen3, mistral ...; auto asks the template; none: they are text."),
    ] = "auto",
    hung_after: Annotated[
        float | None,
        typer.Option(
            help="Seconds of silence after which an engine is hung: /health says so, or another replica takes over. "
            "[default: 60, or 20 with replicas]"
        ),
    ] = None,
    fail_over: Annotated[
        bool,
        typer.Option(help="With --data-parallel-size: replicas continue the answers of one that has ended."),
    ] = True,
    drain_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds for the streams of replaced engines after `transect reload`.")
    ] = 60.0,
    grace: Annotated[float, typer.Option(min=0, help="Seconds for running requests after SIGTERM.")] = 30.0,
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(
            help="Origin of web pages that may ask; may be given again, or a JSON list; '' for none.  [default: *]"
        ),
    ] = None,
    allowed_methods: Annotated[list[str] | None, typer.Option(help="Methods of their requests.  [default: *]")] = None,
    allowed_headers: Annotated[list[str] | None, typer.Option(help="Headers of their requests.  [default: *]")] = None,
    allow_credentials: Annotated[bool, typer.Option("--allow-credentials", help="They may send cookies.")] = False,
    uds: Annotated[str | None, typer.Option(help="Listen on this Unix socket, not on --host and --port.")] = None,
    root_path: Annotated[str, typer.Option(help="Where a proxy shows this server: /llm.")] = "",
    ssl_certfile: Annotated[str | None, typer.Option(help="Speak TLS with this certificate (PEM).")] = None,
    ssl_keyfile: Annotated[str | None, typer.Option(help="Its key (PEM), if that is in a file of its own.")] = None,
    request_log: Annotated[
        str, typer.Option(help="A line for each request on standard error: off, text or json. No texts are logged.")
    ] = "off",
    log_level: Annotated[
        str, typer.Option(help="Lines of this level and above: debug, info, warning (4xx) or error (5xx).")
    ] = "info",
    otlp_traces_endpoint: Annotated[
        str | None,
        typer.Option(help="Send OpenTelemetry spans of requests there: http://HOST:4318 or grpc://HOST:4317."),
    ] = None,
    revision: Revision = None,
    adapter: Adapter = None,
    enable_lora: Annotated[bool, typer.Option("--enable-lora", help="As in vLLM, before --lora-modules.")] = False,
    lora_modules: Annotated[
        list[str] | None, typer.Option(help="NAME=DIR: --adapter DIR, served as NAME. One, for all requests.")
    ] = None,
    tokenizer: TokenizerName = None,
    tokenizer_revision: TokenizerRevision = None,
    chat_template: ChatTemplateText = None,
    generation_config: GenerationConfig = "auto",
    override_generation_config: OverrideGenerationConfig = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxBatchedTokens = None,
    max_mixed_tokens: MaxMixedTokens = None,
    fill_steps: FillSteps = None,
    itl_target: Annotated[
        str | None,
        typer.Option(
            help="Milliseconds that a step may take while others stream; auto: 2.5 times what their tokens take; off. "
            "[default: auto, unless --max-mixed-tokens or --fill-steps is given]"
        ),
    ] = None,
    kv_cache_tokens: Annotated[int | None, typer.Option(min=16, help="Tokens that the KV cache holds.")] = None,
    prefix_caching: PrefixCaching = True,
    jump_ahead: JumpAhead = True,
    speculative_config: SpeculativeSettings = None,
    decision_log: DecisionLog = None,
    data_parallel_size: DataParallel = 1,
    check_plans: CheckPlans = False,
    config: ConfigFile = None,
    **engine_settings: Any,
) -> int:
    """Serve a model over HTTP as OpenAI's API does. Ends on SIGTERM when running requests are done."""
    import asyncio

    from ..engine.frontends.replicas import Replicas, start_engines
    from ..parallel.gathering import under_torchrun
    from ..server.operations.request_log import configure
    from ..server.process import bind, bind_unix, serve, url_of
    from ..server.serving import ServerOptions

    adapted_as, adapter = lora_module(lora_modules or [], enable_lora, adapter, served_model_name)
    names = tuple(served_model_name or (adapted_as or model,))
    options = ServerOptions(
        model_names=names,
        api_keys=(*(api_key or ()), *keys_in(api_key_file)),
        max_body_bytes=max_body_bytes,
        request_timeout_s=request_timeout,
        max_connections=max_connections,
        receive_timeout_s=receive_timeout,
        keep_alive_s=keep_alive,
        allowed_origins=listed(allowed_origins, "--allowed-origins"),
        allowed_methods=listed(allowed_methods, "--allowed-methods"),
        allowed_headers=listed(allowed_headers, "--allowed-headers"),
        allow_credentials=allow_credentials,
        root_path=root_path,
        ssl_certfile=ssl_certfile,
        ssl_keyfile=ssl_keyfile,
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
        otlp_traces_endpoint=otlp_traces_endpoint,
        max_prompts=min(max_queue, ServerOptions.max_prompts),  # more would never fit, however often they came back
    )
    follows = under_torchrun() and os.environ["RANK"] != "0"
    rereads = context.meta.get(REREADS)
    if rereads is None:
        configure(request_log, log_level)  # type: ignore[arg-type]
        sock = None if follows else (bind(host, port) if uds is None else bind_unix(uds))
    settings = engine_config(
        model,
        **engine_settings,
        revision=revision,
        adapter=adapter,
        tokenizer=tokenizer,
        tokenizer_revision=tokenizer_revision,
        chat_template=chat_template,
        generation_config=generation_config,
        override_generation_config=override_generation_config,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_mixed_tokens=max_mixed_tokens,
        fill_steps=fill_steps,
        itl_target=itl_target,
        kv_cache_tokens=kv_cache_tokens,
        enable_prefix_caching=prefix_caching,
        jump_ahead=jump_ahead,
        speculative_config=speculative_config,
        decision_log=decision_log,
        max_queue=max_queue,
        hung_after_s=hung_after,
        data_parallel_size=data_parallel_size,
        check_plans=check_plans,
        fail_over=fail_over,
    )
    if rereads is not None:
        rereads.append((settings, drain_timeout))
        return 0
    if follows:
        from ..engine.ranks import follow_rank_0

        follow_rank_0(settings)
        return 0
    assert sock is not None

    print(f"transect: loading {model}", file=sys.stderr, flush=True)

    def ready(engine: AsyncEngine) -> None:
        info = engine.info
        said = (
            f"transect: ready on {url_of(sock, 'http' if ssl_certfile is None else 'https')}",
            f"model {names[0]}",
            f"context {info.max_model_len} tokens",
            f"KV cache {info.kv_tokens} tokens" + (f" x {replicas}" if (replicas := data_parallel_size) > 1 else ""),
            info.kernels,
            str(engine.sampling_defaults),
            f"loaded in {info.load_seconds:.1f} s",
            str(settings),
        )
        print(" | ".join(filter(None, said)), flush=True)

    async def reload(engine: Any) -> None:
        if not isinstance(engine, Replicas):
            raise ValueError("an engine whose ranks share experts cannot be replaced while it runs: restart the server")
        await engine.reload(*reread(context))

    def start() -> Any:
        return start_engines(settings, replaceable=True)

    # Of a closed terminal SIGHUP means the end, as ever.
    again = None if sys.stdin is not None and sys.stdin.isatty() else reload
    try:
        return asyncio.run(serve(start, options, sock, grace_s=grace, ready=ready, reload=again))
    finally:
        if uds is not None:
            Path(uds).unlink(missing_ok=True)


def reread(context: Any) -> tuple[EngineConfig, float]:
    """The configuration of the engine, and ``--drain-timeout``, as the command line, the environment and the file of
    ``--config`` say them now.

    Raises:
        ValueError: they are at fault.
    """
    found: list[tuple[EngineConfig, float]] = []
    fresh = context.command.make_context(context.info_name, list(context.meta[ARGUMENTS]), parent=context.parent)
    fresh.meta[REREADS] = found
    with fresh:
        context.command.invoke(fresh)
    return found[0]


def lora_module(
    modules: list[str], enabled: bool, adapter: str | None, names: list[str] | None
) -> tuple[str | None, str | None]:
    """vLLM's ``--lora-modules`` as the name to serve under and the adapter, or ``adapter`` under no name of its own.

    Raises:
        ValueError: several adapters, which are not served together, or options that contradict each other.
    """
    if not modules:
        if enabled and adapter is None:
            raise ValueError("--enable-lora loads nothing by itself: give --lora-modules NAME=DIR, or --adapter DIR")
        return None, adapter
    if len(modules) > 1 or adapter is not None:
        given = f"--lora-modules names {len(modules)}" if len(modules) > 1 else "--adapter names another"
        raise ValueError(
            f"{given}, and only one adapter at a time is served, for all requests: start a server for each of them, or "
            "merge them into models of their own with `transect export --merge`"
        )
    if modules[0].startswith("{"):
        from .engine_options import json_object

        module = json_object(modules[0], "--lora-modules")
        name, path = module.get("name"), module.get("path")
    else:
        name, _, path = modules[0].partition("=")
    if not (isinstance(name, str) and isinstance(path, str) and name and path):
        raise ValueError(f"--lora-modules takes NAME=DIR, not {modules[0]!r}")
    if names:
        raise ValueError(
            f"--served-model-name would be the model without the adapter, which is not served beside {name}: leave it "
            "out, or give --adapter in place of --lora-modules"
        )
    return name, path


def listed(values: list[str] | None, option: str) -> tuple[str, ...]:
    """The values of an option that may be given again, be a JSON list (as vLLM has it), or be empty; none given: ``*``.

    Raises:
        ValueError: what begins as a JSON list is none.
    """
    if values is None:
        return ("*",)
    found: list[str] = []
    for value in values:
        if value.startswith("["):
            import json

            try:
                found.extend(map(str, json.loads(value)))
            except ValueError as error:
                raise ValueError(f"{option} {value!r} is not a JSON list ({error})") from None
        elif value:
            found.append(value)
    return tuple(found)


def keys_in(path: Path | None) -> list[str]:
    """The API keys in a file, one a line; none without a file.

    Raises:
        ValueError: it cannot be read, or holds none.
    """
    if path is None:
        return []
    try:
        keys = [line.strip() for line in path.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"--api-key-file {path} cannot be read ({error}): give a text file with one key a line"
        ) from None
    if not keys:
        raise ValueError(f"--api-key-file {path} holds no key: write one a line, or leave the option out")
    return keys
