// Sums over ranks through memory that the GPUs of one host share over NVLink (or PCIe); all_reduce.py has the method.
//
// Memory of a rank: a page of state, then four regions of ``lines`` lines of 16 bytes: what others push to be summed,
// for even and for odd calls, and sums that others push, for even and for odd calls. A word of 4 bytes that is nothing
// but ones is empty. No number is: the one NaN that looks so is sent as another. So a reader that finds no empty word in
// a line has all of it, and empties it for the call after the next. Nothing else is waited for, no fence and no barrier.
//
// Why two sets of regions are enough: a rank pushes for call e + 2 when its call e + 1 has ended. That took something
// from every other rank's call e + 1, which each of them began when its own call e had ended, and so had read and
// emptied all lines of call e. Calls follow each other on one stream, and wait for the kernel before (dependent launch).

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

namespace {

constexpr int kMostRanks = 8;
constexpr int kStateBytes = 256;  // before the lines: how many calls have ended, and what else a rank keeps
constexpr uint32_t kEmpty = 0xFFFFFFFF, kOtherNaN = 0x7FFF7FFF;
constexpr int kThreads = 512;
constexpr int kVectors = 2;     // of 16 bytes, that a thread has of a row to be normalised
constexpr int kPatience = 1 << 16;  // reads of a line, between two looks at ``stop``

struct State {
  uint32_t calls;  // that have ended
  uint32_t begun;  // blocks of this call that have read that
};

struct Peers {
  char* memory[kMostRanks];  // of each rank, by addresses of this GPU
  const volatile int* stop;  // memory of the host: not 0 when a rank is gone and nobody should wait for it
  long long lines;
  int ranks, rank;  // ``rank``: of the first row of blocks; others follow where one GPU plays them all
};

struct Work {
  const uint4 *x, *residual, *weight;
  uint4 *out, *total;
  long long vectors;  // in all
  int rows, width;    // a row has ``width`` vectors
  float eps;
  int norm, two_shot, delay;
};

__device__ __forceinline__ void store(uint4* to, uint4 v) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ __forceinline__ uint32_t full(uint32_t word) { return word == kEmpty ? kOtherNaN : word; }

__device__ __forceinline__ void put(uint4* to, uint4 v) {
  store(to, make_uint4(full(v.x), full(v.y), full(v.z), full(v.w)));
}

__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ uint4 look(const uint4* from) {
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}

__device__ __forceinline__ bool here(uint4 v) {
  return v.x != kEmpty && v.y != kEmpty && v.z != kEmpty && v.w != kEmpty;
}

__device__ __forceinline__ void empty(uint4* line) { store(line, make_uint4(kEmpty, kEmpty, kEmpty, kEmpty)); }

__device__ __forceinline__ bool stopped(const Peers& peers, int& looks) {
  return ++looks % kPatience == 0 && *peers.stop;
}

// What stands, or will stand, in a line, which is then empty.
__device__ __forceinline__ uint4 take(uint4* from, const Peers& peers) {
  int looks = 0;
  uint4 v;
  do v = look(from);
  while (!here(v) && !stopped(peers, looks));
  empty(from);
  return v;
}

template <typename T>
struct Numbers;

template <>
struct Numbers<float> {
  static constexpr int kCount = 4;
  static __device__ __forceinline__ void unpack(uint4 v, float* to) {
    to[0] = __uint_as_float(v.x), to[1] = __uint_as_float(v.y);
    to[2] = __uint_as_float(v.z), to[3] = __uint_as_float(v.w);
  }
  static __device__ __forceinline__ uint4 pack(const float* from) {
    return make_uint4(__float_as_uint(from[0]), __float_as_uint(from[1]), __float_as_uint(from[2]),
                      __float_as_uint(from[3]));
  }
};

template <>
struct Numbers<__nv_bfloat16> {
  static constexpr int kCount = 8;
  static __device__ __forceinline__ void unpack(uint4 v, float* to) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      to[2 * i] = __uint_as_float(words[i] << 16);
      to[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
    }
  }
  static __device__ __forceinline__ uint32_t two(float low, float high) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&both);
  }
  static __device__ __forceinline__ uint4 pack(const float* from) {
    return make_uint4(two(from[0], from[1]), two(from[2], from[3]), two(from[4], from[5]), two(from[6], from[7]));
  }
};

