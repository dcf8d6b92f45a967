"""``LLM`` end to end: on a tiny random model through plain torch, and on the real SmolLM2."""

import math
import signal

import pytest
import torch
import transformers
from tiny_llm import CONTEXT, EOS, VOCAB, greedy_tokens, save_tiny_llm

from transect import LLM, SamplingParams
from transect.text.chat_template import ChatTemplate
from transect.text.template_worker import TemplateApart, TemplateWorker

torch.set_num_threads(1)
PROMPTS = [[5, 6, 7], list(range(40, 90)), [1], [9] * 33, list(range(100, 117))]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    return directory, save_tiny_llm(directory)


def make(tiny, **settings):
    settings = {"dtype": "float32", "native": False, "num_kv_blocks": 96, "threads": 1, "max_num_seqs": 16} | settings
    return LLM(str(tiny[0]), **settings)


@pytest.fixture(scope="module")
def llm(tiny):
    return make(tiny)


def greedy(max_tokens=12, **params):
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **params)


def tokens_of(results):
    return [[choice.token_ids for choice in result.outputs] for result in results]


# What comes out -----------------------------------------------------------------------------------------------------


def test_greedy_tokens_are_those_of_transformers(tiny, llm):
    expected = [[greedy_tokens(tiny[1], prompt, 12)] for prompt in PROMPTS]
    results = llm.generate(PROMPTS, greedy())
    assert tokens_of(results) == expected
    assert [result.prompt_token_ids for result in results] == PROMPTS
    assert all(result.finished and result.outputs[0].finish_reason == "length" for result in results)


IN_MANY_WAYS = [
    greedy(40, logprobs=3),
    SamplingParams(seed=3, max_tokens=40, ignore_eos=True, top_p=0.9),
    SamplingParams(seed=4, max_tokens=40, ignore_eos=True, temperature=1.5, frequency_penalty=0.5),
    SamplingParams(seed=5, n=3, max_tokens=20, top_k=20, min_p=0.01),
    SamplingParams(seed=6, n=2, max_tokens=30, min_tokens=25, repetition_penalty=1.2, logprobs=0),
]


@pytest.fixture(scope="module")
def alone(llm):
    """The tokens of each request when it runs by itself."""
    return tokens_of(llm.generate([prompt], each)[0] for prompt, each in zip(PROMPTS, IN_MANY_WAYS, strict=True))


@pytest.mark.parametrize(
    "settings",
    [
        {"async_scheduling": True},
        {"block_size": 4, "num_kv_blocks": 40, "max_model_len": 128},  # so few blocks that sequences are preempted
        {"max_num_batched_tokens": 16, "enable_prefix_caching": False},
        {"batching": "static", "max_num_seqs": 3},
        {"async_scheduling": True, "block_size": 4, "num_kv_blocks": 40, "max_model_len": 128},
    ],
)
def test_tokens_do_not_depend_on_how_the_engine_runs(tiny, alone, settings):
    """Other batches, chunks, preemptions and lag; and every slot of the cache that nobody wrote holds NaN."""
    other = make(tiny, **settings)
    other._core.executor._k_cache.fill_(math.nan)
    other._core.executor._v_cache.fill_(math.nan)
    together = other.generate(PROMPTS, IN_MANY_WAYS)
    assert tokens_of(together) == alone
    if settings.get("num_kv_blocks"):
        assert other.stats().preemptions > 0
    stats = other.stats()
    assert stats.kv_blocks_used == 0 and stats.running == 0 and stats.waiting == 0


def test_repeated_prompts_come_from_the_prefix_cache_with_the_same_tokens(llm):
    prompt = list(range(60, 130))
    first, second = (llm.generate([prompt], greedy())[0] for _ in range(2))
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    assert second.num_cached_tokens == 64


def test_the_prefix_cache_can_be_forgotten(llm):
    prompt = list(range(70, 140))
    assert llm.generate([prompt], greedy())[0].num_cached_tokens == 0
    llm.reset_prefix_cache()
    assert llm.generate([prompt], greedy())[0].num_cached_tokens == 0


