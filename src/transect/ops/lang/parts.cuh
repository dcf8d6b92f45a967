// For a source that nvcc compiles in several parts at once, each with some of its kernels (cuda_build.py), because
// somebody waits for it. Such a source says ``#define TRANSECT_PARTS n``, and launches each of its kernels in a line of
// its own by TRANSECT_HERE(launch): that launches in the part that the line's number gives, where the kernel is
// compiled, and is -1 in the others, where it is not. A launcher's other parts are asked as long as the answer is -1.
// Compiled in one piece, every line is in it.

#pragma once

#ifdef TRANSECT_PART
#define TRANSECT_IN_PART ((__LINE__) % TRANSECT_OF == TRANSECT_PART)
#else
#define TRANSECT_IN_PART true
#endif

template <bool HERE>
struct InPart {
  static constexpr bool value = HERE;
};

#define TRANSECT_HERE(...)                                     \
  [&](auto here) -> int {                                      \
    if constexpr (decltype(here)::value) return __VA_ARGS__;   \
    return -1;                                                 \
  }(InPart<TRANSECT_IN_PART>())