template <>
struct Numbers<__half> {
  static constexpr int kCount = 8;
  static __device__ __forceinline__ void unpack(uint4 v, float* to) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float2 both = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
      to[2 * i] = both.x, to[2 * i + 1] = both.y;
    }
  }
  static __device__ __forceinline__ uint32_t two(float low, float high) {
    const __half2 both = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&both);
  }
  static __device__ __forceinline__ uint4 pack(const float* from) {
    return make_uint4(two(from[0], from[1]), two(from[2], from[3]), two(from[4], from[5]), two(from[6], from[7]));
  }
};

// One call on one rank: the regions that it uses, and where a vector of a rank stands in them.
template <typename T, int kRanks>
struct Call {
  using N = Numbers<T>;
  static constexpr int kAtOnce = kRanks < 4 ? kRanks : 4;  // ranks whose lines are read together
  const Peers& peers;
  const Work& work;
  int rank;
  uint32_t number;  // of the call
  long long share;  // vectors that a rank sums when each sums some

  __device__ __forceinline__ uint4* region(int of, int which) const {
    uint4* first = reinterpret_cast<uint4*>(peers.memory[of] + kStateBytes);
    return first + (2 * which + (number & 1)) * peers.lines;
  }

  // Give other ranks what they sum.
  __device__ __forceinline__ void push(long long i, uint4 own) const {
    if (kRanks > 2 && work.two_shot) {
      const int owner = (int)(i % peers.ranks);
      if (owner != rank) put(region(owner, 0) + rank * share + i / peers.ranks, own);
      return;
    }
#pragma unroll
    for (int r = 0; r < kRanks; r++)
      if (r < peers.ranks && r != rank) put(region(r, 0) + rank * work.vectors + i, own);
  }

  // The sum over all ranks, in their order, rounded once.
  __device__ __forceinline__ uint4 sum(long long place, long long stride, uint4 own) const {
    uint4* from = region(rank, 0) + place;
    float total[N::kCount], one[N::kCount];
#pragma unroll
    for (int first = 0; first < kRanks; first += kAtOnce) {
      uint4 a[kAtOnce];
      int looks = 0;
      bool all;
      do {
        all = true;
#pragma unroll
        for (int j = 0; j < kAtOnce; j++) {
          const int r = first + j;
          if (r >= peers.ranks || r == rank) continue;
          a[j] = look(from + r * stride);
        }
#pragma unroll
        for (int j = 0; j < kAtOnce; j++)
          if (first + j < peers.ranks && first + j != rank) all = all && here(a[j]);
      } while (!all && !stopped(peers, looks));
#pragma unroll
      for (int j = 0; j < kAtOnce; j++) {
        if (first + j >= peers.ranks) continue;
        if (first + j != rank) empty(from + (first + j) * stride);
        N::unpack(first + j == rank ? own : a[j], one);
#pragma unroll
        for (int n = 0; n < N::kCount; n++) total[n] = first + j ? total[n] + one[n] : one[n];
      }
    }
    return N::pack(total);
  }

  // Sum what is this rank's to sum, and give it to all.
  __device__ __forceinline__ void spread(long long i, uint4 own) const {
    if (i % peers.ranks != rank) return;
    const uint4 total = sum(i / peers.ranks, share, own);
#pragma unroll
    for (int r = 0; r < kRanks; r++)
      if (r < peers.ranks) put(region(r, 1) + rank * share + i / peers.ranks, total);
  }

  __device__ __forceinline__ uint4 result(long long i, uint4 own) const {
    if (kRanks == 2 || !work.two_shot) return sum(i, work.vectors, own);
    return take(region(rank, 1) + i % peers.ranks * share + i / peers.ranks, peers);
  }

  // For tests: ranks and blocks fall apart in time, otherwise in each call.
  __device__ __forceinline__ void dawdle(int phase) const {
#if __CUDA_ARCH__ >= 700
    if (!work.delay) return;
    uint32_t h = number * 2654435761u ^ (rank * 97 + phase) * 40503u ^ (blockIdx.x * 131 + threadIdx.x / 32) * 2246822519u;
    h ^= h >> 15, h *= 2246822519u, h ^= h >> 13;
    for (uint32_t left = h % work.delay; left; left -= min(left, 100000u)) __nanosleep(min(left, 100000u));
#endif
  }
};

