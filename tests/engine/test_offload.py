"""Layers that stream give the tokens of a model that is all there: every dense family, from host memory and a file."""

import dataclasses

import pytest
import torch
from tiny_checkpoints import FAMILIES, make_model
from tiny_llm import save_tiny_llm_text

from transect import LLM, SamplingParams
from transect.engine import offload
from transect.engine.config import EngineConfig
from transect.models.config_hf import read_config  # noqa: F401

SETTINGS = {
    "dtype": "float32", "native": False, "num_kv_blocks": 96, "threads": 1, "max_num_seqs": 16, "seed": 11,
    "block_size": 4,
}  # fmt: skip
