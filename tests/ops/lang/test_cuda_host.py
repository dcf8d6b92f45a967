"""The machine that runs CUDA C++ sources on a processor: what it makes of them."""

import cuda_host


def test_asm_becomes_calls():
    text = (
        'asm volatile("{\\n.reg .pred done;\\nagain:\\nx.y::z.b64 done, [%0];\\n@!done bra again;\\n}" ::"r"(f(a, b)));'
    )
    assert cuda_host.translated(text) == (
        '{ bool done; again: machine::fail("x.y::z.b64 is not known"); if (!done) goto again; }'
    )
    text = 'asm("ld.shared.v2.u32 {%0, %1}, "\n    "[%2];" : "=r"(v.x), "=r"(v.y) : "r"(f(a, b)));'
    assert cuda_host.translated(text) == "{ ptx::ld_shared_v2_u32((v.x), (v.y), (f(a, b))); }"


def test_shared_memory_is_the_blocks():
    text = "extern __shared__ unsigned char all[];\n__shared__ alignas(8) uint64_t one[N / 2][3];"
    assert cuda_host.translated(text) == (
        "unsigned char* all = machine::dynamic();\nauto& one = machine::fixed<uint64_t[N / 2][3], 0>();"
    )
