"""Random schemas through the whole engine: what comes to an end is valid, and the pieces of a stream are all of it."""

import json

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_schemas import SCHEMAS
from tiny_llm import save_tiny_llm

from transect import LLM, SamplingParams, StructuredOutputsParams
from transect.text.output_processor import OutputProcessor


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """One that draws every token, and one that plans ahead and jumps over forced tokens."""
    directory = tmp_path_factory.mktemp("tiny")
    save_tiny_llm(directory, max_position_embeddings=512)
    common = {"dtype": "float32", "native": False, "threads": 1, "max_num_seqs": 4, "num_kv_blocks": 64}
    return [LLM(str(directory), async_scheduling=on, jump_ahead=on, **common) for on in (False, True)]


def streamed(llm, params):
    """Text in the pieces that a client gets, and how it ended."""
    processor = OutputProcessor(llm.tokenizer)
    name = llm.submit([5, 6], params)
    processor.add(name, None, [5, 6], n=1)
    pieces, reason = [], None
    while llm.has_work:
        for output in llm.step():
            update = processor.process(output)
            pieces.append(update.text)
            reason = update.finish_reason or reason
    return pieces, reason


def answers_validate(engines, schema, seed):
    form = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    params = SamplingParams(max_tokens=200, seed=seed, structured_outputs=form)
    try:
        (choice,) = engines[0].generate([[5, 6]], params)[0].outputs
    except ValueError as error:
        assert str(error).startswith("structured_outputs cannot be used: ")
        return
    pieces, reason = streamed(engines[1], params)
    assert ("".join(pieces), reason) == (choice.text, choice.finish_reason)
    if reason == "stop":
        jsonschema.validate(json.loads(choice.text), schema)


@settings(max_examples=8, suppress_health_check=list(HealthCheck), print_blob=True, deadline=None, derandomize=True)
@given(SCHEMAS, st.integers(0, 2**32))
def test_a_few_random_schemas(engines, schema, seed):
    answers_validate(engines, schema, seed)


@pytest.mark.prove
@settings(max_examples=1000, suppress_health_check=list(HealthCheck), print_blob=True, deadline=None)
@given(SCHEMAS, st.integers(0, 2**32))
def test_a_thousand_random_schemas(engines, schema, seed):
    answers_validate(engines, schema, seed)
