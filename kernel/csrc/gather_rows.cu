// Gathers rows of the latent KV cache into bf16, the first thing that sparse MLA does with it.
// A plain C ABI: no torch, no Python, so one library serves every torch and every Python.
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <cstdint>

namespace {

constexpr int kWidth = 512;    // values a row
constexpr int kThreads = 128;  // each thread moves kWidth / kThreads values

__device__ float load(const __nv_bfloat16* row, int i) { return __bfloat162float(row[i]); }
__device__ float load(const __nv_fp8_e4m3* row, int i) { return static_cast<float>(row[i]); }

// One block a gathered row. A masked or impossible index gives zeros and reads nothing.
template <typename T>
__global__ void gather(const T* kv, int64_t stride, int64_t rows, const int32_t* indices,
                       float scale, __nv_bfloat16* out) {
  const int64_t index = indices[blockIdx.x];
  const bool is_valid = index >= 0 && index < rows;
  __nv_bfloat16* target = out + static_cast<int64_t>(blockIdx.x) * kWidth;
  for (int i = threadIdx.x; i < kWidth; i += kThreads) {
    const float value = is_valid ? load(kv + index * stride, i) * scale : 0.0f;
    target[i] = __float2bfloat16_rn(value);
  }
}

}  // namespace

// kv [rows, 512] bf16 (kind 0) or e4m3 (kind 1), `stride` in elements; indices [count] int32, any
// negative one is masked; out [count, 512] bf16. Returns a cudaError_t. Launches on `stream` only.
extern "C" __attribute__((visibility("default"))) int glm53_gather_rows(
    const void* kv, int kind, int64_t stride, int64_t rows, const int32_t* indices, int64_t count,
    float scale, void* out, void* stream) {
  if (count == 0) return cudaSuccess;
  if ((kind != 0 && kind != 1) || count < 0 || count > INT32_MAX || stride < kWidth)
    return cudaErrorInvalidValue;
  auto* target = static_cast<__nv_bfloat16*>(out);
  auto* queue = static_cast<cudaStream_t>(stream);
  const auto blocks = static_cast<unsigned>(count);
  if (kind == 0)
    gather<<<blocks, kThreads, 0, queue>>>(static_cast<const __nv_bfloat16*>(kv), stride, rows,
                                           indices, scale, target);
  else
    gather<<<blocks, kThreads, 0, queue>>>(static_cast<const __nv_fp8_e4m3*>(kv), stride, rows,
                                           indices, scale, target);
  return static_cast<int>(cudaGetLastError());
}
