"""Families of models: one file each, with the family's ``Family`` record, and what the records are made of.

* ``family.py``: ``Family``, and ``Part`` of a file; ``registry.py``: all of them, found in this folder
* ``config_json.py``: keys of ``config.json``; ``gguf_keys.py``: of GGUF files; ``names.py``: of tensors
* ``llama.py``, ``mistral.py``, ``qwen2.py``, ``qwen3.py``, ``phi3.py``, ``granite.py``, ``smollm3.py``, ``olmo2.py``,
  ``gemma2.py``, ``gemma3.py``, ``gpt2.py``
* with experts: ``mixtral.py``, ``qwen2_moe.py``, ``qwen3_moe.py``, ``olmoe.py``, ``dots1.py``, ``gpt_oss.py``,
  ``llama4.py``
"""
