r"""A model reads numbers. Single bytes would do (there are 256), but then every word costs five steps. *Byte-pair
encoding* joins what often stands together: begin with the bytes, and apply *merges*, pairs that were learned from
text, in the order in which they were learned. The first one that was learned joins first, everywhere it stands,
because the later ones were counted after it.

    "low lower" with the merges (l, o), (lo, w), (e, r):   low, ' ', low, er

So to encode: among all neighbours find the pair with the *lowest rank*, join all its places from left to right,
and begin again until no pair has a rank. The result is not the longest match, and not the fewest tokens. It must
be exactly what the training saw, because another cut of the same text is another input for the model.

Joined tokens get new numbers: merge r makes the token 256 + r. Decoding is a table: token to bytes. A token may
end in the middle of a letter (é is two bytes), so bytes become text only when all of them are there. A server that
streams has to hold back half letters.

Looking at all pairs again after each merge costs the square of the length. That is fine for words (text is split
into words first) and slow for long ones; a heap makes it n log n.
"""

from itertools import pairwise

from ...record import Case, Live, Rung, Slip, Speed

SOLUTION = '''def encode(data, merges):
    """data: bytes. merges: list of pairs of tokens, first learned first; merge r makes token 256 + r. -> tokens."""
    ranks = {tuple(pair): rank for rank, pair in enumerate(merges)}
    tokens = list(data)
    while True:
        best = min((ranks.get(pair, len(ranks)) for pair in zip(tokens, tokens[1:])), default=len(ranks))
        if best == len(ranks):
            return tokens
        pair, joined, i = tuple(merges[best]), [], 0
        while i < len(tokens):
            if i + 1 < len(tokens) and (tokens[i], tokens[i + 1]) == pair:
                joined.append(256 + best)
                i += 2
            else:
                joined.append(tokens[i])
                i += 1
        tokens = joined


def decode(tokens, merges):
    """The bytes of a list of tokens."""
    pieces = [bytes([byte]) for byte in range(256)]
    for a, b in merges:
        pieces.append(pieces[a] + pieces[b])
    return b"".join(pieces[token] for token in tokens)
'''


def _pairs(model):
    """Return the merges of a byte-level tokenizer as pairs of the student's tokens, and their ids in it."""
    from ....text.token_bytes import BYTE_LEVEL

    ids = model["vocab"]
    known = {text: BYTE_LEVEL.bytes_of(text)[0] for text in ids if len(BYTE_LEVEL.bytes_of(text)) == 1}
    pairs = []
    for merge in model["merges"]:
        a, b = merge if isinstance(merge, list) else merge.split(" ")
        pairs.append([known[a], known[b]])
        known.setdefault(a + b, 255 + len(pairs))
    return pairs, {token: ids[text] for text, token in known.items()}


def _live(mine, shipped):
    """Make a tokenizer whose words are merged by the student's ``encode``; words are cut by the library, as before."""

    class Tokenizer(shipped):  # type: ignore[valid-type]
        def _encode(self, backend, text, add_special_tokens):
            import json
            import re

            if not hasattr(self, "_own"):
                model = json.loads(backend.to_str())["model"]
                if model["type"] != "BPE" or backend.pre_tokenizer is None or self._spelling.leading_space:
                    raise ValueError("your tokenizer needs a model with a byte-level BPE tokenizer, such as SmolLM2's")
                self._own, self._words = _pairs(model), {}
            pairs, ids = self._own
            added = {each.content: token for token, each in backend.get_added_tokens_decoder().items()
                     if not (each.special and backend.encode_special_tokens)}  # fmt: skip
            found = list(self._prefix) if add_special_tokens else []
            order = "|".join(map(re.escape, sorted(added, key=len, reverse=True)))
            for part in re.split(f"({order})", text) if order else [text]:
                if part in added:
                    found.append(added[part])
                    continue
                part = part if backend.normalizer is None else backend.normalizer.normalize_str(part)
                for word, _ in backend.pre_tokenizer.pre_tokenize_str(part):
                    if word not in self._words:
                        made = mine.encode(self._spelling.bytes_of(word), pairs)
                        self._words[word] = [ids[token] for token in made if token in ids]
                    found += self._words[word]
            return [*found, *self._suffix] if add_special_tokens else found

    return Tokenizer


