"""Answers of requests of all kinds, to compare engines with drafts and without."""

from transect import LLM, SamplingParams, StructuredOutputsParams

SETTINGS = {"dtype": "float32", "threads": 1, "num_kv_blocks": 60, "max_num_seqs": 24, "seed": 3}
FORM = StructuredOutputsParams(regex="([a-b]{3}-[0-9]{2};){6}")
OPTIONS = [
    {"temperature": 0.0},
    {"n": 2, "temperature": 1.0},
    {"temperature": 1.5, "logprobs": 2},
    {"temperature": 0.8, "repetition_penalty": 1.1, "frequency_penalty": 0.1},
    {"temperature": 1.0, "top_k": 30, "top_p": 0.9, "logit_bias": {65: 3.0}},
    {"temperature": 0.0, "min_tokens": 30, "stop_token_ids": [97]},
    {"temperature": 1.0, "structured_outputs": FORM, "ignore_eos": False},
]


def answers(llm: LLM):
    params = [SamplingParams(**{"max_tokens": 40, "seed": 1, "ignore_eos": True} | each) for each in OPTIONS]
    prompts = ["abcabcabcab", "Hello Hello Hello", "x1 x2 x3", "aaaa", "ababab", "zz", "q"]
    outputs = [*llm.generate(prompts, params), *llm.generate(prompts[0], params[0])]
    return [(c.token_ids, c.finish_reason, c.stop_reason, c.logprobs) for o in outputs for c in o.outputs]
