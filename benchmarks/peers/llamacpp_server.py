"""``llama_cpp.server`` of llama-cpp-python, which answers one request after another."""

from __future__ import annotations

from benchmarks.peers.peer import CONTEXT, Server


def llamacpp_server(python: str, path: str) -> Server:
    """Return the server of the GGUF file ``path``; ``python`` is an interpreter that has llama-cpp-python[server]."""

    def command(model: str, threads: int, port: int) -> list[str]:
        told = [python, "-m", "llama_cpp.server", "--model", path, "--port", str(port), "--n_ctx", str(CONTEXT)]
        told += ["--n_threads", str(threads), "--n_threads_batch", str(threads)]
        return [*told, "--interrupt_requests", "false", "--verbose", "false"]

    return Server("llama.cpp", command)
