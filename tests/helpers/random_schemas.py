"""Random schemas of the keywords that grammars keep to."""

from hypothesis import strategies as st

NAMES = st.sampled_from(["a", "b", "name", 'with "quotes"', "é", "x y"])


def leaves() -> st.SearchStrategy[dict]:
    number = st.integers(-50, 50)
    strings = st.builds(
        lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more},
        st.integers(0, 3),
        st.integers(0, 5),
    )
    numbers = st.builds(
        lambda kind, low, more: {"type": kind, "minimum": low, "maximum": low + more},
        st.sampled_from(["integer", "number"]),
        number,
        st.integers(0, 40),
    )
    patterns = st.sampled_from(["^[a-z]{2,4}$", "^(x|yy)*$", "^[0-9]+-[0-9]+$", "b"]).map(
        lambda pattern: {"type": "string", "pattern": pattern}
    )
    values = st.one_of(st.none(), st.booleans(), number, st.text(max_size=3))
    formats = st.sampled_from(["date", "uuid", "ipv4", "password"]).map(lambda f: {"type": "string", "format": f})
    return st.one_of(
        strings,
        numbers,
        patterns,
        formats,
        values.map(lambda value: {"const": value}),
        st.lists(values, min_size=1, max_size=4).map(lambda several: {"enum": several}),
        st.sampled_from(["boolean", "null"]).map(lambda kind: {"type": kind}),
        st.just({"type": ["integer", "null"], "minimum": 0}),
    )


def _inner(schemas: st.SearchStrategy[dict]) -> st.SearchStrategy[dict]:
    def an_object(properties, required, others):
        needed = [name for name, wanted in zip(properties, required, strict=False) if wanted]
        return {"type": "object", "properties": properties, "required": needed, "additionalProperties": others}

    objects = st.builds(
        an_object,
        st.dictionaries(NAMES, schemas, max_size=3),
        st.lists(st.booleans(), min_size=3, max_size=3),
        st.sampled_from([False, False, {"type": "integer"}]),
    )
    arrays = st.builds(
        lambda items, low, more: {"type": "array", "items": items, "minItems": low, "maxItems": low + more},
        schemas,
        st.integers(0, 2),
        st.integers(0, 2),
    )
    tuples = st.lists(schemas, min_size=1, max_size=2).map(
        lambda several: {"type": "array", "prefixItems": several, "items": False}
    )
    return st.one_of(
        objects,
        objects,
        arrays,
        tuples,
        st.lists(schemas, min_size=1, max_size=3).map(lambda several: {"anyOf": several}),
        st.lists(objects, min_size=1, max_size=2).map(lambda several: {"allOf": several}),
        schemas.map(
            lambda schema: {"$defs": {"d": schema}, "type": "array", "items": {"$ref": "#/$defs/d"}, "maxItems": 2}
        ),
    )


SCHEMAS = st.recursive(leaves(), _inner, max_leaves=8)
