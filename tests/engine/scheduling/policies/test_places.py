"""A newcomer gets a place of a client that has more than its share, without any loss of tokens."""

from msgspec import structs
from small_engine import make, order_of_ends, recorded_batches, request, tokens_of

from transect.engine.scheduling.policies.places import exchange


def of(client, name, weight=1.0, **options):
    return structs.replace(request(name, **options), client=client, weight=weight)


def filled(core, count, **options):
    for number in range(count):
        core.add(of("a", f"a{number}", **options))
    core.step()
    core.step()


def test_a_newcomer_does_not_wait_for_an_answer_to_end():
    core = make(max_num_seqs=4, max_num_batched_tokens=64)
    filled(core, 6, max_tokens=40)
    core.add(of("b", "b0", max_tokens=3))
    outputs = []
    for _ in range(3):
        outputs += core.step()
    assert any(output.request_id == "b0" and output.new_token_ids for output in outputs)
    assert core.stats().preemptions == 1
    outputs += recorded_batches(core)[1]
    assert order_of_ends(outputs)[0] == "b0" and len(order_of_ends(outputs)) == 7


def test_newcomers_of_several_clients_get_their_places_at_once():
    core = make(max_num_seqs=4, max_num_batched_tokens=64)
    filled(core, 6, max_tokens=40)
    for client in "bcd":
        core.add(of(client, f"{client}0", max_tokens=3))
    assert {"b0", "c0", "d0"} <= {output.request_id for output in core.step()}
    assert core.stats().preemptions == 3
    assert len(order_of_ends(recorded_batches(core)[1])) == 9


def test_a_newcomer_gets_kv_blocks_of_a_client_above_its_share():
    core = make(num_blocks=16, max_num_seqs=8, max_num_batched_tokens=64)
    filled(core, 4, prompt=14, max_tokens=40)
    core.add(of("b", "b0", first=9, prompt=10, max_tokens=3))
    outputs = []
    for _ in range(3):
        outputs += core.step()
    assert tokens_of(outputs, "b0") and core.scheduler.requests["a0"].leader.block_ids
    assert len(order_of_ends(outputs + recorded_batches(core)[1])) == 5


def test_answers_are_the_same_with_and_without():
    alone = make(max_num_seqs=4, max_num_batched_tokens=64)
    filled(alone, 4, max_tokens=12)
    want = {name: tokens_of(outputs, name) for outputs in [recorded_batches(alone)[1]] for name in ("a0", "a3")}
    for lag in (0, 1):
        core = make(lag, max_num_seqs=4, max_num_batched_tokens=64)
        filled(core, 4, max_tokens=12)
        core.add(of("b", "b0", max_tokens=3))
        core.add(of("c", "c0", max_tokens=3))
        outputs = recorded_batches(core)[1]
        assert core.stats().preemptions == 2
        for name, tokens in want.items():
            assert tokens_of(outputs, name)[-len(tokens) :] == tokens or tokens[-3:] == tokens_of(outputs, name)[-3:]


def test_nobody_takes_more_than_its_share():
    core = make(max_num_seqs=4, max_num_batched_tokens=64)
    filled(core, 4, max_tokens=30)
    for number in range(6):
        core.add(of("b", f"b{number}", max_tokens=30))
    for _ in range(10):
        core.step()
    clients = [seq.request.spec.client for seq in core.scheduler.running]
    assert sorted(clients) == ["a", "a", "b", "b"] and core.stats().preemptions == 2
    recorded_batches(core)


def test_weights_count():
    core = make(max_num_seqs=4, max_num_batched_tokens=64)
    filled(core, 4, max_tokens=30)
    for number in range(6):
        core.add(of("b", f"b{number}", weight=3.0, max_tokens=30))
    for _ in range(10):
        core.step()
    assert sorted(seq.request.spec.client for seq in core.scheduler.running) == ["a", "b", "b", "b"]
    recorded_batches(core)


def test_one_client_alone_and_static_batches_are_left_alone():
    core = make(max_num_seqs=2, max_num_batched_tokens=64)
    filled(core, 6, max_tokens=6)
    assert not [output for output in recorded_batches(core)[1] if output.error] and core.stats().preemptions == 0
    core = make(max_num_seqs=2, batching="static")
    filled(core, 2, max_tokens=20)
    core.add(of("b", "b0"))
    recorded_batches(core)
    assert core.stats().preemptions == 0


def test_of_clients_with_equal_shares_the_same_one_yields_in_every_process():
    """The order of a set of names differs from process to process, and the ranks of an engine are processes."""
    yielding = set()
    for number in range(16):
        core = make(max_num_seqs=4, max_num_batched_tokens=64)
        for client in "xyxy":
            core.add(of(f"{client} {number}", f"{client}{len(core.scheduler.requests)}", max_tokens=40))
        core.step()
        core.add(of("newcomer", "n", max_tokens=3))
        _, loser = exchange(core.scheduler.running, core.scheduler.waiting, lambda seq: 1, 4)
        yielding.add(loser.request.spec.client[0])
    assert yielding == {"x"}
