// Reads the rows that sparse MLA would read, in the same tiles and with the same copies, and does no
// attention: what it takes is the floor of any kernel that gathers. The rows' bits are XORed into
// one row a token, so that a test can tell that every byte came.
#include <cuda_runtime.h>
#include <cstdint>

namespace {

constexpr int kThreads = 256;
constexpr int kTileRows = 32;
constexpr int kSharedBytes = 96 * 1024;  // of the ring; sm_12x has 99 KB a block

__device__ __forceinline__ void copy16(uint32_t shared, const void* global, bool is_valid) {
  const int bytes = is_valid ? 16 : 0;  // 0 reads nothing and writes zeros
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void mix(uint4& sum, uint4 value) {
  sum.x ^= value.x;
  sum.y ^= value.y;
  sum.z ^= value.z;
  sum.w ^= value.w;
}

// Every block takes an equal, contiguous share of all tiles, so that no wave is partly filled. Each
// thread reads back only what it copied itself: no barrier. A warp reads 512 bytes of one row.
template <int kRowBytes>
__global__ void __launch_bounds__(kThreads) gather_only(
    const char* kv, int64_t row_stride, const int32_t* indices, int64_t index_stride, int tokens,
    int width, bool is_checked, uint32_t* sums) {
  constexpr int kGroups = kRowBytes / 512;         // warps side by side on one row
  constexpr int kStep = kThreads / 32 / kGroups;   // rows that all warps read at once
  constexpr int kCopies = kTileRows / kStep;       // by a thread for one tile
  constexpr int kStages = kSharedBytes / (kTileRows * kRowBytes);
  extern __shared__ __align__(128) uint4 ring[];

  const int warp = threadIdx.x / 32;
  const int column = warp % kGroups * 32 + threadIdx.x % 32;  // in pieces of 16 bytes
  const int first_row = warp / kGroups;
  const int tiles = (width + kTileRows - 1) / kTileRows;
  const int64_t total = static_cast<int64_t>(tokens) * tiles;
  const int64_t begin = total * blockIdx.x / gridDim.x;
  int left = static_cast<int>(total * (blockIdx.x + 1) / gridDim.x - begin);
  const auto base = static_cast<uint32_t>(__cvta_generic_to_shared(ring)) + threadIdx.x * 16;

  // Divisions are dear beside a tile; after these two, places are counted on.
  int token = static_cast<int>(begin / tiles), tile = static_cast<int>(begin % tiles);
  int ahead_left = left, ahead_tile = tile, ahead_stage = 0;
  const int32_t* list = indices + token * index_stride;
  int32_t ahead[kCopies];
  auto look = [&] {  // indices of a tile, one tile before they are needed
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int key = ahead_tile * kTileRows + first_row + i * kStep;
      ahead[i] = ahead_left > 0 && key < width ? list[key] : -1;
    }
    --ahead_left;
    if (++ahead_tile == tiles) {
      ahead_tile = 0;
      list += index_stride;
    }
  };
  auto issue = [&] {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int32_t row = ahead[i];
      const char* from = kv + (row < 0 ? 0 : row) * row_stride + column * 16;
      copy16(base + (ahead_stage * kCopies + i) * kThreads * 16, from, row >= 0);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
    ahead_stage = ahead_stage + 1 == kStages ? 0 : ahead_stage + 1;
    look();
  };

  look();
  for (int s = 0; s < kStages; ++s) issue();
  uint4 sum{};
  for (int stage = 0; left > 0; stage = stage + 1 == kStages ? 0 : stage + 1) {
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 1) : "memory");
#pragma unroll
    for (int i = 0; i < kCopies; ++i) mix(sum, ring[(stage * kCopies + i) * kThreads + threadIdx.x]);
    issue();
    if (--left > 0 && ++tile < tiles) continue;
    // When it is timed, nothing is to wait for its turn at one row; the values are needed all the same.
    const bool is_rare = (sum.x & sum.y & sum.z & sum.w) == ~0u;
    if (!is_checked && !is_rare) {
      tile = 0;
      ++token;
      continue;
    }
    uint32_t* to = sums + static_cast<int64_t>(token) * (kRowBytes / 4) + column * 4;
    atomicXor(to, sum.x);
    atomicXor(to + 1, sum.y);
    atomicXor(to + 2, sum.z);
    atomicXor(to + 3, sum.w);
    sum = uint4{};
    tile = 0;
    ++token;
  }
}

template <int kRowBytes>
cudaError_t launch(const char* kv, int64_t row_stride, const int32_t* indices, int64_t index_stride,
                   int tokens, int width, bool is_checked, uint32_t* sums, int blocks, int shared,
                   cudaStream_t stream) {
  auto* kernel = gather_only<kRowBytes>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  kernel<<<blocks, kThreads, shared, stream>>>(kv, row_stride, indices, index_stride, tokens, width,
                                               is_checked, sums);
  return cudaGetLastError();
}

}  // namespace

// kv: rows of `row_bytes` (1024 or 512), `row_stride` bytes apart, 16-byte aligned; indices
// [tokens, width] int32, `index_stride` apart, negative ones are skipped; sums [tokens, row_bytes/4]
// uint32, into which the rows of a token are XORed when `is_checked`. `shared` is at least 98,304 bytes; more keeps
// the number of blocks on a multiprocessor down. Returns a cudaError_t.
extern "C" __attribute__((visibility("default"))) int glm53_bench_gather(
    const void* kv, int row_bytes, int64_t row_stride, const int32_t* indices, int64_t index_stride,
    int tokens, int width, int is_checked, void* sums, int blocks, int shared, void* stream) {
  const auto* rows = static_cast<const char*>(kv);
  auto* out = static_cast<uint32_t*>(sums);
  auto* queue = static_cast<cudaStream_t>(stream);
  if (shared < kSharedBytes || blocks < 1) return cudaErrorInvalidValue;
  if (row_bytes == 1024)
    return launch<1024>(rows, row_stride, indices, index_stride, tokens, width, is_checked != 0,
                        out, blocks, shared, queue);
  if (row_bytes == 512)
    return launch<512>(rows, row_stride, indices, index_stride, tokens, width, is_checked != 0,
                       out, blocks, shared, queue);
  return cudaErrorInvalidValue;
}