def test_seeds_repeat_and_choices_differ(llm):
    params = SamplingParams(n=3, seed=11, max_tokens=16, ignore_eos=True)
    first, second = (llm.generate([PROMPTS[1]], params)[0] for _ in range(2))
    assert tokens_of([first]) == tokens_of([second])
    assert len({tuple(choice.token_ids) for choice in first.outputs}) == 3
    assert [choice.index for choice in first.outputs] == [0, 1, 2]
    unseeded = [llm.generate([PROMPTS[1]], params.with_(seed=None))[0] for _ in range(2)]
    assert tokens_of(unseeded[:1]) != tokens_of(unseeded[1:])


def test_logprobs_and_prompt_logprobs_are_of_the_full_forward(tiny, llm):
    prompt = PROMPTS[1]
    params = greedy(6, logprobs=4, prompt_logprobs=2)
    result = llm.generate([prompt], params)[0]
    choice = result.outputs[0]
    with torch.no_grad():
        everything = torch.tensor([prompt + choice.token_ids])
        expected = torch.log_softmax(tiny[1](everything).logits[0].double(), -1)
    assert result.prompt_logprobs[0] is None and len(result.prompt_logprobs) == len(prompt)
    for position in range(1, len(prompt)):
        entry = result.prompt_logprobs[position]
        assert prompt[position] in entry and len(entry) in (2, 3)
        for token, logprob in entry.items():
            assert logprob.logprob == pytest.approx(float(expected[position - 1, token]), abs=1e-4)
    for offset, (token, entry) in enumerate(zip(choice.token_ids, choice.logprobs, strict=True)):
        row = expected[len(prompt) - 1 + offset]
        assert list(entry) == row.topk(4).indices.tolist()
        assert entry[token].rank == 1
        assert entry[token].logprob == pytest.approx(float(row[token]), abs=1e-4)
    total = sum(entry[token].logprob for token, entry in zip(choice.token_ids, choice.logprobs, strict=True))
    assert choice.cumulative_logprob == pytest.approx(total)


def test_prompt_logprobs_survive_chunks_and_the_prefix_cache(tiny, llm):
    params = greedy(1, prompt_logprobs=0)
    whole = llm.generate([PROMPTS[1]], params)[0].prompt_logprobs
    chunked = make(tiny, max_num_batched_tokens=16)
    for _ in range(2):
        again = chunked.generate([PROMPTS[1]], params)[0].prompt_logprobs
        assert len(again) == len(whole)
        for a, b in zip(whole[1:], again[1:], strict=True):
            assert list(a) == list(b)
            assert [x.logprob for x in a.values()] == pytest.approx([x.logprob for x in b.values()], abs=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 16},
        {"num_kv_blocks": 10, "max_num_batched_tokens": 24},
        {"async_scheduling": True},
    ],
    ids=["in one piece", "in chunks", "preempted", "async"],
)
def test_prompt_logprobs_from_a_position_are_those_of_the_whole_prompt(tiny, settings):
    """Also beside others, which preempt each other where there is little memory."""
    engine = make(tiny, **settings)
    prompt = PROMPTS[1]
    (whole,) = engine.generate([prompt], greedy(1, prompt_logprobs=2))
    starts = [1, 2, 17, 18, 33, 49]
    params = [greedy(40, prompt_logprobs=2, prompt_logprobs_start=start) for start in starts]
    for start, result in zip(starts, engine.generate([prompt] * len(starts), params), strict=True):
        assert result.prompt_logprobs[:start] == [None] * start
        assert result.num_cached_tokens <= start - 1
        for one, other in zip(result.prompt_logprobs[start:], whole.prompt_logprobs[start:], strict=True):
            assert one.keys() == other.keys()
            values = [[entry.logprob for entry in entries.values()] for entries in (one, other)]
            assert values[0] == pytest.approx(values[1], abs=1e-4)
    (late,) = engine.generate([prompt], params[-1])
    assert late.num_cached_tokens == 48
    if "num_kv_blocks" in settings:
        assert engine._core.scheduler.stats().preemptions


