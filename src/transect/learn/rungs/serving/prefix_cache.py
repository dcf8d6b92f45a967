r"""A thousand chats begin with the same two pages of instructions. Their KV is the same, because attention is causal:
what comes later changes nothing. So keep finished blocks, and when a prompt comes, look how much of its beginning
is there.

*The key*: a block's KV depends on all tokens before it too. So its key is a hash of (the key of the block before,
its own tokens): a chain. Equal keys mean equal beginnings. Only full blocks have keys, for a block that still
grows would change its.

*Reference counts*: two sequences may use one block at the same time. Each has a reference. A block whose count
falls to 0 is free. But its content is still there! Leave it *findable* until somebody needs the room. So there are
two kinds of free blocks: blank ones (nothing worth finding), which are taken first, and unused ones with content,
of which the one unused for the longest time is taken (*LRU*), and its key forgotten.

*Order on release*: of one sequence, the later blocks should go first. Its beginning is useful without its end, and
its end is useless without its beginning. So release them in reverse, and the end becomes the older.

This is the class that runs in the live engine, unchanged: write the five methods that carry it.
"""

from ....engine.scheduling.kv_cache import KVCache
from ...record import Case, Live, Rung, Slip, Speed
from ...texts import excerpt

SOLUTION = f"""from collections import OrderedDict


{
    excerpt("engine/scheduling/kv_cache.py", "KVCache")
    .replace(": Iterable[int]", "")
    .replace(" -> Iterable[int]", "")
    .replace(": Iterable[bytes]", "")
    .replace(": Sequence[int]", "")
}"""


def _drive(module, num_blocks, program):
    cache = module.KVCache(num_blocks)
    found = []
    for name, *arguments in program:
        result = getattr(cache, name)(*arguments)
        found.append([result, cache.num_free, cache.num_cached])
    return found


def _answer(num_blocks, program):
    return _drive(type("module", (), {"KVCache": KVCache}), num_blocks, program)


def _keys(prefix, count):
    return [f"{prefix}{i}".encode() for i in range(count)]


def _random(rng, num_blocks, steps, turns=12):
    """Draw a walk that a scheduler could make: sequences come, find what is cached, fill blocks and go."""
    cache, program, held, names = KVCache(num_blocks), [], [], [f"p{i}" for i in range(5)]

    def do(*call):
        program.append(list(call))
        return getattr(cache, call[0])(*call[1:])

    for _ in range(steps):
        if held and rng.random() < 0.45:
            do("release", held.pop(int(rng.integers(len(held)))))
            continue
        keys = _keys(str(rng.choice(names)), int(rng.integers(1, turns // 2)))
        blocks = do("match", keys)
        if len(blocks) < len(keys) and cache.num_free - cache.count_unused(blocks) < len(keys) - len(blocks):
            continue
        do("share", blocks)
        blocks = list(blocks)
        for key in keys[len(blocks) :]:
            blocks.append(do("allocate"))
            do("register", blocks[-1], key)
        held.append(blocks)
    return [num_blocks, program]


RUNG = Rung(
    name="prefix_cache",
    title="The prefix cache: blocks that can be found again",
    road="serving",
    place=6,
    kind="python",
    minutes=60,
    after=("scheduler",),
    solution=SOLUTION,
    holes=("KVCache.allocate", "KVCache.share", "KVCache.release", "KVCache.match", "KVCache.register"),
    answers={"cache": _answer},
    drives={"cache": _drive},
    cases=(
        Case("take and give back", lambda rng: [4, [["allocate"], ["allocate"], ["release", [0]], ["allocate"]]],
             "Blank blocks are a stack: the last that became free is taken first."),
        Case("nothing is left", lambda rng: [2, [["allocate"], ["allocate"], ["allocate"]]],
             "Return None when no block is free."),
        Case("found again", lambda rng: [4, [["allocate"], ["register", 0, b"a"], ["release", [0]], ["match", [b"a"]]]],
             "A block without references keeps its content and its key."),
        Case("used by two", lambda rng: [4, [["allocate"], ["register", 0, b"a"], ["share", [0]], ["release", [0]],
                                             ["release", [0]], ["match", [b"a"]]]],
             "A block is free when its last reference is gone, and not before."),
        Case("found and used", lambda rng: [4, [["allocate"], ["register", 0, b"a"], ["release", [0]], ["share", [0]],
                                                ["allocate"], ["allocate"], ["allocate"], ["allocate"]]],
             "A shared block is in use again: it must leave the unused ones."),
        Case("a broken chain",
             lambda rng: [4, [["allocate"], ["register", 0, b"a0"], ["allocate"], ["register", 1, b"a2"],
                                                ["match", [b"a0", b"a1", b"a2"]]]],
             "A match ends at the first block that is not there: what follows belongs to another beginning."),
        Case("the end goes first",
             lambda rng: [2, [["allocate"], ["register", 0, b"a0"], ["allocate"], ["register", 1, b"a1"],
                                                    ["release", [0, 1]], ["allocate"], ["match", [b"a0", b"a1"]]]],
             "Release a sequence's blocks in reverse: the end of a prefix becomes the older."),
        Case("the first name stays",
             lambda rng: [4, [["allocate"], ["allocate"], ["register", 0, b"a"], ["register", 1, b"a"],
                                                      ["release", [0, 1]], ["match", [b"a"]]]],
             "A second block with the same content gets no key: the first one keeps it."),
        Case("200 random turns", lambda rng: _random(rng, 12, 200),
             "When a block with content is taken for something else, its key must be forgotten; the longest "
             "unused goes first."),
    ),
    slips=(Slip(lambda n, program: [[None, n, 0] for _ in program],
        "Nothing is ever taken: the methods must change the tables."),),
    speed=Speed(lambda rng: _random(rng, 400, 400, 60),
                "Each operation must take the same time however many blocks there are: keep dicts, and search no list.",
                ratio=1.6),
    hints=("_refs counts references; _blank is a list used as a stack; _unused is an OrderedDict, oldest first.",
           "allocate: _blank.pop(), else _unused.popitem(last=False) and forget the key with _unregister, else None.",
           "share: where the count is 0, delete from _unused. release: reversed, and at 0 into _unused or _blank."),
    differences=
        "This is the shipped class. The scheduler above it hashes blocks as they fill, offers them when their step is "
    "done, and takes back those that a failed step may have spoilt.",
    shipped="engine/scheduling/kv_cache.py",
    live=Live("serve", {"transect.engine.scheduling.kv_cache:KVCache": None}),
)  # fmt: skip
