// Counts cache lines that a C++ program fetches. The program is compiled with -fsanitize=thread, so that its compiler
// puts a call before every load and store; these functions take the calls, in place of the sanitizer's own library.
//
// The cache has 64 lines of 64 bytes, and gives up the one that was used least recently. It is smaller than a real L1
// cache: a small input then shows what a large one would do. Local variables that stay in registers are not counted.

#include <cstdint>
#include <cstring>

namespace {
constexpr int LINES = 64;
std::uintptr_t lines[LINES];  // the last used comes first
long fetched = 0;

inline void touch(std::uintptr_t line) {
    if (lines[0] == line) return;
    int at = 1;
    while (at < LINES && lines[at] != line) ++at;
    if (at == LINES) ++fetched, --at;
    std::memmove(lines + 1, lines, at * sizeof lines[0]);
    lines[0] = line;
}

inline void access(const void* place, unsigned long size) {
    if (size == 0) return;
    std::uintptr_t address = reinterpret_cast<std::uintptr_t>(place);
    for (std::uintptr_t line = address / 64; line <= (address + size - 1) / 64; ++line) touch(line);
}
}  // namespace

extern "C" {
long transect_fetched_bytes() { return 64 * fetched; }

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
#define SIZED(kind)                                                \
    void __tsan_##kind##1(void* place) { access(place, 1); }       \
    void __tsan_##kind##2(void* place) { access(place, 2); }       \
    void __tsan_##kind##4(void* place) { access(place, 4); }       \
    void __tsan_##kind##8(void* place) { access(place, 8); }       \
    void __tsan_##kind##16(void* place) { access(place, 16); }     \
    void __tsan_##kind##_range(void* place, unsigned long size) { access(place, size); }
SIZED(read)
SIZED(write)
SIZED(unaligned_read)
SIZED(unaligned_write)
SIZED(volatile_read)
SIZED(volatile_write)
void* __tsan_memcpy(void* to, const void* from, unsigned long size) {
    access(from, size), access(to, size);
    return std::memcpy(to, from, size);
}
void* __tsan_memmove(void* to, const void* from, unsigned long size) {
    access(from, size), access(to, size);
    return std::memmove(to, from, size);
}
void* __tsan_memset(void* to, int value, unsigned long size) {
    access(to, size);
    return std::memset(to, value, size);
}
}