def test_a_first_scored_position_needs_log_probabilities_and_a_longer_prompt(llm):
    with pytest.raises(ValueError, match="prompt_logprobs_start is 4: set prompt_logprobs too"):
        greedy(1, prompt_logprobs_start=4)
    with pytest.raises(ValueError, match="prompt_logprobs_start must be at least 0"):
        greedy(1, prompt_logprobs=0, prompt_logprobs_start=-1)
    with pytest.raises(ValueError, match="prompt_logprobs_start is 3, but the prompt has 3 tokens: give at most 2"):
        llm.generate([[5, 6, 7]], greedy(1, prompt_logprobs=0, prompt_logprobs_start=3))


# Where it ends ------------------------------------------------------------------------------------------------------


def test_stop_string_cuts_the_text_and_frees_the_engine(llm):
    free = llm.generate(["hello"], greedy(40))[0].outputs[0]
    stop = next(piece for piece in (free.text[i : i + 2] for i in range(8, 30)) if piece.isprintable())
    cut = llm.generate(["hello"], greedy(40, stop=[stop]))[0].outputs[0]
    assert cut.text == free.text[: free.text.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert cut.token_ids == free.token_ids[: len(cut.token_ids)] and len(cut.token_ids) < 40
    kept = llm.generate(["hello"], greedy(40, stop=[stop], include_stop_str_in_output=True))[0].outputs[0]
    assert kept.text == cut.text + stop
    assert not llm.has_work and llm.stats().kv_blocks_used == 0


def test_stop_tokens_eos_and_min_tokens(llm):
    free = llm.generate([PROMPTS[0]], greedy(20))[0].outputs[0].token_ids
    stop = free[5]
    at = free.index(stop)
    stopped = llm.generate([PROMPTS[0]], greedy(20, stop_token_ids=[stop]))[0].outputs[0]
    assert stopped.token_ids == free[: at + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    later = llm.generate([PROMPTS[0]], greedy(20, stop_token_ids=[stop], min_tokens=10))[0].outputs[0]
    assert stop not in later.token_ids[:10] and len(later.token_ids) >= 10
    bias = SamplingParams(temperature=0.0, max_tokens=9, logit_bias={EOS: 100.0})
    ended = llm.generate([PROMPTS[0]], bias)[0].outputs[0]
    assert (ended.token_ids, ended.finish_reason, ended.stop_reason, ended.text) == ([EOS], "stop", None, "")


def test_the_context_ends_a_request_without_max_tokens(llm):
    result = llm.generate([list(range(200))], greedy(None))[0]
    assert len(result.outputs[0].token_ids) == CONTEXT - 200
    assert result.outputs[0].finish_reason == "length"


def test_logits_that_are_not_finite_end_that_request_alone(tiny, tmp_path):
    """A NaN in the embedding of token 77 spoils the request that holds it, and no other."""
    model = save_tiny_llm(tmp_path, seed=1)
    expected = greedy_tokens(model, PROMPTS[0], 8)
    with torch.no_grad():
        model.model.embed_tokens.weight[77] = math.nan
    model.save_pretrained(tmp_path)
    for lag in (False, True):
        bad = make((tmp_path, model), async_scheduling=lag)
        results = bad.generate([PROMPTS[0], [3, 77, 4], PROMPTS[0]], greedy(8, logit_bias={77: -100.0}))
        assert results[1].outputs[0].finish_reason == "error" and "not finite" in results[1].outputs[0].error
        assert results[1].outputs[0].token_ids == []
        assert [results[i].outputs[0].token_ids for i in (0, 2)] == [expected, expected]
        assert bad.stats().kv_blocks_used == 0


# How it is called ---------------------------------------------------------------------------------------------------


def test_prompt_forms(llm):
    ids = llm.tokenizer.encode("hi you")
    forms = ["hi you", ids, {"prompt": "hi you"}, {"prompt_token_ids": ids}]
    results = [llm.generate(form, greedy(4)) for form in forms]
    assert all(len(result) == 1 for result in results)
    assert len({tuple(result[0].outputs[0].token_ids) for result in results}) == 1
    assert [result[0].prompt for result in results] == ["hi you", None, "hi you", None]
    assert len(llm.generate(["a", [1, 2], {"prompt": "b"}], greedy(1))) == 3
    assert llm.generate([], greedy()) == []


def test_one_params_for_each_prompt(llm):
    results = llm.generate([[1], [2]], [greedy(3), greedy(5)])
    assert [len(result.outputs[0].token_ids) for result in results] == [3, 5]
    with pytest.raises(ValueError, match="2 prompts and 1 sampling_params"):
        llm.generate([[1], [2]], [greedy(3)])


def test_chat_renders_the_template(llm):
    messages = [{"role": "user", "content": "hi"}]
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    one = llm.chat(messages, greedy(5))
    assert one[0].prompt == text
    assert one[0].prompt_token_ids == llm.tokenizer.encode(text, parse_special=True)
    assert one[0].prompt_token_ids[0] == 256
    two = llm.chat([messages, [*messages, {"role": "assistant", "content": "yo"}]], greedy(5))
    assert tokens_of(two[:1]) == tokens_of(one) and len(two) == 2


NESTED = "{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}"


def test_a_chat_template_that_does_not_end_is_ended(llm, monkeypatch):
    """No limit of the sandbox forbids this one; ``text/template_worker.py`` ends its process."""
    endless = ChatTemplate("{% set ns = namespace(x=['a'], y=['a']) %}" + NESTED + "{{ ns.x == ns.y }}")
    worker = TemplateWorker(time_limit_s=0.2)
    sound = llm.chat_template
    assert isinstance(sound, TemplateApart)
    monkeypatch.setattr(llm, "chat_template", TemplateApart(endless, worker))
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(ValueError, match=r"asks for too much: it was ended after 0\.2 s"):
        llm.chat(messages, greedy(3))
    with pytest.raises(ValueError, match="asks for too much"):
        llm.get_tokenizer().apply_chat_template(messages)
    assert llm.get_tokenizer().apply_chat_template(messages, chat_template="{{ 2 }}", tokenize=False) == "2"
    monkeypatch.undo()
    assert not llm.has_work and len(llm.chat(messages, greedy(3))[0].outputs[0].token_ids) == 3


@pytest.mark.parametrize(
    "prompts,params,message",
    [
        ("", {}, "prompt is empty"),
        ([[1, 2], []], {}, "prompt is empty"),
        ([[1], {"prmpt": "x"}], {}, "prompt mapping"),
        ([[1], 3.5], {}, "text or a list of token ids"),
        ([[1], [VOCAB]], {}, f"token id {VOCAB}"),
        ([[1], [-1]], {}, "token id -1"),
        ([[1], [2]], {"logit_bias": {VOCAB + 7: 1.0}}, "logit_bias holds token id"),
        ([[1], [2]], {"stop_token_ids": [VOCAB]}, "stop_token_ids holds token id"),
        ([[1], [2] * CONTEXT], {}, f"{CONTEXT} tokens"),
        ([[1], [2]], {"n": 17}, "n is 17"),
    ],
)
def test_a_bad_request_is_refused_before_anything_starts(llm, prompts, params, message):
    steps = llm.stats().steps
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, SamplingParams(max_tokens=4, **params))
    assert not llm.has_work and llm.stats().steps == steps


@pytest.mark.parametrize(
    "prompts,params,message",
    [
        (5, None, "prompts must be text, token ids, or a list of such, not int"),
        ([[1]], {"max_tokens": 3}, r"given as SamplingParams\(max_tokens=64, ...\), not as dict"),
        ([[1]], [{"max_tokens": 3}], "not as dict"),
    ],
)
def test_what_is_no_prompt_and_what_are_no_params(llm, prompts, params, message):
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, params)


