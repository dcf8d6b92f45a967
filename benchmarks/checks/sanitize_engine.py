"""A short run of the GPU engine on a tiny model under compute-sanitizer's memcheck; exit 1 where it finds something.

    python benchmarks/checks/sanitize_engine.py [--tool memcheck]
    python benchmarks/checks/sanitize_engine.py --inside graphs|eager   the program that is watched

Once with CUDA graphs, and once launched kernel by kernel with a memory allocation for every tensor (torch's cache of
memory, which would hide an access just behind a tensor, is off).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

TINY = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 301,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 192,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
REQUESTS = 12


def inside(graphs: bool) -> None:
    """Run prompts of one to several blocks, decodes, every kind of sampling, a shared prefix, an abort."""
    from transect.engine.frontends.llm import LLM
    from transect.engine.scheduling.sampling_params import SamplingParams

    options = [
        {"temperature": 0.0},
        {"temperature": 0.7, "top_p": 0.9, "seed": 3},
        {"temperature": 1.0, "top_k": 20, "min_p": 0.02, "logprobs": 3},
        {"temperature": 0.8, "presence_penalty": 0.5, "repetition_penalty": 1.1, "logit_bias": {5: 1.0}},
        {"temperature": 0.0, "prompt_logprobs": 2, "n": 2},
    ]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(TINY))
        for deterministic in (False, True):
            llm = LLM(
                folder,
                load_format="dummy",
                max_model_len=256,
                max_num_seqs=8,
                max_num_batched_tokens=128,
                kv_cache_tokens=1024,
                cuda_graphs="lazy" if graphs else "off",
                deterministic=deterministic,
            )
            names = []
            for index in range(REQUESTS):
                prompt = [(index * 7 + i * i) % 301 if i > 20 else i for i in range(1 + 13 * index)]
                params = SamplingParams(max_tokens=6 + index % 5, ignore_eos=True, **options[index % len(options)])
                names.append(llm.submit(prompt, params))
            steps = 0
            while llm.has_work:
                llm.step()
                steps += 1
                if steps == 4:
                    llm.abort(names[-1])
            stats = llm.stats()
            assert stats.kv_blocks_used == 0 and not stats.finished["error"], stats
            way = "graphs" if graphs else "eager"
            print(f"{way}, deterministic {deterministic}: {steps} steps, {stats.generation_tokens} tokens", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", default="memcheck", help="memcheck, racecheck, synccheck or initcheck")
    parser.add_argument("--inside", choices=("graphs", "eager"))
    options = parser.parse_args()
    if options.inside is not None:
        inside(options.inside == "graphs")
        return 0
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if sanitizer is None:
        print("compute-sanitizer is not on the PATH: install the CUDA toolkit", file=sys.stderr)
        return 2
    run = [sys.executable, __file__, "--inside"]
    subprocess.run([*run, "eager"], check=True)  # kernels are compiled here, which would take long under the sanitizer
    command = [sanitizer, "--tool", options.tool, "--error-exitcode", "9", *run]
    cached = {"graphs": {}, "eager": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}}
    started = {way: subprocess.Popen([*command, way], env=os.environ | more) for way, more in cached.items()}
    worst = 0
    for way, process in started.items():
        code = process.wait()
        print(f"{options.tool}, {way}: exit {code}", flush=True)
        worst = max(worst, code)
    return 1 if worst else 0


if __name__ == "__main__":
    sys.exit(main())