__device__ __forceinline__ float over_block(float value) {
  __shared__ float shares[kThreads / 32];
#pragma unroll
  for (int lanes = 16; lanes; lanes /= 2) value += __shfl_xor_sync(0xFFFFFFFFu, value, lanes);
  __syncthreads();  // the shares of the row before have been read
  if (threadIdx.x % 32 == 0) shares[threadIdx.x / 32] = value;
  __syncthreads();
  value = shares[threadIdx.x % (kThreads / 32)];
#pragma unroll
  for (int lanes = kThreads / 64; lanes; lanes /= 2) value += __shfl_xor_sync(0xFFFFFFFFu, value, lanes);
  return value;
}

template <typename T, int kRanks>
__global__ void __launch_bounds__(kThreads, kRanks == 2 ? 2 : 1)
    all_reduce(const __grid_constant__ Peers peers, const __grid_constant__ Work work) {
  using N = Numbers<T>;
  wait_for_previous();
  let_next_begin();
  const int rank = peers.rank + blockIdx.y;
  State* state = reinterpret_cast<State*>(peers.memory[rank]);
  const uint32_t number = *(volatile uint32_t*)&state->calls + 1;
  const long long first = blockIdx.y * work.vectors;
  const uint4 *x = work.x + first, *residual = work.norm ? work.residual + first : nullptr;
  uint4 *out = work.out + first, *total = work.norm ? work.total + first : nullptr;
  const Call<T, kRanks> call = {peers, work, rank, number, (work.vectors + peers.ranks - 1) / peers.ranks};

  call.dawdle(0);
  for (long long row = blockIdx.x; row < work.rows; row += gridDim.x)
    for (int v = threadIdx.x; v < work.width; v += kThreads) {
      const long long i = row * work.width + v;
      if (i < work.vectors) call.push(i, x[i]);
    }
  __syncthreads();  // all threads have read the number of calls ...
  if (threadIdx.x == 0 && (gridDim.x == 1 || atomicAdd(&state->begun, 1) + 1 == gridDim.x)) {  // ... of all blocks
    state->begun = 0;
    state->calls = number;
  }
  if (kRanks > 2 && work.two_shot) {
    call.dawdle(1);
    for (long long row = blockIdx.x; row < work.rows; row += gridDim.x)
      for (int v = threadIdx.x; v < work.width; v += kThreads) {
        const long long i = row * work.width + v;
        if (i < work.vectors) call.spread(i, x[i]);
      }
  }
  call.dawdle(2);
  for (long long row = blockIdx.x; row < work.rows; row += gridDim.x) {
    if (!work.norm) {
      for (int v = threadIdx.x; v < work.width; v += kThreads) {
        const long long i = row * work.width + v;
        if (i < work.vectors) out[i] = call.result(i, x[i]);
      }
      continue;
    }
    uint4 kept[kVectors], weights[kVectors];
    float squares = 0.0f;
#pragma unroll
    for (int k = 0; k < kVectors; k++) {  // on their way while the other ranks' numbers are
      const int v = threadIdx.x + k * kThreads;
      if (v >= work.width) continue;
      kept[k] = residual[row * work.width + v];
      weights[k] = work.weight[v];
    }
#pragma unroll
    for (int k = 0; k < kVectors; k++) {
      const int v = threadIdx.x + k * kThreads;
      if (v >= work.width) continue;
      const long long i = row * work.width + v;
      float sum[N::kCount], stream[N::kCount];
      N::unpack(kept[k], stream);
      N::unpack(call.result(i, x[i]), sum);
#pragma unroll
      for (int j = 0; j < N::kCount; j++) stream[j] += sum[j];
      total[i] = kept[k] = N::pack(stream);
      N::unpack(kept[k], stream);
#pragma unroll
      for (int j = 0; j < N::kCount; j++) squares += stream[j] * stream[j];
    }
    const float scale = 1.0f / sqrtf(over_block(squares) / (work.width * N::kCount) + work.eps);
#pragma unroll
    for (int k = 0; k < kVectors; k++) {
      const int v = threadIdx.x + k * kThreads;
      if (v >= work.width) continue;
      float stream[N::kCount], weight[N::kCount];
      N::unpack(kept[k], stream);
      N::unpack(weights[k], weight);
#pragma unroll
      for (int j = 0; j < N::kCount; j++) stream[j] = stream[j] * scale * weight[j];
      out[row * work.width + v] = N::pack(stream);
    }
  }
}

