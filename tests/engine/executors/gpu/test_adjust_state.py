"""Penalties and biases kept on the device: lines are written when they must be, and counted there in between."""

import torch

from transect.engine.executors.gpu.adjust_state import AdjustState
from transect.engine.scheduling.batch import Draw
from transect.engine.scheduling.sampling_params import SamplingParams
from transect.ops.sampling.adjust_logits import IN_PROMPT, reference_count

PENALTY = SamplingParams(presence_penalty=1.0)


def draw(seq_id, prompt, output, params=PENALTY, stop_ids=(), min_position=0):
    return Draw(seq_id, 0, 1, params, tuple(prompt), output, stop_ids, min_position)


def test_counts_of_prompt_and_output():
    state = AdjustState(10, torch.device("cpu"), lines=2)
    line = state.line(draw(7, [1, 1, 2], [2, 5, 5]), 6, 1)
    assert state.counts[line].tolist() == [0, IN_PROMPT, IN_PROMPT + 1, 0, 0, 2, 0, 0, 0, 0]


def test_a_line_is_written_once_and_counts_on_the_device():
    state = AdjustState(10, torch.device("cpu"), lines=2)
    one = draw(7, [1], [])
    line = state.line(one, 1, 1)
    reference_count(state.counts, torch.tensor([line], dtype=torch.int32), torch.tensor([4]))
    assert state.line(one, 2, 2) == line  # the output list does not hold the token yet
    assert state.counts[line, 4] == 1
    one.output_token_ids.extend([4, 9, 9])
    assert state.line(one, 4, 3) == line  # it has been away: two tokens were drawn by others' counting
    assert state.counts[line].tolist()[4:] == [1, 0, 0, 0, 0, 2]


def test_the_mask_goes_when_min_tokens_is_reached():
    state = AdjustState(10, torch.device("cpu"), lines=2)
    one = draw(3, [1, 2], [], SamplingParams(logit_bias={6: 2.5}), stop_ids=(4, 6), min_position=4)
    line = state.line(one, 2, 1)
    assert state.bias[line, 4] == state.bias[line, 6] == -torch.inf
    state.line(one, 4, 3)
    assert state.bias[line].tolist() == [0, 0, 0, 0, 0, 0, 2.5, 0, 0, 0]


def test_lines_of_those_that_are_gone_are_taken_and_the_table_grows():
    state = AdjustState(4, torch.device("cpu"), lines=2)
    first = [state.line(draw(seq, [0], []), 1, step) for step, seq in ((1, 1), (2, 2))]
    assert state.line(draw(3, [0], []), 1, 3) == first[0] and state.generation == 0  # 1 was not in steps 2 and 3
    assert state.line(draw(4, [0], []), 1, 3) not in first and state.generation == 1
    assert len(state.counts) == len(state.bias) == 4


def test_groups_that_draw_in_turns_keep_their_lines():
    state = AdjustState(4, torch.device("cpu"), lines=3, depth=3)
    first = [state.line(draw(seq, [0], []), 1, seq) for seq in (1, 2, 3)]
    assert state.line(draw(4, [0], []), 1, 4) not in first, "1 draws again in this step or the next"
    assert state.line(draw(1, [0], []), 1, 4) == first[0]


def test_only_allowed_tokens_have_a_bias_that_is_finite():
    state = AdjustState(6, torch.device("cpu"), lines=2)
    params = SamplingParams(allowed_token_ids=[1, 4], logit_bias={4: 2.5, 5: 9.0})
    line = state.line(draw(3, [1], [], params), 1, 1)
    inf = torch.inf
    assert state.bias[line].tolist() == [-inf, 0.0, -inf, -inf, 2.5, -inf]
