// The threads of a CUDA launch on a processor, one at a time in an order that a seed draws: fibers that change only
// where a thread waits for others. Bulk copies land at some later moment; what they will overwrite is spoilt at once,
// and shared memory is spoilt at first, so what is read too early shows in the results.
//
// A launch fails, with a sentence, where threads wait for ever, a barrier is passed by some threads of a warp only, an
// address in shared memory lies outside of what was asked for, or one for 16 bytes is no multiple of 16.

#pragma once

#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#endif

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

inline dim3 threadIdx, blockIdx, blockDim, gridDim;  // of the thread that runs

namespace machine {

constexpr size_t kStack = 64 * 1024;
constexpr uint32_t kStatics = 1024, kDynamic = 8192 + 128, kMost = 227 * 1024;  // where shared memory begins; its size
constexpr unsigned char kSpoilt = 0xFF;                                         // of floats: NaN

// Orders memory for a race detector, where one looks on: what came before a release is seen after the acquire.
inline void release(void* of) {
#ifdef __SANITIZE_THREAD__
  __tsan_release(of);
#endif
}
inline void acquire(void* of) {
#ifdef __SANITIZE_THREAD__
  __tsan_acquire(of);
#endif
}

// Threads that come together: of a warp (or a part of one) or a warpgroup, each with a letter for the others, or of a
// block.
struct Meeting {
  int come = 0, turn = 0;
  std::vector<struct Fiber*> waiting;
  alignas(16) unsigned char letters[2][4096];
};

struct Block {
  dim3 index;
  int alive;
  uint32_t statics = kStatics, dynamic;
  std::unique_ptr<unsigned char[]> held;
  unsigned char* memory;
  std::map<int, uint32_t> static_of;  // by number
  Meeting all;
  std::map<std::pair<int, unsigned>, Meeting> parts;  // by warp and mask
  std::map<int, Meeting> groups, named;               // by warpgroup; by number
  std::map<uint32_t, std::vector<struct Fiber*>> at_barrier;
};

struct Piece {  // of 16 bytes, copied by a thread of its own accord
  unsigned char* to;
  const void* from;
  int bytes;  // the rest is zeros
};

struct Late {  // what the kernel before writes, and what threads find there that have not waited for it
  const unsigned char *place, *old;
  size_t bytes;
};
inline std::vector<Late> late;

struct Fiber {
  ucontext_t context;
  void* stack;
  Block* block;
  dim3 index;
  bool waited = false;      // for the kernel before
  void* watched = nullptr;  // by a race detector
  std::vector<Piece> asked;                 // since the last group of copies
  std::deque<std::vector<Piece>> on_their_way;  // groups of copies
};

struct Copy {
  Block* block;
  uint32_t to, barrier;
  const unsigned char* from;
  std::vector<unsigned char> bytes;  // empty: as they are when it lands
  int count;
};

struct Launch {
  dim3 grid, threads;
  unsigned cluster;                  // blocks of one
  std::map<unsigned, Meeting> clusters;
  std::function<void()> kernel;
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Fiber*> ready;
  std::vector<Copy> copies;
  ucontext_t outside;
  long spins = 0;
  int alive;
};

inline Launch* launch;
inline Fiber* now;
inline uint64_t seed = 1;
inline std::string said;

inline uint64_t draw() {
  seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
  return seed;
}

[[noreturn]] inline void fail(const std::string& why) {
  said = why + " (block " + std::to_string(now->block->index.x) + ", thread " + std::to_string(now->index.x) + ")";
  setcontext(&launch->outside);
  __builtin_unreachable();
}

inline unsigned char* shared(uint32_t address, uint32_t bytes, uint32_t multiple) {
  const Block& b = *now->block;
  if (address % multiple) fail("shared address " + std::to_string(address) + " is no multiple of " + std::to_string(multiple));
  if (!((address >= kStatics && address + bytes <= b.statics) ||
        (address >= kDynamic && address + bytes <= kDynamic + b.dynamic)))
    fail("shared address " + std::to_string((int)(address - kDynamic)) + " of " + std::to_string(b.dynamic));
  return b.memory + address;
}

// What a kernel may read by copies and by ``__ldcg``: address and bytes; empty: anything.
inline std::map<uintptr_t, size_t> readable_places;

inline void readable(const void* from, size_t bytes) {
  if (readable_places.empty()) return;
  auto after = readable_places.upper_bound((uintptr_t)from);
  if (after == readable_places.begin()) fail("a read before all tensors");
  const auto [begin, size] = *--after;
  if ((uintptr_t)from + bytes > begin + size) fail("a read of " + std::to_string(bytes) + " bytes outside of all tensors");
}

// mbarriers: the phase, the arrivals of a phase, those that are missing, and the bytes that are.
struct Barrier {
  uint64_t phase : 1, count : 15, missing : 15, unused : 1;
  int64_t bytes : 32;
};
static_assert(sizeof(Barrier) == 8);

inline Barrier* barrier_at(Block& block, uint32_t address) { return (Barrier*)(block.memory + address); }

inline void turn_if_complete(Block& block, uint32_t address) {
  Barrier* b = barrier_at(block, address);
  if (b->missing || b->bytes) return;
  b->phase ^= 1, b->missing = b->count;
  release(b);
  for (Fiber* f : block.at_barrier[address]) launch->ready.push_back(f);
  block.at_barrier[address].clear();
  launch->spins = 0;
}

inline void land(size_t which) {
  Copy copy = std::move(launch->copies[which]);
  launch->copies[which] = std::move(launch->copies.back()), launch->copies.pop_back();
  memcpy(copy.block->memory + copy.to, copy.bytes.empty() ? copy.from : copy.bytes.data(), copy.count);
  barrier_at(*copy.block, copy.barrier)->bytes -= copy.count;
  turn_if_complete(*copy.block, copy.barrier);
}

// Another thread goes on; this one does when it is ready and drawn.
inline void leave() {
  Fiber* before = now;
  while (true) {
    if (!launch->copies.empty() && (launch->ready.empty() || draw() % 4 == 0)) land(draw() % launch->copies.size());
    else if (!launch->ready.empty()) break;
    else fail("all threads wait for each other");
  }
  std::swap(launch->ready[draw() % launch->ready.size()], launch->ready.back());
  now = launch->ready.back();
  launch->ready.pop_back();
  threadIdx = now->index, blockIdx = now->block->index;
  if (now == before) return;
#ifdef __SANITIZE_THREAD__
  __tsan_switch_to_fiber(now->watched, 1);
#endif
  swapcontext(&before->context, &now->context);
}

// What polls memory lets others go on.
inline void spin() {
  if (++launch->spins > 1000000) fail("it polls for ever");
  launch->ready.push_back(now);
  leave();
}

// All ``expected`` threads have come.
inline void come(Meeting& meeting, int expected) {
  release(&meeting);
  if (++meeting.come < expected) {
    meeting.waiting.push_back(now);
    leave();
  } else {
    meeting.come = 0, meeting.turn ^= 1, launch->spins = 0;
    for (Fiber* f : meeting.waiting) launch->ready.push_back(f);
    meeting.waiting.clear();
  }
  acquire(&meeting);
}

inline void all_threads() { come(now->block->all, now->block->alive); }

// Block ``rank`` of the cluster of the thread that runs.
inline Block& of_cluster(unsigned rank) {
  if (rank >= launch->cluster) fail("block " + std::to_string(rank) + " of a cluster of " + std::to_string(launch->cluster));
  Block& block = *launch->blocks[now->block->index.x / launch->cluster * launch->cluster + rank];
  if (!block.alive) fail("it reaches into the shared memory of a block that has ended");
  return block;
}

inline void all_threads_of_cluster() {
  int alive = 0;
  for (unsigned rank = 0; rank < launch->cluster; rank++) alive += of_cluster(rank).alive;
  come(launch->clusters[now->block->index.x / launch->cluster], alive);
}

inline int lane() { return now->index.x % 32; }

// The letters of ``count`` threads to each other; they may be read until the same threads have met twice again.
template <typename T>
const T* letters_of(Meeting& m, int count, int place, const T& own) {
  T* letters = (T*)m.letters[m.turn];
  static_assert(sizeof(T) <= 32);
  letters[place] = own;
  come(m, count);
  return letters;
}

// Of a warp's lanes.
template <typename T>
const T* exchanged(unsigned mask, const T& own) {
  if (!(mask >> lane() & 1)) fail("a lane that its own mask leaves out");
  return letters_of(now->block->parts[{(int)now->index.x / 32, mask}], __builtin_popcount(mask), lane(), own);
}

// Of the 128 threads of a warpgroup.
template <typename T>
const T* exchanged_in_group(const T& own) {
  return letters_of(now->block->groups[now->index.x / 128], 128, now->index.x % 128, own);
}

inline void begin() {
  launch->kernel();
  Block& block = *now->block;
  block.alive--;
  launch->spins = 0;
  if (!block.alive)
    for (const Copy& copy : launch->copies)
      if (copy.block == &block) fail("a copy that lands after its block has ended");
  if (block.all.come && block.all.come == block.alive) fail("some threads ended, others wait for the block");
  if (--launch->alive == 0) setcontext(&launch->outside);
  leave();
}

// Runs it; false: ``said`` says why not.
inline bool run(dim3 grid, dim3 threads, uint32_t dynamic, unsigned cluster, std::function<void()> kernel) {
  Launch own;
  own.cluster = cluster;
  own.grid = grid, own.threads = threads, own.kernel = kernel;
  said.clear();
  const int count = own.alive = grid.x * threads.x;
  unsigned char* stacks = (unsigned char*)mmap(nullptr, count * kStack, PROT_READ | PROT_WRITE,
                                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  for (unsigned b = 0; b < grid.x; b++) {
    auto block = std::make_unique<Block>();
    block->index = dim3(b), block->alive = threads.x, block->dynamic = dynamic;
    const size_t bytes = kDynamic + dynamic;
    block->held.reset(new unsigned char[bytes + 1024]);
    block->memory = block->held.get() + (-(uintptr_t)block->held.get() & 1023);
    memset(block->memory, kSpoilt, bytes);
    own.blocks.push_back(std::move(block));
  }
  for (int i = 0; i < count; i++) {
    auto fiber = std::make_unique<Fiber>();
    fiber->block = own.blocks[i / threads.x].get(), fiber->index = dim3(i % threads.x, 0, 0);
    fiber->stack = stacks + i * kStack;
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = fiber->stack, fiber->context.uc_stack.ss_size = kStack;
    fiber->context.uc_link = nullptr;
    makecontext(&fiber->context, begin, 0);
#ifdef __SANITIZE_THREAD__
    fiber->watched = __tsan_create_fiber(0);
#endif
    own.ready.push_back(fiber.get());
    own.fibers.push_back(std::move(fiber));
  }
  launch = &own;
  volatile bool over = false;
#ifdef __SANITIZE_THREAD__
  void* self = __tsan_get_current_fiber();
#endif
  getcontext(&own.outside);
  if (!over) {
    over = true;
    now = own.ready.back(), own.ready.pop_back();
    threadIdx = now->index, blockIdx = now->block->index, blockDim = threads, gridDim = grid;
#ifdef __SANITIZE_THREAD__
    __tsan_switch_to_fiber(now->watched, 0);
#endif
    setcontext(&now->context);
  }
#ifdef __SANITIZE_THREAD__
  __tsan_switch_to_fiber(self, 0);
  for (auto& f : own.fibers) __tsan_destroy_fiber(f->watched);
#endif
  for (auto& b : own.blocks)
    if (said.empty() && b->statics - kStatics + b->dynamic > kMost) said = "more than 227 KiB of shared memory";
  munmap(stacks, count * kStack);
  launch = nullptr;
  return said.empty();
}

// ``__shared__`` arrays of a fixed size, by their number in the source.
template <typename T, int NUMBER>
T& fixed() {
  Block& block = *now->block;
  auto [place, first] = block.static_of.try_emplace(NUMBER, block.statics);
  if (first) block.statics += (sizeof(T) + 127) / 128 * 128;
  if (block.statics > kDynamic) fail("room for fixed shared memory in the machine");
  return *(T*)(block.memory + place->second);
}

inline unsigned char* dynamic() { return now->block->memory + kDynamic; }

}  // namespace machine