template <typename T, int kRanks>
int launch(const Peers& peers, const Work& work, int played, int dependent, cudaStream_t stream) {
  int device, multiprocessors;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return (int)error;
  // Blocks wait for each other, so all must run at the same time.
  const int most = multiprocessors * (kRanks == 2 ? 2 : 1) / played;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(work.rows < most ? work.rows : most, played);
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = dependent ? 1 : 0;
  return (int)cudaLaunchKernelEx(&config, all_reduce<T, kRanks>, peers, work);
}

template <typename T>
int launch(const Peers& peers, const Work& work, int played, int dependent, cudaStream_t stream) {
  if (peers.ranks <= 2) return launch<T, 2>(peers, work, played, dependent, stream);
  if (peers.ranks <= 4) return launch<T, 4>(peers, work, played, dependent, stream);
  return launch<T, 8>(peers, work, played, dependent, stream);
}

}  // namespace

// out = the sum of x over ``ranks``; with ``norm`` total = residual + that, and out = its RMSNorm. ``played``: how many
// ranks this GPU is, their tensors one behind the other. ``dtype``: 0 float32, 1 bfloat16, 2 float16. All pointers at
// multiples of 16 bytes. ``memory``: ``ranks`` pointers. ``delay``: the most nanoseconds
// to wait here and there.
extern "C" int transect_all_reduce(const void* memory, int ranks, int rank, int played, long long lines,
                                   const void* stop, const void* x, const void* residual, const void* weight, void* out,
                                   void* total, long long vectors, int width, float eps, int dtype, int norm,
                                   int two_shot, int dependent, int delay, void* stream) {
  const long long share = (vectors + ranks - 1) / ranks;
  const long long needed = (two_shot ? share : vectors) * ranks;
  if (ranks < 2 || ranks > kMostRanks || vectors < ranks || needed > lines) return -1;
  if (norm && (width > kThreads * kVectors || vectors % width)) return -1;
  Peers peers = {};
  for (int r = 0; r < ranks; r++) peers.memory[r] = ((char* const*)memory)[r];
  peers.stop = (const volatile int*)stop;
  peers.lines = lines, peers.ranks = ranks, peers.rank = rank;
  const Work work = {(const uint4*)x, (const uint4*)residual, (const uint4*)weight, (uint4*)out, (uint4*)total, vectors,
                     (int)((vectors + width - 1) / width), width, eps, norm, two_shot, delay};
  if (dtype == 0) return launch<float>(peers, work, played, dependent, (cudaStream_t)stream);
  if (dtype == 1) return launch<__nv_bfloat16>(peers, work, played, dependent, (cudaStream_t)stream);
  return launch<__half>(peers, work, played, dependent, (cudaStream_t)stream);
}

// Memory with empty lines, that other processes can open by its handle (64 bytes).
extern "C" int transect_peer_make(long long bytes, void* pointer, void* handle) {
  cudaError_t error = cudaMalloc((void**)pointer, bytes);
  if (error == cudaSuccess) error = cudaMemset(*(void**)pointer, 0xFF, bytes);
  if (error == cudaSuccess) error = cudaMemset(*(void**)pointer, 0, kStateBytes);
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  if (error == cudaSuccess) error = cudaIpcGetMemHandle((cudaIpcMemHandle_t*)handle, *(void**)pointer);
  return (int)error;
}

extern "C" int transect_peer_open(const void* handle, void* pointer) {
  const cudaIpcMemHandle_t theirs = *(const cudaIpcMemHandle_t*)handle;
  return (int)cudaIpcOpenMemHandle((void**)pointer, theirs, cudaIpcMemLazyEnablePeerAccess);
}

extern "C" int transect_peer_close(void* theirs) { return (int)cudaIpcCloseMemHandle(theirs); }

extern "C" int transect_peer_free(void* own) { return (int)cudaFree(own); }
