"""Training, alone and with others: ``adamw``, ``lora``, ``ring_all_reduce``, ``pipeline_schedule``, ``zero``."""
