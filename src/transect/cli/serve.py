"""``transect serve``: the OpenAI-compatible server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .engine_options import (
    BUILTIN,
    AsyncScheduling,
    CudaGraphs,
    DependentLaunch,
    Deterministic,
    Device,
    DeviceSampling,
    Dtype,
    FillSteps,
    FusedOperators,
    GpuMemory,
    LoadFormat,
    MaxBatchedTokens,
    MaxMixedTokens,
    MaxModelLen,
    MaxNumSeqs,
    ModelArgument,
    Native,
    PrefixCaching,
    Threads,
    engine_config,
)

if TYPE_CHECKING:
    from ..engine.async_engine import AsyncEngine


def command(
    model: ModelArgument = BUILTIN,
    host: Annotated[str, typer.Option(help="Local address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for any free one.")] = 8000,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name that requests use; may be given again. Default: MODEL.")
    ] = None,
    api_key: Annotated[list[str] | None, typer.Option(help="Demand this key; may be given again.")] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="Demand one of the keys in this file, one a line (`ps` does not show them).")
    ] = None,
    max_queue: Annotated[int, typer.Option(min=1, help="Requests that may wait; more are answered with 429.")] = 256,
    request_timeout: Annotated[float | None, typer.Option(help="Seconds that a request may take in all.")] = None,
    max_body_bytes: Annotated[int, typer.Option(help="Longest request body.")] = 8 * 1024 * 1024,
    tool_call_parser: Annotated[
        str, typer.Option(help="Form of tool calls: hermes, llama3_json, mistral, generic; auto asks the template.")
    ] = "auto",
    reasoning_parser: Annotated[
        str | None, typer.Option(help="How thoughts are marked: deepseek_r1, qwen3, mistral. Default: they are text.")
    ] = None,
    hung_after: Annotated[
        float | None, typer.Option(help="Seconds of silence after which /health calls the engine hung.")
    ] = None,
    grace: Annotated[float, typer.Option(min=0, help="Seconds for running requests after SIGTERM.")] = 30.0,
    load_format: LoadFormat = "auto",
    device: Device = "auto",
    deterministic: Deterministic = False,
    gpu_memory_utilization: GpuMemory = None,
    cuda_graphs: CudaGraphs = None,
    async_scheduling: AsyncScheduling = None,
    fused_operators: FusedOperators = True,
    dependent_launch: DependentLaunch = True,
    device_sampling: DeviceSampling = True,
    dtype: Dtype = "auto",
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxBatchedTokens = None,
    max_mixed_tokens: MaxMixedTokens = None,
    fill_steps: FillSteps = None,
    kv_cache_tokens: Annotated[int | None, typer.Option(min=16, help="Tokens that the KV cache holds.")] = None,
    prefix_caching: PrefixCaching = True,
    threads: Threads = None,
    native: Native = None,
) -> int:
    """Serve a model over HTTP as OpenAI's API does. Ends on SIGTERM when running requests are done."""
    import asyncio

    from ..engine.async_engine import AsyncEngine
    from ..server.process import bind, serve, url_of
    from ..server.serving import ServerOptions

    names = tuple(served_model_name or (model,))
    options = ServerOptions(
        model_names=names,
        api_keys=(*(api_key or ()), *keys_in(api_key_file)),
        max_body_bytes=max_body_bytes,
        request_timeout_s=request_timeout,
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
        max_prompts=min(max_queue, ServerOptions.max_prompts),  # more would never fit, however often they came back
    )
    sock = bind(host, port)
    config = engine_config(
        model,
        load_format=load_format,
        device=device,
        deterministic=deterministic,
        gpu_memory_utilization=gpu_memory_utilization,
        cuda_graphs=cuda_graphs,
        async_scheduling=async_scheduling,
        fused_operators=fused_operators,
        dependent_launch=dependent_launch,
        device_sampling=device_sampling,
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_mixed_tokens=max_mixed_tokens,
        fill_steps=fill_steps,
        kv_cache_tokens=kv_cache_tokens,
        enable_prefix_caching=prefix_caching,
        max_queue=max_queue,
        hung_after_s=hung_after,
        threads=threads,
        native=native,
    )

    print(f"transect: loading {model}", file=sys.stderr, flush=True)

    def ready(engine: AsyncEngine) -> None:
        info = engine.info
        print(
            f"transect: ready on {url_of(sock)} | model {names[0]} | context {info.max_model_len} tokens"
            f" | KV cache {info.kv_tokens} tokens | {info.kernels} | loaded in {info.load_seconds:.1f} s | {config}",
            flush=True,
        )

    return asyncio.run(serve(lambda: AsyncEngine.start(config), options, sock, grace_s=grace, ready=ready))


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
