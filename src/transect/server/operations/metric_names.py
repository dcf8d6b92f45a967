"""Metrics as they are shown: with the model's name as a label, and a second time under the names that vLLM gave them.

Boards and alerts that were made for vLLM find what they ask for. A name of vLLM's stands for the same thing here; what
has no counterpart is not shown under it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import Metric
from prometheus_client.samples import Sample

VLLM_NAMES: dict[str, tuple[str, ...]] = {
    "transect_sequences_running": ("vllm:num_requests_running",),
    "transect_requests_waiting": ("vllm:num_requests_waiting",),
    "transect_kv_cache_usage_ratio": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "transect_preemptions": ("vllm:num_preemptions",),
    "transect_prefix_cache_query_tokens": ("vllm:prefix_cache_queries", "vllm:gpu_prefix_cache_queries"),
    "transect_prefix_cache_hit_tokens": ("vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits"),
    "transect_draft_tokens": ("vllm:spec_decode_num_draft_tokens",),
    "transect_accepted_tokens": ("vllm:spec_decode_num_accepted_tokens",),
    "transect_accepted_tokens_per_position": ("vllm:spec_decode_num_accepted_tokens_per_pos",),
    "transect_prompt_tokens": ("vllm:prompt_tokens",),
    "transect_generation_tokens": ("vllm:generation_tokens",),
    "transect_choices_finished": ("vllm:request_success",),
    "transect_time_to_first_token_seconds": ("vllm:time_to_first_token_seconds",),
    "transect_inter_token_latency_seconds": (
        "vllm:inter_token_latency_seconds",
        "vllm:time_per_output_token_seconds",
    ),
    "transect_request_latency_seconds": ("vllm:e2e_request_latency_seconds",),
    "transect_queue_time_seconds": ("vllm:request_queue_time_seconds",),
    "transect_prefill_time_seconds": ("vllm:request_prefill_time_seconds",),
    "transect_decode_time_seconds": ("vllm:request_decode_time_seconds",),
    "transect_inference_time_seconds": ("vllm:request_inference_time_seconds",),
    "transect_request_time_per_output_token_seconds": ("vllm:request_time_per_output_token_seconds",),
    "transect_request_choices": ("vllm:request_params_n",),
    "transect_request_max_tokens": ("vllm:request_params_max_tokens",),
    "transect_request_prompt_tokens": ("vllm:request_prompt_tokens",),
    "transect_request_generation_tokens": ("vllm:request_generation_tokens",),
    "transect_request_longest_generation_tokens": ("vllm:request_max_num_generation_tokens",),
}
VLLM_LABELS = {"finish_reason": "finished_reason"}


def shown(families: Iterable[Metric], model_name: str) -> Iterator[Metric]:
    """Yield the families with the label ``model_name``, each followed by copies under vLLM's names, if it has any."""
    for family in families:
        yield _renamed(family, family.name, {}, {"model_name": model_name})
        for name in VLLM_NAMES.get(family.name, ()):
            yield _renamed(family, name, VLLM_LABELS, {"model_name": model_name, "engine": "0"})


def _renamed(family: Metric, name: str, labels: dict[str, str], more: dict[str, str]) -> Metric:
    made = Metric(name, family.documentation, family.type, family.unit if name == family.name else "")
    for sample in family.samples:
        made.samples.append(
            Sample(
                name + sample.name.removeprefix(family.name),
                {**{labels.get(key, key): value for key, value in sample.labels.items()}, **more},
                sample.value,
                sample.timestamp,
                sample.exemplar,
            )
        )
    return made