def _encode(data, merges, longest=False):
    ranks = {tuple(pair): rank for rank, pair in enumerate(merges)}
    tokens = list(data)
    while found := [(ranks[p], i) for i, p in enumerate(pairwise(tokens)) if p in ranks]:
        rank, place = (max if longest else min)(found)
        tokens[place : place + 2] = [256 + rank]
    return tokens


def _decode(tokens, merges):
    pieces = [bytes([byte]) for byte in range(256)]
    for a, b in merges:
        pieces.append(pieces[a] + pieces[b])
    return b"".join(pieces[token] for token in tokens)


def _learned(rng, letters, count):
    """Generate random merges, each of tokens that exist by then."""
    known, merges = list(letters), []
    while len(merges) < count:
        pair = [int(known[i]) for i in rng.integers(0, len(known), 2)]
        if pair not in merges:
            merges.append(pair)
            known.append(255 + len(merges))
    return merges


def _make(rng, length, letters=b"aber ", count=12):
    data = bytes(letters[i] for i in rng.integers(0, len(letters), length))
    return [data, _learned(rng, letters, count)]


RUNG = Rung(
    name="tokenizer",
    title="A byte-pair tokenizer",
    road="serving",
    place=1,
    kind="python",
    minutes=40,
    after=("line",),
    solution=SOLUTION,
    holes=("encode", "decode"),
    answers={"encode": _encode, "decode": _decode},
    cases=(
        Case("no merges", lambda rng: [b"hello", []], "Without merges every byte is a token: list(data)."),
        Case("one merge", lambda rng: [b"low lower", [[108, 111]]],
             "Join every place where the pair stands, from left to right."),
        Case("merges of merges", lambda rng: [b"low lower", [[108, 111], [256, 119], [101, 114]]],
             "A merge may join tokens that merges have made: go on until nothing can be joined."),
        Case("aaaaa", lambda rng: [b"aaaaa", [[97, 97]]],
             "Places overlap: after joining two, go on behind them."),
        Case("random text", lambda rng: _make(rng, 60),
             "Always join the pair with the lowest rank first, not the first place."),
        Case("empty text", lambda rng: _make(rng, 0), "No bytes, no tokens."),
        Case("bytes that are no text", lambda rng: [bytes([255, 0, 200, 255, 0]), [[255, 0]]],
             "Tokens are bytes, not letters."),
        Case("decode", lambda rng: [[256, 119, 258, 97], [[108, 111], [256, 119], [101, 114]]],
             "The bytes of token 256 + r are those of its two parts; join bytes, not text.", entry="decode"),
    ),
    slips=(Slip(lambda data, merges: _encode(data, merges, longest=True),
                "The pair with the highest rank is joined first: what was learned first goes first."),),
    speed=Speed(lambda rng: _make(rng, 300, count=20),
                "After each merge all its places are joined in one pass; do not begin again after each place.",
                ratio=1.6),
    hints=("ranks = {tuple(pair): rank} finds a pair's rank in one step.",
           "best = the lowest rank among zip(tokens, tokens[1:]); stop when there is none.",
           "Build the joined list with an index that moves by two where the pair stands."),
    differences=
        "The package reads tokenizers of checkpoints with the library `tokenizers`, splits text into words with the "
    "model's own pattern, and holds back half letters while it streams (text/detokenizer.py).",
    live=Live("serve", {"transect.text.tokenizer:Tokenizer": _live}),
    shipped="text/tokenizer.py",
)  # fmt: skip