@pytest.mark.parametrize("name,value", [("stop", 5), ("stop_token_ids", 5), ("logit_bias", [1, 2])])
def test_params_of_another_type_name_the_field(name, value):
    with pytest.raises(ValueError, match=f"{name} must be a"):
        SamplingParams(**{name: value})


def test_typos_are_errors(tiny, llm):
    with pytest.raises(TypeError, match="max_nun_seqs"):
        LLM(str(tiny[0]), max_nun_seqs=3)
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)
    with pytest.raises(TypeError, match="sampling_parms"):
        llm.generate("x", sampling_parms=greedy())


def test_settings_that_cannot_be_name_what_to_change(tiny):
    for settings, message in [
        ({"max_model_len": CONTEXT + 1}, f"max_model_len is {CONTEXT + 1}"),
        ({"num_kv_blocks": 10**12}, "MiB are free"),
        ({"num_kv_blocks": None, "kv_cache_bytes": 10}, "no room for one KV block"),
        ({"num_kv_blocks": 4, "kv_cache_bytes": 1000}, "given twice"),
        ({"num_kv_blocks": 4, "max_model_len": 100}, "the KV cache holds 64 tokens"),
        ({"dtype": "int8"}, "dtype must be"),
        ({"max_num_batched_tokens": 8}, "max_num_batched_tokens"),
        ({"mixed_step_limit": "2tokens"}, r"mixed_step_limit \(2\) must be at least max_num_seqs"),
        (
            {"mixed_step_limit": "8tokens", "max_num_seqs": None},
            r"mixed_step_limit \(8\) must be at least max_num_seqs \(64\)",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            make(tiny, **settings)


def test_the_longest_are_begun_first_unless_asked_otherwise(tiny):
    prompts, params = [[5, 6, 7], [8, 9], [3, 4, 5, 6]], [greedy(2), greedy(9), greedy(5)]
    texts, ends = [], []
    for settings in ({}, {"longest_first": False}):
        llm = make(tiny, max_num_seqs=1, **settings)
        texts.append([tokens_of([result]) for result in llm.generate(prompts, params)])
        names = [llm.submit(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
        ends.append([])
        while llm.has_work:
            ends[-1] += [names.index(output.request_id) for output in llm.step() if output.finish_reason]
    assert texts[0] == texts[1]
    assert ends == [[1, 2, 0], [0, 1, 2]]


def test_what_is_for_work_that_is_all_there_can_be_refused(tiny):
    for settings in ({}, {"longest_first": False}, {"mixed_step_limit": "full"}):
        config = make(tiny, **settings).config
        assert (config.longest_first, config.mixed_step_limit) == (
            settings.get("longest_first", True),
            settings.get("mixed_step_limit", "fill"),
        )


def test_start_up_line_says_what_runs(tiny, capsys):
    make(tiny, max_num_seqs=3)
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    for part in ("plain torch", "native=False", "max_num_seqs=3", "KV cache 1536 tokens", f"context {CONTEXT}"):
        assert part in line


@pytest.mark.parametrize("lag", [False, True])
def test_ctrl_c_in_the_middle_of_a_step_leaves_a_usable_engine(tiny, monkeypatch, lag):
    llm = make(tiny, async_scheduling=lag)
    expected = tokens_of(llm.generate(PROMPTS, greedy()))
    runner = llm._core.executor
    inputs, calls = runner._inputs, []

    def interrupted(batch):
        calls.append(batch.step)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return inputs(batch)

    monkeypatch.setattr(runner, "_inputs", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, greedy())
    assert not llm.has_work and llm.stats().kv_blocks_used == 0
    assert len(calls) <= 4
    assert tokens_of(llm.generate(PROMPTS, greedy())) == expected
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# The real model -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(smollm2):
    return LLM(str(smollm2.path), dtype="float32", max_model_len=512, num_kv_blocks=64)


@pytest.mark.prove  # transformers reads the file for a quarter of a minute; tiny models are compared above
def test_real_model_float32_gives_the_tokens_of_transformers(real, smollm2):
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2.path.parent, gguf_file=smollm2.path.name, dtype=torch.float32
    ).eval()
    prompt = real.tokenizer.encode("The three laws of thermodynamics say that")
    with torch.no_grad():
        output = reference.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)
    others = [real.tokenizer.encode(text) for text in ("Once upon a time", "def main():\n", "1 2 3 4 5 6 7")]
    results = real.generate([*others, prompt], SamplingParams(temperature=0.0, max_tokens=24))
    assert results[-1].outputs[0].token_ids == output[0, len(prompt) :].tolist()


def test_real_model_knows_the_capital_of_france(real):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    choice = real.chat(messages, SamplingParams(temperature=0.0, max_tokens=24))[0].outputs[0]
    assert "Paris" in choice.text
    assert choice.finish_reason == "stop"


def test_float32_on_torch_alone_is_the_same_to_the_bit_in_any_batch(llm):
    params = greedy(8, logprobs=2, prompt_logprobs=0)
    prompts = [[7] * 100, [9, 8, 7] * 14, list(range(40)), [3]]
    alone = [llm.generate(prompt, params)[0] for prompt in prompts]
    for one, other in zip(alone, llm.generate(prompts, params), strict=True):
        assert one.outputs[0].logprobs == other.outputs[0].logprobs and one.prompt_logprobs == other.prompt_logprobs


# Special tokens in text ---------------------------------------------------------------------------------------------


def test_special_tokens_of_a_text_prompt_are_parsed_unless_told_otherwise(llm):
    text = "<|im_start|>user\nhi<|im_end|>"
    parsed = llm.generate(text, greedy(1))[0].prompt_token_ids
    assert parsed == llm.tokenizer.encode(text, parse_special=True)
    assert parsed[0] == 256 and parsed[-1] == EOS and len(parsed) == 9
    plain = llm.generate({"prompt": text}, greedy(1), parse_special=False)[0].prompt_token_ids
    assert plain == llm.tokenizer.encode(text) and not {256, EOS} & set(plain)


def test_text_in_a_chat_stays_text(llm):
    ids = llm.chat([{"role": "user", "content": "a<|im_end|>b"}], greedy(1))[0].prompt_token_ids
    assert ids.count(256) == 2 and ids.count(EOS) == 1


# What programs written for vLLM and transformers expect ---------------------------------------------------------------


def test_float16_on_torch_alone(tiny, llm, capsys):
    half = make(tiny, dtype="float16", native=None, tensor_parallel_size=1, trust_remote_code=False)
    assert half._core.executor._k_cache.dtype == torch.float16
    exact, rounded = (each.generate(PROMPTS[:2], greedy(1, logprobs=5)) for each in (llm, half))
    for one, other in zip(exact, rounded, strict=True):
        for token, entry in one.outputs[0].logprobs[0].items():
            if token in other.outputs[0].logprobs[0]:
                assert other.outputs[0].logprobs[0][token].logprob == pytest.approx(entry.logprob, abs=0.05)
    refusal = "native=True, but the C\\+\\+ kernels compute in float32 or bfloat16, not float16"
    with pytest.raises(ValueError, match=refusal):
        make(tiny, dtype="float16", native=True)


def test_sampling_defaults_of_the_model(tiny, capsys):
    override = {"temperature": 0, "max_new_tokens": 3, "eos_token_id": 7}
    llm = make(tiny, override_generation_config=override)
    assert "sampling defaults temperature=0, max_new_tokens=3 (" in capsys.readouterr().err
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0, max_tokens=3)
    first, second = (llm.generate([PROMPTS[1]])[0].outputs[0] for _ in range(2))
    assert first.token_ids == second.token_ids and 1 <= len(first.token_ids) <= 3
    assert set(llm._eos) == {EOS, 7}


def test_the_tokenizer_renders_what_chat_runs(llm):
    messages = [{"role": "user", "content": "hi"}]
    ids = llm.get_tokenizer().apply_chat_template(messages, add_generation_prompt=True)
    assert llm.chat(messages, greedy(1))[0].prompt_token_ids == ids
